# SPDX-License-Identifier: Apache-2.0
"""Logging of the whole house: one line per event, the request id in it where there is one; as text or as one JSON object a line.

Modules call `get_logger(__name__)`; only a program's entry point (the command line, LLM) calls `setup_logging`, so that a library user's
own logging setup is left alone. WHALEFALL_LOG_LEVEL sets the level.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import MutableMapping
from typing import Any

LEVEL_VARIABLE = "WHALEFALL_LOG_LEVEL"
_FORMAT = "%(asctime)s %(levelname).1s %(name)s: %(message)s"
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}
"""Attributes that every record has; what a caller gave as `extra` is the rest."""


def get_logger(name: str) -> logging.Logger:
    return logging.getLogger(name)


class RequestLog(logging.LoggerAdapter[logging.Logger]):
    """Puts `request=<id>` in front of every message; in JSON the id is a field of its own."""

    def __init__(self, logger: logging.Logger, request_id: str) -> None:
        super().__init__(logger, {"request_id": request_id})

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        kwargs["extra"] = {**(kwargs.get("extra") or {}), **(self.extra or {})}
        return f"request={(self.extra or {})['request_id']} {msg}", kwargs


class JsonFormatter(logging.Formatter):
    """One object a line: time, level, logger, message, process, then the caller's own fields, then the trace of an exception."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "pid": record.process,
        }
        line.update((name, value) for name, value in vars(record).items() if name not in _STANDARD)
        if "request_id" in line:
            line["message"] = line["message"].removeprefix(f"request={line['request_id']} ")
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def setup_logging(level: str | None = None, *, log_format: str = "text") -> None:
    """Send the house's log to stderr, once; a handler that someone else has set stays the only one.

    Args:
        log_format: "text" or "json".
    """
    root = logging.getLogger("whalefall")
    root.setLevel((level or os.environ.get(LEVEL_VARIABLE) or "INFO").upper())
    if root.handlers or logging.getLogger().handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else logging.Formatter(_FORMAT, datefmt="%H:%M:%S"))
    root.addHandler(handler)
    root.propagate = False
