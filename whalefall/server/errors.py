# SPDX-License-Identifier: Apache-2.0
"""Every failure as `{"error": {message, type, param, code}}` with the right status: one envelope, never a stack trace.

`envelope` translates an exception; `ErrorGuard` is the outermost layer of the app and catches what nobody else did.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import orjson
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from whalefall.core.errors import Busy, EngineDead, RequestError, WhalefallError
from whalefall.observe.log import get_logger

log = get_logger(__name__)

_HTTP_CODES = {404: "route_not_found", 405: "method_not_allowed", 413: "body_too_large"}
_TYPES = {401: "authentication_error", 429: "rate_limit_error", 503: "overloaded_error"}
_MESSAGES_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large"}
_MESSAGES_TYPES |= {429: "rate_limit_error", 503: "overloaded_error"}
"""What the Messages protocol calls the failures that have names of their own."""


class Unauthorized(RequestError):
    http_status = 401
    code = "invalid_api_key"


class RateLimited(RequestError):
    http_status = 429
    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Forbidden(RequestError):
    http_status = 403
    code = "forbidden"


class BodyTooSlow(RequestError):
    http_status = 408
    code = "body_too_slow"


class BodyTooLarge(RequestError):
    http_status = 413
    code = "body_too_large"


class GenerationFailed(WhalefallError):
    """The engine ended this request with a fault of its own."""


class ClientGone(Exception):
    """Nobody is left to answer."""


class Failure:
    """One translated exception."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        self.status = status
        kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "internal_error")
        self.body: dict[str, Any] = {"error": {"message": message, "type": kind, "param": param, "code": code}}
        self.headers = dict(headers or {})

    @property
    def messages_body(self) -> dict[str, Any]:
        """The same in the form of the Messages protocol."""
        kind = _MESSAGES_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.body["error"]["message"]}}

    def response(self, path: str = "") -> Response:
        """`path`: what was asked; each protocol has its own form of failure."""
        body = self.messages_body if path.startswith("/v1/messages") else self.body
        return Response(orjson.dumps(body), self.status, self.headers, "application/json")


def envelope(error: BaseException) -> Failure:
    """What a client hears about an exception. Anything not meant for users becomes a plain 500, and its trace goes to the log."""
    if isinstance(error, RateLimited):
        return Failure(429, error.message, code=error.code, headers=_retry_after(error.retry_after_s))
    if isinstance(error, RequestError):
        return Failure(error.http_status, error.message, param=error.param, code=error.code)
    if isinstance(error, Busy):
        return Failure(503, str(error), code="busy", headers=_retry_after(error.retry_after_s))
    if isinstance(error, EngineDead):
        return Failure(500, "the engine has stopped after a fault; the server's log has the reason", code="engine_dead")
    if isinstance(error, WhalefallError):
        return Failure(500, str(error), code="generation_failed")
    if isinstance(error, HTTPException):
        return Failure(error.status_code, str(error.detail), code=_HTTP_CODES.get(error.status_code), headers=error.headers)
    log.error("unexpected failure at the door", exc_info=error)
    return Failure(500, "internal error; the server's log has the reason", code="internal_error")


def _retry_after(seconds: float) -> dict[str, str]:
    return {"Retry-After": str(max(1, math.ceil(seconds)))}


class ErrorGuard:
    """Answers with an envelope when the app raised before it began to answer; afterwards the connection can only be dropped."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def watched_send(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except ClientGone:
            return
        except Exception as error:
            if started:
                raise
            await envelope(error).response(scope["path"])(scope, receive, send)
