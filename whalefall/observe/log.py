# SPDX-License-Identifier: Apache-2.0
"""Logging of the whole house: one line per event, the request id in it where there is one.

Modules call `get_logger(__name__)`; only a program's entry point (the command line, LLM) calls `setup_logging`, so that a library user's
own logging setup is left alone. WHALEFALL_LOG_LEVEL sets the level.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import MutableMapping
from typing import Any

LEVEL_VARIABLE = "WHALEFALL_LOG_LEVEL"
_FORMAT = "%(asctime)s %(levelname).1s %(name)s: %(message)s"


def get_logger(name: str) -> logging.Logger:
    return logging.getLogger(name)


class RequestLog(logging.LoggerAdapter[logging.Logger]):
    """Puts `request=<id>` in front of every message."""

    def __init__(self, logger: logging.Logger, request_id: str) -> None:
        super().__init__(logger, {"request_id": request_id})

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        kwargs["extra"] = {**(kwargs.get("extra") or {}), **(self.extra or {})}
        return f"request={(self.extra or {})['request_id']} {msg}", kwargs


def setup_logging(level: str | None = None) -> None:
    """Send the house's log to stderr, once; a handler that someone else has set stays the only one."""
    root = logging.getLogger("whalefall")
    root.setLevel((level or os.environ.get(LEVEL_VARIABLE) or "INFO").upper())
    if root.handlers or logging.getLogger().handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(_FORMAT, datefmt="%H:%M:%S"))
    root.addHandler(handler)
    root.propagate = False
