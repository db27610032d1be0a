# SPDX-License-Identifier: Apache-2.0
"""How requests begin and end at the door: readers that leave, silence, draining, a dead engine. And what the counters say."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest
from fastapi import FastAPI

from tests.server.support import PLAIN, asking, chat, config, engine_of, events
from whalefall.server.app import create_app
from whalefall.testing.scripted import ScriptedLLM

CHAT, RAW = "/v1/chat/completions", "/v1/completions"
LONG = ["x"] * 2000


class Connection:
    """A raw ASGI client that can hang up at any moment."""

    def __init__(self, app: FastAPI, path: str, body: dict[str, Any]) -> None:
        self.sent: list[dict[str, Any]] = []
        self._body = orjson.dumps(body)
        self._was_read = False
        self._gone = asyncio.Event()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
        }
        scope |= {"query_string": b"", "headers": [], "scheme": "http", "server": ("door", 80), "client": ("me", 1), "root_path": ""}
        self.task = asyncio.create_task(app(scope, self._receive, self._send))  # type: ignore[arg-type]

    async def _receive(self) -> dict[str, Any]:
        if not self._was_read:
            self._was_read = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.sent.append(message)

    async def hang_up(self) -> None:
        self._gone.set()
        await self.task

    @property
    def text(self) -> str:
        return b"".join(message.get("body", b"") for message in self.sent).decode()


async def until(holds: Any) -> None:
    while not holds():
        await asyncio.sleep(0.001)


def app_of(engine: ScriptedLLM, **changes: Any) -> FastAPI:
    return create_app(engine, config(**changes))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "num_requests"),
    [(CHAT, PLAIN, 1), (CHAT, {**PLAIN, "n": 3}, 1), (RAW, {"prompt": "x", "n": 3}, 1), (RAW, {"prompt": ["x", "y"]}, 2)],
)
async def test_reader_that_leaves_frees_everything(path: str, body: dict[str, Any], num_requests: int, stream: bool) -> None:
    engine = engine_of(*LONG)
    app = app_of(engine)
    connection = Connection(app, path, {**body, "stream": stream, "max_tokens": 2000})
    await until(lambda: len(engine.open_requests) == num_requests)
    for _ in range(20):
        await asyncio.sleep(0)
    await connection.hang_up()
    assert engine.open_requests == set() and len(engine.aborted) == num_requests
    assert app.state.door.active == set()
    assert engine.stats().finished == {"abort": num_requests * body.get("n", 1)}
    assert not stream or "[DONE]" not in connection.text


@pytest.mark.parametrize("stream", [False, True])
async def test_reader_that_leaves_before_the_first_token_frees_everything(stream: bool) -> None:
    engine = engine_of("a")
    engine.gate.clear()
    connection = Connection(app_of(engine), CHAT, {**PLAIN, "stream": stream})
    await until(lambda: engine.open_requests)
    await connection.hang_up()
    assert engine.open_requests == set() and connection.sent == []


async def test_neighbours_stream_goes_on_when_a_reader_leaves() -> None:
    engine = engine_of(*["x"] * 30)
    app = app_of(engine)
    stays, leaves = (Connection(app, RAW, {"prompt": "x", "stream": True, "max_tokens": 30}) for _ in range(2))
    await until(lambda: leaves.sent)
    await leaves.hang_up()
    await until(lambda: "[DONE]" in stays.text)
    assert len(events(stays.text)) == 31
    await stays.task


async def test_silent_stream_gets_comments() -> None:
    engine = engine_of("a")
    engine.gate.clear()
    connection = Connection(app_of(engine, keep_alive_s=0.01, first_token_wait_s=0.01), RAW, {"prompt": "x", "stream": True})
    await until(lambda: connection.text.count(": keep-alive\n\n") >= 2)
    engine.gate.set()
    await connection.task
    assert connection.text.startswith(": keep-alive\n\n")
    assert [chunk["choices"][0]["text"] for chunk in events(connection.text)] == ["a", ""]


async def test_headers_wait_for_the_first_word_only_so_long() -> None:
    engine = engine_of("a", fails_at=0)
    engine.gate.clear()
    connection = Connection(app_of(engine, first_token_wait_s=0.01), RAW, {"prompt": "x", "stream": True})
    await until(lambda: connection.sent)
    assert connection.sent[0]["status"] == 200
    engine.gate.set()
    await connection.task
    assert "error" in events(connection.text)[0]


async def test_draining_door_refuses_new_requests_and_lets_old_ones_finish() -> None:
    engine = engine_of("a", "b")
    engine.gate.clear()
    app = app_of(engine)
    old = Connection(app, CHAT, PLAIN)
    await until(lambda: engine.open_requests)
    app.state.door.is_draining = True
    new = Connection(app, CHAT, PLAIN)
    await new.task
    assert new.sent[0]["status"] == 503 and "shutting down" in new.text
    engine.gate.set()
    await old.task
    assert orjson.loads(old.text)["choices"][0]["message"]["content"] == "ab"


async def test_end_of_the_drain_aborts_what_still_runs() -> None:
    engine = engine_of(*LONG, step_s=0.0)
    app = app_of(engine)
    connection = Connection(app, CHAT, {**PLAIN, "stream": True, "n": 2})
    await until(lambda: connection.text.count("content") > 5)
    await app.state.door.abort_all()
    await connection.task
    reasons = [c["finish_reason"] for chunk in events(connection.text) for c in chunk["choices"] if c["finish_reason"]]
    assert reasons == ["abort", "abort"]


async def test_dead_engine_fails_health_and_requests() -> None:
    engine = engine_of("a")
    async with asking(engine) as client:
        engine.is_alive = False
        assert (await client.get("/health")).status_code == 503
        answer = await client.post(CHAT, json=PLAIN)
        assert answer.status_code == 500 and answer.json()["error"]["code"] == "engine_dead"


async def test_fault_of_the_door_itself_is_a_500_without_its_trace() -> None:
    engine = engine_of("a")
    engine.validate = None  # type: ignore[assignment, method-assign]
    async with asking(engine) as client:
        answer = await client.post(CHAT, json=PLAIN)
    assert answer.status_code == 500 and answer.json()["error"]["code"] == "internal_error"
    assert "Traceback" not in answer.text and "callable" not in answer.text


async def test_metrics_count_what_happened() -> None:
    engine = engine_of("a", "b")
    await chat(engine, n=2)
    async with asking(engine) as client:
        text = (await client.get("/metrics")).text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    label = 'engine="0",model_name="whale"'
    assert values[f"whalefall:generation_tokens_total{{{label}}}"] == "6.0"
    assert values['whalefall:request_success_total{engine="0",finished_reason="stop",model_name="whale"}'] == "2.0"
    assert values[f"whalefall:time_to_first_token_seconds_count{{{label}}}"] == "2.0"
    assert values[f"whalefall:num_requests_running{{{label}}}"] == "0.0"
    buckets = [float(value) for name, value in values.items() if name.startswith("whalefall:inter_token_latency_seconds_bucket")]
    assert buckets == sorted(buckets) and buckets[-1] == 4


async def test_models_and_version() -> None:
    async with asking(engine_of("a")) as client:
        models = (await client.get("/v1/models")).json()
        assert [card["id"] for card in models["data"]] == ["whale", "alias"] and models["data"][0]["max_model_len"] == 4096
        assert (await client.get("/v1/models/alias")).json()["id"] == "alias"
        assert (await client.get("/v1/models/shark")).status_code == 404
        assert (await client.get("/version")).json()["version"]
        assert "/v1/chat/completions" in (await client.get("/openapi.json")).json()["paths"]
