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
from concurrent.futures import Future, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, Protocol, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from whalefall.core.errors import RequestError
from whalefall.core.structure import StructuredSpec
from whalefall.observe.log import get_logger

Bits: TypeAlias = npt.NDArray[np.int32]
"""One bit per id of the vocabulary, lowest bit first: the layout of `kernels.sampling.apply_bitmask`."""
log = get_logger(__name__)
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
        self._compiler: Future[GrammarCompiler] | None = None
        self._max_entries = max_entries
        self._num_threads = num_threads
        self._pool: ThreadPoolExecutor | None = None
        self._known: OrderedDict[tuple[str, str], Future[Grammar]] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def is_set_up(self) -> bool:
        """The vocabulary has been read. The time limit of a grammar does not count before."""
        return self._compiler is not None and self._compiler.done()

    def prepare(self, spec: StructuredSpec) -> Future[Grammar]:
        """Start to compile, or find what is compiled already. The future's grammar is shared: clone it."""
        with self._lock:
            future = self._known.get(spec.key)
            if future is None:
                if self._pool is None:
                    self._pool = ThreadPoolExecutor(self._num_threads, thread_name_prefix="whalefall-grammars")
                    self._compiler = self._pool.submit(self._make_compiler)
                future = self._known[spec.key] = self._pool.submit(self._compile, spec)
                self._forget_oldest()
            self._known.move_to_end(spec.key)
            return future

    def check(self, spec: StructuredSpec) -> None:
        """Block until the spec is compiled.

        Raises:
            RequestError: it cannot be; `param` names the client's field.
        """
        self._await(spec)

    async def check_async(self, spec: StructuredSpec) -> None:
        """`check` for an event loop, which goes on meanwhile."""
        future = self.prepare(spec)
        # The futures outlive who waits for them: others may want the same grammar.
        await _wait_for(self._set_up(), None)
        await _wait_for(future, self.time_limit_s)
        self.outcome(spec, future)

    def grammar_for(self, spec: StructuredSpec) -> Grammar:
        """A place at the beginning of the spec's grammar; at once if it was prepared.

        Raises:
            RequestError: as `check`.
        """
        return self._await(spec).clone()

    def fill_masks(self, grammars: Sequence[Grammar], bits_MW: Bits) -> None:
        self._set_up().result().fill_masks(grammars, bits_MW)

    def outcome(self, spec: StructuredSpec, future: Future[Grammar], timeout_s: float = 0) -> Grammar:
        """What `prepare` came to; not compiled by now is too slow. Raises as `check`."""
        try:
            return future.result(timeout_s)
        except FutureTimeoutError:
            reason = f"took longer than {self.time_limit_s:g} s to compile: make it smaller"
        except GrammarFault as fault:
            reason = str(fault)
        except Exception as error:  # whatever a compiler stumbles over, it is this rule's fault and nobody else's
            log.exception("a compiler failed on %s", spec.param)
            reason = f"cannot be compiled ({type(error).__name__})"
        raise RequestError(f"{spec.param}: {reason}", param=spec.param, code=NOT_COMPILED)

    def _await(self, spec: StructuredSpec) -> Grammar:
        future = self.prepare(spec)
        wait([self._set_up()])
        return self.outcome(spec, future, self.time_limit_s)

    def _set_up(self) -> Future[GrammarCompiler]:
        assert self._compiler is not None, "the first spec has begun it"
        return self._compiler

    def _compile(self, spec: StructuredSpec) -> Grammar:
        grammar = self._set_up().result().compile(spec)
        self.num_compiled += 1
        return grammar

    def _forget_oldest(self) -> None:
        """One under way is never forgotten: the request that waits for it would start it anew."""
        for key in [key for key, future in self._known.items() if future.done()][: max(0, len(self._known) - self._max_entries)]:
            del self._known[key]


async def _wait_for(future: Future[Any], limit_s: float | None) -> None:
    waiter = asyncio.wrap_future(future)
    # An error is read from the shared future; this wrapper's copy of it counts as seen, even if the client has left.
    waiter.add_done_callback(lambda done: done.cancelled() or done.exception())
    await asyncio.wait([waiter], timeout=limit_s)
