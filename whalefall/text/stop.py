# SPDX-License-Identifier: Apache-2.0
"""StopMatcher: stop strings in a stream of text pieces, across their borders.

The match that is complete first in the text wins, whatever the order of the list; of two that end on the same letter, the longer. So the
result never depends on how the text was cut into pieces. Text that could still become a stop string waits; `flush` gives it free.
The caller feeds one token's text at a time and so knows after which token the match was complete.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    def __init__(self, stops: Sequence[str], *, include_in_text: bool) -> None:
        self._stops = tuple(stops)
        self._include = include_in_text
        self._held = ""
        self.matched: str | None = None
        """The stop string that was found; nothing may be fed after it."""

    def push(self, text: str) -> str:
        """The part of all text so far that is safe to show and was not shown yet."""
        assert self.matched is None, "fed after a match"
        if not self._stops or not text:
            return text
        text = self._held + text
        found = self._first_match(text)
        if found is not None:
            start, self.matched = found
            self._held = ""
            return text[: start + len(self.matched) if self._include else start]
        safe = len(text) - self._held_length(text)
        self._held = text[safe:]
        return text[:safe]

    def flush(self) -> str:
        """At the end of the text: what was held back, as it can no longer become a stop string."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str] | None:
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if not found:
            return None
        _, start, stop = min(found)
        return start, stop

    def _held_length(self, text: str) -> int:
        """Longest end of the text that begins some stop string."""
        return max(_overlap(text, stop) for stop in self._stops)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper beginning of `stop` that `text` ends with."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
