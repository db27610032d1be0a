# SPDX-License-Identifier: Apache-2.0
"""The door over an engine process that is killed: one error event per open stream, 503 with Retry-After meanwhile, then answers again."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import orjson
import pytest
from fastapi import FastAPI
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as prometheus

from tests.server.support import config, events
from tests.server.test_lifetime import RAW, Connection, until
from whalefall import AsyncLLM, EngineConfig
from whalefall.engine.supervisor import RestartPolicy, Supervisor
from whalefall.server.app import create_app
from whalefall.testing.stub_process import MAX_MODEL_LEN, expected_text, stub_folder

ENDLESS = {"max_tokens": MAX_MODEL_LEN - 8, "ignore_eos": True}
OPENMETRICS = {"accept": "application/openmetrics-text; version=1.0.0"}


@asynccontextmanager
async def serving(**changes: object) -> AsyncIterator[tuple[FastAPI, Supervisor]]:
    policy = RestartPolicy(first_delay_s=0.05, healthy_after_s=0.0)
    supervisor = Supervisor(EngineConfig(model="stub", max_num_seqs=64), policy, factory="whalefall.testing.stub_process:paced")
    try:
        engine = AsyncLLM(stub_folder().opened(await supervisor.wait_ready()), supervisor)
        yield create_app(engine, config(**changes)), supervisor
    finally:
        await supervisor.shutdown()


def client_of(app: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://door")


async def test_killed_engine_under_load_ends_every_answer_and_the_next_request_is_answered() -> None:
    async with serving() as (app, supervisor), client_of(app) as client:
        streams = [Connection(app, RAW, {"prompt": [i], "stream": True, **ENDLESS}) for i in range(20)]
        plain = [Connection(app, RAW, {"prompt": [i], **ENDLESS}) for i in range(5)]
        await until(lambda: all(s.text.count("data: ") > 3 for s in streams))
        assert supervisor.pid is not None
        os.kill(supervisor.pid, signal.SIGKILL)
        killed_s = time.monotonic()
        await asyncio.gather(*(c.task for c in [*streams, *plain]))
        assert time.monotonic() - killed_s < 10, "two seconds on a machine that does nothing else"
        for stream in streams:
            *chunks, last = events(stream.text)
            assert all("error" not in chunk for chunk in chunks)
            assert last["error"]["code"] == "generation_failed" and "SIGKILL" in last["error"]["message"]
        for answer in plain:
            assert answer.sent[0]["status"] == 500 and orjson.loads(answer.text)["error"]["code"] == "generation_failed"

        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/ready")).status_code == 503
        refused = await client.post(RAW, json={"prompt": [1]})
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
        assert "started again" in refused.json()["error"]["message"]

        async with asyncio.timeout(60):
            while (await client.get("/ready")).status_code != 200:
                await asyncio.sleep(0.01)
        answer = (await client.post(RAW, json={"prompt": [3], "max_tokens": 5})).json()
        assert answer["choices"][0]["text"] == expected_text([3], 5)
        assert not app.state.door.active


async def _values(client: httpx.AsyncClient) -> dict[str, float]:
    """Sample -> value of everything that only counts."""
    families = prometheus((await client.get("/metrics")).text)
    return {f"{s.name}{s.labels}": s.value for f in families if f.type in ("counter", "histogram") for s in f.samples}


async def test_counters_never_fall_and_gauges_do_not_freeze_when_all_leave() -> None:
    async with serving() as (app, supervisor), client_of(app) as client:
        connections = [Connection(app, RAW, {"prompt": [i], "stream": True, **ENDLESS}) for i in range(20)]
        await until(lambda: all(c.text.count("data: ") > 2 for c in connections))
        during = await _values(client)
        await asyncio.gather(*(c.hang_up() for c in connections))
        left_s = time.monotonic()

        async def in_use() -> list[float]:
            names = {"whalefall:num_requests_running", "whalefall:num_requests_waiting", "whalefall:kv_cache_usage_perc"}
            families = prometheus((await client.get("/metrics")).text)
            return [s.value for f in families if f.name in names for s in f.samples]

        while await in_use() != [0.0, 0.0, 0.0]:
            await asyncio.sleep(0.01)
            assert time.monotonic() - left_s < 30, "one second on a machine that does nothing else"
        after = await _values(client)
        assert after.keys() >= during.keys() and all(after[name] >= value for name, value in during.items())
        ended = [value for name, value in after.items() if "request_success_total" in name and "'abort'" in name]
        assert ended == [20.0]
        assert supervisor.num_restarts == 0


@pytest.mark.parametrize("vllm_metrics", [False, True])
async def test_both_text_formats_parse_and_vllms_names_come_on_request(vllm_metrics: bool) -> None:
    async with serving(vllm_metrics=vllm_metrics) as (app, _), client_of(app) as client:
        await client.post(RAW, json={"prompt": [3], "max_tokens": 5})
        text, modern = await client.get("/metrics"), await client.get("/metrics", headers=OPENMETRICS)
    assert modern.headers["content-type"].startswith("application/openmetrics-text") and modern.text.endswith("# EOF\n")
    families = {f.name: f for f in prometheus(text.text)}
    assert families.keys() == {f.name for f in openmetrics(modern.text)}
    assert all(f.documentation and f.type != "unknown" for f in families.values())
    counters = [f for f in families.values() if f.type == "counter"]
    assert counters and all(s.name.endswith("_total") for f in counters for s in f.samples)
    doubled = {name for name in families if name.startswith("vllm:")}
    assert bool(doubled) == vllm_metrics
    assert not vllm_metrics or {"vllm:num_requests_running", "vllm:generation_tokens", "vllm:request_prefill_time_seconds"} <= doubled
    for name in doubled:
        ours = families["whalefall:" + name.removeprefix("vllm:")]
        assert [(s.labels, s.value) for s in families[name].samples] == [(s.labels, s.value) for s in ours.samples]
