# SPDX-License-Identifier: Apache-2.0
"""Log lines as text and as JSON: the request's id is where a reader looks for it."""

from __future__ import annotations

import json
import logging

from whalefall.observe.log import JsonFormatter, RequestLog


def json_line(record: logging.LogRecord) -> dict[str, object]:
    text = JsonFormatter().format(record)
    assert "\n" not in text
    line = json.loads(text)
    assert isinstance(line, dict)
    return line


def test_json_line_has_the_request_id_as_a_field() -> None:
    records: list[logging.LogRecord] = []
    logger = logging.Logger("house")
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger.addHandler(handler)
    RequestLog(logger, "r-1").info("%d tokens\nand a line break", 3)
    assert records[0].getMessage() == "request=r-1 3 tokens\nand a line break"
    line = json_line(records[0])
    assert (line["message"], line["request_id"], line["level"], line["logger"]) == ("3 tokens\nand a line break", "r-1", "info", "house")


def test_json_line_has_the_time_to_the_millisecond_and_the_trace() -> None:
    try:
        raise ValueError("broken")
    except ValueError as error:
        record = logging.LogRecord("house", logging.ERROR, "x.py", 1, "failed", (), (type(error), error, error.__traceback__))
    record.created, record.msecs = 1_700_000_000.9996, 999.6
    line = json_line(record)
    assert line["time"] == "2023-11-14T22:13:20.999Z" and "ValueError: broken" in str(line["exception"])
