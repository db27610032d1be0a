# SPDX-License-Identifier: Apache-2.0
"""What may come next in an answer of a given shape: the protocol of a grammar, and the store that compiles grammars beside the work.

A `Grammar` is one answer's place in a grammar: mask, advance, clone. A `GrammarCompiler` (llguidance_grammar.py) makes the first one of a
spec; `GrammarStore` keeps the latest compiled ones and hands out clones. Neither torch nor a model is needed here, so that the API process
can refuse a bad schema before anything is queued.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Protocol, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from whalefall.core.errors import RequestError
from whalefall.core.structure import StructuredSpec

Bits: TypeAlias = npt.NDArray[np.int32]
"""One bit per id of the vocabulary, lowest bit first: the layout of `kernels.sampling.apply_bitmask`."""
COMPILE_LIMIT_S = 10.0
"""A grammar that takes longer to compile is refused."""
NOT_COMPILED = "bad_structured_output"


class GrammarFault(Exception):
    """A grammar that cannot be compiled; the message says why, for the client."""


class Grammar(Protocol):
    """One answer's place in a grammar. `advance` is called with every token of the answer in order; any of the others in between."""

    def clone(self) -> Self:
        """An independent place, the same as this one."""
        ...

    def advance(self, token_id: int) -> bool:
        """Take a token; False if it is not allowed here, and then `fault` is set."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Forget the latest tokens."""
        ...

    @property
    def is_complete(self) -> bool:
        """The answer may end here."""
        ...

    @property
    def is_finished(self) -> bool:
        """It must: only end-of-sequence may follow."""
        ...

    @property
    def fault(self) -> str | None:
        """Why this grammar cannot go on (a limit was met, a wrong token was taken); its masks are empty then."""
        ...


class GrammarCompiler(Protocol):
    def compile(self, spec: StructuredSpec) -> Grammar:
        """From any thread.

        Raises:
            GrammarFault: the spec is wrong, or asks for what is not supported.
        """
        ...

    def fill_masks(self, grammars: Sequence[Grammar], bits_MW: Bits) -> None:
        """Row i becomes what may come next for grammars[i]: end-of-sequence exactly where the answer may end. Work in parallel."""
        ...


class GrammarStore:
    """Compiled grammars by spec, the latest `max_entries` of them. Safe to use from any thread."""

    def __init__(
        self,
        make_compiler: Callable[[], GrammarCompiler],
        *,
        max_entries: int = 128,
        num_threads: int = 4,
        time_limit_s: float = COMPILE_LIMIT_S,
    ) -> None:
        """
        Args:
            make_compiler: called once, by the first spec, in a thread of the pool: reading a large vocabulary takes a second.
        """
        self.time_limit_s = time_limit_s
        self.num_compiled = 0
        self._make_compiler = make_compiler
        self._compiler: GrammarCompiler | None = None
        self._max_entries = max_entries
        self._num_threads = num_threads
        self._pool: ThreadPoolExecutor | None = None
        self._known: OrderedDict[tuple[str, str], Future[Grammar]] = OrderedDict()
        self._lock = threading.Lock()
        self._making = threading.Lock()

    def prepare(self, spec: StructuredSpec) -> Future[Grammar]:
        """Start to compile, or find what is compiled already. The future's grammar is shared: clone it."""
        with self._lock:
            future = self._known.get(spec.key)
            if future is None:
                self._pool = self._pool or ThreadPoolExecutor(self._num_threads, thread_name_prefix="whalefall-grammars")
                future = self._known[spec.key] = self._pool.submit(self._compile, spec)
                self._forget_oldest()
            self._known.move_to_end(spec.key)
            return future

    def check(self, spec: StructuredSpec) -> None:
        """Block until the spec is compiled.

        Raises:
            RequestError: it cannot be; `param` names the client's field.
        """
        self.outcome(spec, self.prepare(spec), self.time_limit_s)

    async def check_async(self, spec: StructuredSpec) -> None:
        """`check` for an event loop, which goes on meanwhile."""
        future = self.prepare(spec)
        waiter = asyncio.wrap_future(future)
        waiter.add_done_callback(lambda done: done.cancelled() or done.exception())  # looked at below, or by nobody if the client has left
        # The future outlives who waits for it: others may want the same grammar.
        await asyncio.wait([waiter], timeout=self.time_limit_s)
        self.outcome(spec, future)

    def grammar_for(self, spec: StructuredSpec) -> Grammar:
        """A place at the beginning of the spec's grammar; at once if it was prepared.

        Raises:
            RequestError: as `check`.
        """
        return self.outcome(spec, self.prepare(spec), self.time_limit_s).clone()

    def fill_masks(self, grammars: Sequence[Grammar], bits_MW: Bits) -> None:
        assert self._compiler is not None, "a grammar exists, so its compiler does"
        self._compiler.fill_masks(grammars, bits_MW)

    def outcome(self, spec: StructuredSpec, future: Future[Grammar], timeout_s: float = 0) -> Grammar:
        """What `prepare` came to; not compiled by now is too slow. Raises as `check`."""
        try:
            return future.result(timeout_s)
        except FutureTimeoutError:
            reason = f"took longer than {self.time_limit_s:g} s to compile: make it smaller"
        except GrammarFault as fault:
            reason = str(fault)
        raise RequestError(f"{spec.param}: {reason}", param=spec.param, code=NOT_COMPILED)

    def _compile(self, spec: StructuredSpec) -> Grammar:
        with self._making:
            self._compiler = self._compiler or self._make_compiler()
        grammar = self._compiler.compile(spec)
        self.num_compiled += 1
        return grammar

    def _forget_oldest(self) -> None:
        """One under way is never forgotten: the request that waits for it would start it anew."""
        for key in [key for key, future in self._known.items() if future.done()][: max(0, len(self._known) - self._max_entries)]:
            del self._known[key]
