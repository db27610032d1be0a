# SPDX-License-Identifier: Apache-2.0
"""The whole tree of exceptions a user of Whalefall can meet.

A message names the value, the limit and the way out: "prompt has 9,100 tokens, limit 8,192 (max_model_len)".
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

MAX_LISTED_PROBLEMS = 20
"""A report lists this many problems one by one and counts the rest."""


class WhalefallError(Exception):
    """Root of every error that is meant for a user."""


class ConfigError(WhalefallError):
    """Something is wrong before start: configuration, checkpoint or environment. Lists every problem found."""

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems: tuple[str, ...] = (problems,) if isinstance(problems, str) else tuple(problems)
        """Every problem, one line each, in the order found."""
        listed = self.problems[:MAX_LISTED_PROBLEMS]
        rest = len(self.problems) - len(listed)
        super().__init__("\n".join([*listed, *([f"... and {rest} more problems"] if rest else [])]))


def not_among(what: str, value: object, allowed: Iterable[str]) -> str:
    """The message for a value that is none of a few: what there is, and the nearest of them where one is near."""
    names = list(allowed)
    near = difflib.get_close_matches(str(value), names, n=1)
    return f"{what} is {value!r}, must be one of {', '.join(names)}" + (f"; did you mean {near[0]!r}?" if near else "")


class RequestError(WhalefallError):
    """This request only; the neighbours never notice. Becomes a 4xx in the protocol's own envelope."""

    http_status: int = 400
    code: str = "invalid_request"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        """Name of the offending field as the client wrote it, or None."""
        if code is not None:
            self.code = code


class PromptTooLong(RequestError):
    """Prompt plus one token does not fit max_model_len."""

    code = "context_length_exceeded"


class BadSampling(RequestError):
    """A sampling parameter has a wrong type or range."""

    code = "invalid_sampling_parameter"


class UnknownModel(RequestError):
    """The model named by the request is not served here."""

    http_status = 404
    code = "model_not_found"


class Busy(WhalefallError):
    """Not now: the queue is full or the engine drains. Becomes 429 or 503 with Retry-After."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineDead(WhalefallError):
    """The step loop has ended with a fault; pending requests end with reason "error"."""
