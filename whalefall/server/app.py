# SPDX-License-Identifier: Apache-2.0
"""The app: routes, one error envelope around all of them, the key check. Built around an engine, or before there is one.

`create_app(None, config)` answers /health at once and /ready with 503 until `app.state.door.open(engine)` is called.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from whalefall.core.errors import WhalefallError
from whalefall.observe.trace import incoming_headers
from whalefall.server import admin, health, metrics
from whalefall.server.admission import caller
from whalefall.server.config import ServerConfig
from whalefall.server.door import Door, Engine
from whalefall.server.errors import ErrorGuard, Unauthorized, envelope
from whalefall.server.openai.response_store import ResponseStore
from whalefall.server.pages.routes import pages_router
from whalefall.server.protocols import protocol_router


def create_app(engine: Engine | None, config: ServerConfig) -> FastAPI:
    app = FastAPI(title="Whalefall", docs_url=None, redoc_url=None)
    app.state.door = Door(config, engine)
    app.state.registry = metrics.registry_for(app.state.door, vllm_names=config.vllm_metrics)
    app.include_router(health.router)
    app.include_router(admin.router)
    app.include_router(pages_router())
    app.state.responses = ResponseStore(config.max_stored_responses, config.max_stored_bytes)
    app.include_router(protocol_router())
    app.add_exception_handler(WhalefallError, _answer)
    app.add_exception_handler(HTTPException, _answer)
    if config.api_keys:
        app.add_middleware(_KeyCheck, api_keys=config.api_keys, admin_token=config.admin_token)
    app.add_middleware(_CallersTrace)
    # Outermost, so that a fault anywhere inside, the key check included, still gets the envelope.
    app.add_middleware(ErrorGuard)
    return app


async def _answer(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException) and error.status_code == 404:
        error = HTTPException(404, f"there is nothing at {request.url.path}")
    if isinstance(error, HTTPException) and error.status_code == 405:
        error = HTTPException(405, f"{request.method} is not allowed at {request.url.path}", headers=error.headers)
    return envelope(error).response(request.url.path)


_NEED_KEY = ("/v1", "/reset_prefix_cache", "/flush_cache", "/tokenize", "/detokenize", "/server_info", "/get_server_info", "/abort_request")


class _KeyCheck:
    """Everything under /v1 needs the key, and what changes the server's state; health and metrics stay open for probes."""

    def __init__(self, app: ASGIApp, api_keys: Sequence[str], admin_token: str | None) -> None:
        self._app = app
        self._expected = [f"Bearer {key}".encode() for key in (*api_keys, *([admin_token] if admin_token else []))]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(_NEED_KEY):
            headers = dict(scope["headers"])
            # Clients of the Messages protocol send it under a name of their own.
            given = headers.get(b"authorization") or b"Bearer " + headers.get(b"x-api-key", b"")
            # All are compared, so that the time does not tell which one was nearly right.
            if sum(hmac.compare_digest(given, expected) for expected in self._expected) == 0:
                raise Unauthorized("missing or wrong API key: send it as 'Authorization: Bearer KEY'")
            caller.set(given.decode("latin-1"))
        await self._app(scope, receive, send)


class _CallersTrace:
    """Remembers the caller's trace, of which the engine's span of this request will be a part, if spans are written at all."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            found = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"] if name in _TRACE_HEADERS}
            incoming_headers.set(found or None)
        await self._app(scope, receive, send)


_TRACE_HEADERS = (b"traceparent", b"tracestate")
