# SPDX-License-Identifier: Apache-2.0
"""Where structured requests wait while their grammar compiles: a slow one holds up nobody else. Called from the step loop's thread."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import NamedTuple

from whalefall.core.errors import RequestError
from whalefall.core.request import EngineRequest
from whalefall.runtime.sampling.grammar import Grammar, GrammarStore


class _Held(NamedTuple):
    request: EngineRequest
    future: Future[Grammar]
    until_s: float


class GrammarGate:
    def __init__(self, store: GrammarStore | None) -> None:
        self._store = store
        self._held: list[_Held] = []

    def __bool__(self) -> bool:
        return bool(self._held)

    def put(self, request: EngineRequest, now_s: float) -> None:
        """
        Raises:
            RequestError: this engine cannot do structured output.
        """
        spec = request.sampling.structured_outputs
        assert spec is not None
        if self._store is None:
            raise RequestError(f"{spec.param}: this engine was built without structured output", param=spec.param)
        self._held.append(_Held(request, self._store.prepare(spec), now_s + self._store.time_limit_s))

    def take_ready(self, now_s: float) -> list[tuple[EngineRequest, RequestError | None]]:
        """Those whose compilation has ended or whose time is up, each with what went wrong, if anything."""
        if self._store is not None and not self._store.is_set_up:
            self._held = [held._replace(until_s=now_s + self._store.time_limit_s) for held in self._held]
        ready = [held for held in self._held if held.future.done() or now_s >= held.until_s]
        gone = {id(held) for held in ready}
        self._held = [held for held in self._held if id(held) not in gone]
        return [(held.request, self._error_of(held)) for held in ready]

    def drop(self, request_ids: Iterable[str]) -> list[str]:
        """Forget these; the ids that were held."""
        chosen = set(request_ids)
        dropped = [held.request.request_id for held in self._held if held.request.request_id in chosen]
        self._held = [held for held in self._held if held.request.request_id not in chosen]
        return dropped

    def _error_of(self, held: _Held) -> RequestError | None:
        assert self._store is not None and held.request.sampling.structured_outputs is not None
        try:
            self._store.outcome(held.request.sampling.structured_outputs, held.future)
        except RequestError as error:
            return error
        return None

    def rest(self, longest_s: float) -> None:
        """Until one may be ready; for a loop that has nothing else to do."""
        wait([held.future for held in self._held], timeout=longest_s, return_when=FIRST_COMPLETED)
