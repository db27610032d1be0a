# SPDX-License-Identifier: Apache-2.0
"""From bytes to a checked request: size limit, JSON, schema. Every refusal is a RequestError that names the field."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from whalefall.core.errors import RequestError
from whalefall.server.errors import BodyTooLarge, BodyTooSlow, ClientGone

M = TypeVar("M", bound=BaseModel)


async def read_json(request: Request, max_bytes: int) -> dict[str, Any]:
    """The body as a JSON object. Stops reading as soon as a limit, of size or time, is passed."""
    limit_s: float = request.app.state.door.config.body_timeout_s
    try:
        async with asyncio.timeout(limit_s):
            return _load(await _read(request, max_bytes))
    except TimeoutError as late:
        raise BodyTooSlow(f"the body did not arrive within {limit_s:g} s (body_timeout_s)") from late


async def _read(request: Request, max_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise _too_large(int(declared), max_bytes)
    data = bytearray()
    try:
        async for piece in request.stream():
            data += piece
            if len(data) > max_bytes:
                raise _too_large(len(data), max_bytes)
    except ClientDisconnect as gone:
        raise ClientGone from gone
    return bytes(data)


def parse(model: type[M], body: dict[str, Any]) -> M:
    """Check the body against a schema; fields the schema does not know are ignored."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        param = _place(first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        # Our own validators name the field themselves; pydantic's sentences need the name in front.
        text = message if param and message.startswith(param) else f"{param or 'body'}: {message[:1].lower()}{message[1:]}"
        if first["type"] not in ("missing", "value_error"):
            text += f", got {_short(first['input'])}"
        raise RequestError(text, param=param or None) from error


def _load(data: bytes) -> dict[str, Any]:
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        _name_non_finite(data)
        raise RequestError(f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(body, dict):
        raise RequestError(f"the body must be a JSON object, got {_short(body)}", code="invalid_json")
    return body


def _name_non_finite(data: bytes) -> None:
    """NaN and Infinity are not JSON, though some clients send them: say which field holds one."""
    if b"NaN" not in data and b"Infinity" not in data:
        return
    try:
        place = _find_non_finite(json.loads(data), ())
    except (ValueError, RecursionError):
        return
    if place is not None:
        raise RequestError(
            f"{_place(place)} must be a finite number: NaN and Infinity are not JSON", param=_place(place), code="invalid_json"
        )


def _find_non_finite(value: Any, place: tuple[str | int, ...]) -> tuple[str | int, ...] | None:
    if isinstance(value, float) and not math.isfinite(value):
        return place
    items: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = (_find_non_finite(inner, (*place, key)) for key, inner in items)
    return next((path for path in found if path is not None), None)


def _too_large(size: int, limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body has at least {size:,} bytes, limit {limit:,} (max_body_bytes)")


def _place(loc: tuple[str | int, ...]) -> str:
    """("messages", 0, "role") -> messages[0].role"""
    text = ""
    for part in loc:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
