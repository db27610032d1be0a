# SPDX-License-Identifier: Apache-2.0
"""Routes that change the server's state, for whoever holds the admin token; and what routers ask of a worker, which only tells.

Shapes of the telling routes (/server_info, /model_info, /v1/loads, /loads, /get_load, /load) are those that SGLang's and vLLM's routers
read.
"""

from __future__ import annotations

import hmac
import time
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from whalefall.core.errors import RequestError
from whalefall.server.body import read_json
from whalefall.server.door import Door
from whalefall.server.errors import Forbidden

router = APIRouter()


@router.post("/reset_prefix_cache")
@router.post("/flush_cache")
async def reset_prefix_cache(request: Request) -> Response:
    """Forget what was computed for earlier prompts (names of vLLM and of SGLang). Answers under way go on undisturbed."""
    door = _door(request)
    if door.config.admin_token is not None:
        _check_admin(request)
    await door.admit().reset_prefix_cache()
    return JSONResponse({"status": "ok"})


@router.post("/pause")
async def pause(request: Request) -> Response:
    """Refuse new requests until /resume; answers under way go on."""
    _check_admin(request).is_paused = True
    return JSONResponse({"status": "paused"})


@router.post("/resume")
async def resume(request: Request) -> Response:
    """Take new requests again, after /pause or /drain."""
    door = _check_admin(request)
    door.is_paused = door.is_draining = False
    return JSONResponse({"status": "ok"})


@router.post("/drain")
async def drain(request: Request) -> Response:
    """As on SIGTERM /ready says 503 and new requests are refused, but the process stays; /resume takes it back."""
    door = _check_admin(request)
    door.is_draining = True
    return JSONResponse({"status": "draining", "active": len(door.active)})


@router.post("/abort_requests")
@router.post("/abort_request")
async def abort_requests(request: Request) -> Response:
    """End answers under way with reason "abort": those in `request_ids` (or `rid`), or all with `abort_all`. Unknown ids are ignored."""
    door = _check_admin(request)
    body = await read_json(request, door.config.max_body_bytes)
    wanted = body.get("request_ids", [body["rid"]] if body.get("rid") else None)
    if body.get("abort_all"):
        wanted = list(door.active)
    if not isinstance(wanted, list) or not all(isinstance(name, str) for name in wanted):
        raise RequestError("request_ids must be a list of ids, or abort_all true", param="request_ids")
    chosen = [name for name in wanted if name in door.active]
    for name in chosen:
        await door.abort(name)
    return JSONResponse({"aborted": chosen})


@router.get("/server_info")
@router.get("/get_server_info")
async def server_info(request: Request) -> Response:
    from whalefall import __version__

    door = _door(request)
    limits = ("max_num_queued_reqs", "max_num_queued_tokens", "max_body_bytes", "request_timeout_s")
    return JSONResponse(
        {
            "version": __version__,
            **_model_facts(door),
            "tp_size": 1,
            "dp_size": 1,
            "disaggregation_mode": "null",
            "is_draining": door.is_draining,
            "is_paused": door.is_paused,
            "limits": {name: getattr(door.config, name) for name in limits},
        }
    )


@router.get("/model_info")
@router.get("/get_model_info")
async def model_info(request: Request) -> Response:
    return JSONResponse({**_model_facts(_door(request)), "is_generation": True})


@router.get("/v1/loads")
@router.get("/loads")
@router.get("/get_loads")
async def loads(request: Request) -> Response:
    """One entry: this server is one data-parallel rank."""
    load = _load(_door(request))
    total = {f"total_{name[4:]}": load[name] for name in ("num_running_reqs", "num_waiting_reqs", "num_total_reqs")}
    return JSONResponse({"timestamp": time.time(), "dp_rank_count": 1, "loads": [load], "aggregate": total})


@router.get("/get_load")
async def get_load(request: Request) -> Response:
    load = _load(_door(request))
    return JSONResponse(
        [
            {
                "dp_rank": 0,
                "num_reqs": load["num_total_reqs"],
                "num_waiting_reqs": load["num_waiting_reqs"],
                "num_tokens": load["waiting_tokens"],
            }
        ]
    )


@router.get("/load")
async def server_load(request: Request) -> Response:
    """Answers under way, waiting ones among them, as vLLM counts them."""
    return JSONResponse({"server_load": len(_door(request).active)})


def _model_facts(door: Door) -> dict[str, Any]:
    engine = door.engine_if_loaded
    length = engine.config.max_model_len if engine else None
    path = engine.model_name if engine else None
    names = {"model_path": path, "tokenizer_path": path, "model_id": door.model_name, "served_model_name": door.model_name}
    return {**names, "max_model_len": length, "context_length": length}


def _load(door: Door) -> dict[str, Any]:
    engine, backlog = door.engine_if_loaded, door.gate.backlog
    stats = engine.stats() if engine else None
    running, waiting = (stats.engine.num_running, stats.engine.num_waiting) if stats else (0, 0)
    return {
        "dp_rank": 0,
        "num_running_reqs": running,
        "num_waiting_reqs": waiting,
        "num_total_reqs": running + waiting,
        "token_usage": stats.kv_usage if stats else 0.0,
        "waiting_tokens": backlog.num_tokens,
        "prompt_tokens_per_s": backlog.tokens_per_s,
    }


def _check_admin(request: Request) -> Door:
    door = _door(request)
    token = door.config.admin_token
    if token is None:
        raise Forbidden("admin routes are off: start the server with --admin-token")
    if not hmac.compare_digest(request.headers.get("authorization", "").encode(), f"Bearer {token}".encode()):
        raise Forbidden("this needs the admin token, sent as 'Authorization: Bearer TOKEN'")
    return door


def _door(request: Request) -> Door:
    door: Door = request.app.state.door
    return door
