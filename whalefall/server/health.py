# SPDX-License-Identifier: Apache-2.0
"""Routes about the server itself: /health (alive?), /ready (may I send work?), /version, /metrics, /v1/models."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from whalefall.core.errors import Busy, UnknownModel
from whalefall.engine import embedded
from whalefall.server import metrics
from whalefall.server.door import Door
from whalefall.server.errors import Failure

router = APIRouter()


@router.get("/health")
async def health(request: Request) -> Response:
    """200 while the process can still do its work, loading included; 503 once the engine has died."""
    if not _door(request).is_alive:
        return Failure(503, "the engine has stopped after a fault", code="engine_dead").response()
    return JSONResponse({"status": "ok"})


@router.get("/ready")
async def ready(request: Request) -> Response:
    """200 when a request would be served now; 503 while loading, draining or dead."""
    door = _door(request)
    if door.is_ready:
        return JSONResponse({"status": "ready", "model": door.model_name})
    door.admit()  # says why not
    raise Busy("the server is not ready", retry_after_s=1.0)


@router.get("/version")
async def version() -> Response:
    from whalefall import __version__

    return JSONResponse({"version": __version__})


@router.get("/metrics")
async def prometheus(request: Request) -> Response:
    body, content_type = metrics.negotiate(request.app.state.registry, request.headers.get("accept", ""))
    return Response(body, headers={"Content-Type": content_type})


@router.get("/v1/models")
async def models(request: Request) -> Response:
    door = _door(request)
    return JSONResponse({"object": "list", "data": [_card(door, name) for name in door.config.served_model_names]})


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> Response:
    door = _door(request)
    if name not in door.config.served_model_names:
        raise UnknownModel(f"model {name!r} is not served here", param="model")
    return JSONResponse(_card(door, name))


def _card(door: Door, name: str) -> dict[str, Any]:
    engine = door.engine_if_loaded
    return {
        "id": name,
        "object": "model",
        "created": door.started_s,
        "owned_by": "whalefall",
        "root": engine.model_name if engine else None,
        "max_model_len": engine.config.max_model_len if engine else None,
        "notice": embedded.NOTICE if engine and engine.model_name.startswith(embedded.NAME) else None,
    }


def _door(request: Request) -> Door:
    door: Door = request.app.state.door
    return door
