# SPDX-License-Identifier: Apache-2.0
"""Admin routes need the admin token and do what they say; what routers ask a worker is told in the shapes that they read."""

from __future__ import annotations

import pytest

from tests.server.support import asking, config, engine_of
from tests.server.test_lifetime import LONG, RAW, Connection, until
from tests.server.test_refusals import check_envelope
from whalefall.server.app import create_app

ADMIN = {"Authorization": "Bearer boss"}
CHANGING = ["/pause", "/resume", "/drain", "/abort_requests", "/abort_request"]


@pytest.mark.parametrize("path", [*CHANGING, "/flush_cache", "/reset_prefix_cache"])
async def test_what_changes_state_needs_the_admin_token(path: str) -> None:
    engine = engine_of("a")
    async with asking(engine, api_keys=("k",), admin_token="boss") as client:
        answer = await client.post(path, json={}, headers={"Authorization": "Bearer k"})
        check_envelope(answer, 403, None)
    async with asking(engine, admin_token="boss") as client:
        check_envelope(await client.post(path, json={}), 403, None)
    assert engine.num_resets == 0


@pytest.mark.parametrize("path", CHANGING)
async def test_without_a_token_the_admin_routes_are_off(path: str) -> None:
    async with asking(engine_of("a")) as client:
        answer = await client.post(path, json={})
        check_envelope(answer, 403, None)
        assert "--admin-token" in answer.text


@pytest.mark.parametrize("path", ["/pause", "/drain"])
async def test_pause_and_drain_refuse_new_requests_until_resume(path: str) -> None:
    async with asking(engine_of("a"), admin_token="boss") as client:
        assert (await client.post(path, headers=ADMIN)).status_code == 200
        refused = await client.post(RAW, json={"prompt": "x"})
        check_envelope(refused, 503, None)
        assert int(refused.headers["retry-after"]) >= 1
        assert (await client.get("/ready")).status_code == 503 and (await client.get("/health")).status_code == 200
        assert (await client.post("/resume", headers=ADMIN)).status_code == 200
        assert (await client.post(RAW, json={"prompt": "x"})).status_code == 200


@pytest.mark.parametrize("by_name", [True, False])
async def test_abort_ends_answers_under_way(by_name: bool) -> None:
    engine = engine_of(*LONG, step_s=0.001)
    app = create_app(engine, config(admin_token="boss"))
    running = Connection(app, RAW, {"prompt": "x", "stream": True, "max_tokens": 2000})
    await until(lambda: running.sent)
    async with asking(engine, admin_token="boss") as client:
        client._transport.app = app  # type: ignore[attr-defined]
        names = list(app.state.door.active)
        body = {"request_ids": [*names, "nobody"]} if by_name else {"abort_all": True}
        assert (await client.post("/abort_requests", json=body, headers=ADMIN)).json() == {"aborted": names}
        check_envelope(await client.post("/abort_requests", json={"request_ids": "x"}, headers=ADMIN), 400, "request_ids")
    await running.task
    assert '"finish_reason":"abort"' in running.text and app.state.door.active == set()


async def test_what_routers_ask() -> None:
    async with asking(engine_of("a")) as client:
        for path in ("/server_info", "/get_server_info", "/model_info", "/get_model_info"):
            told = (await client.get(path)).json()
            assert told["served_model_name"] == "whale" and told["max_model_len"] == 4096 and told["model_path"] == "scripted"
        for path in ("/v1/loads", "/v1/loads?include=core", "/loads", "/get_loads"):
            told = (await client.get(path)).json()
            assert told["loads"][0]["num_total_reqs"] == told["aggregate"]["total_total_reqs"] == 0
        assert (await client.get("/get_load")).json()[0]["num_reqs"] == 0
        assert (await client.get("/load")).json() == {"server_load": 0}
    async with asking(None) as client:
        assert (await client.get("/server_info")).json()["max_model_len"] is None
