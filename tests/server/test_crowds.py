# SPDX-License-Identifier: Apache-2.0
"""A real engine with random weights, and crowds before it: readers that vanish, 150 clients at once, fuzzed bodies, bad rules.

Whatever they do, nobody else notices, the engine answers the next request, and the pools are as they were at start.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from tests.server.support import HI, config
from tests.server.test_lifetime import CHAT, RAW, Connection, until
from whalefall import AsyncLLM, EngineConfig
from whalefall.engine.client import ThreadEngine
from whalefall.models.toy.config import ToyConfig
from whalefall.server.app import create_app
from whalefall.testing.toy_checkpoint import write_toy_checkpoint

MESSAGES = "/v1/messages"
SEED = 11


@pytest.fixture(scope="module")
def toy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy_checkpoint(tmp_path_factory.mktemp("toy"), ToyConfig(max_position_embeddings=2048), seed=3)


@asynccontextmanager
async def served(toy_dir: Path, **changes: Any) -> AsyncIterator[FastAPI]:
    """The app; at the end, whatever happened: no task of ours alive, nothing waiting, every block and slot back."""
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "block_size": 16, "max_num_seqs": 16, "max_num_batched_tokens": 512}
    engine = AsyncLLM.from_config(EngineConfig(model=str(toy_dir), **options))
    client = engine._client
    assert isinstance(client, ThreadEngine)
    app = create_app(engine, config(**{"log_requests": False, **changes}))
    before = asyncio.all_tasks()
    try:
        yield app
        async with asyncio.timeout(20):
            await until(lambda: not client.core.has_work)
            await until(lambda: asyncio.all_tasks() <= before)
        backlog = app.state.door.gate.backlog
        assert app.state.door.active == set() and (backlog.num_requests, backlog.num_tokens) == (0, 0)
        assert not engine._mailboxes and not engine._processor._open
    finally:
        await engine.shutdown()
    client.core.scheduler.cache.check()
    cache = client.core.scheduler.cache
    assert cache.num_free_blocks == cache.num_usable_blocks and cache.num_free_slots == cache.num_slots


async def ask(app: FastAPI, path: str, body: dict[str, Any]) -> Connection:
    connection = Connection(app, path, body)
    await connection.task
    return connection


def status(connection: Connection) -> int:
    return int(connection.sent[0]["status"])


def plain(text: str, max_tokens: int = 6, **more: Any) -> dict[str, Any]:
    return {"prompt": text, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **more}


async def vanish(app: FastAPI, rng: random.Random) -> None:
    body = plain("x" * rng.randint(1, 200), 1000, stream=rng.random() < 0.5, n=rng.choice([1, 1, 3]))
    path = rng.choice([RAW, RAW, CHAT, MESSAGES])
    if path != RAW:
        body = {"messages": HI, "max_tokens": 1000, "stream": body["stream"]}
    connection = Connection(app, path, body)
    await asyncio.sleep(rng.choice([0.0, 0.001, 0.01, 0.05]) * rng.random())
    await connection.hang_up()


async def crowd_that_vanishes(app: FastAPI, num_clients: int) -> None:
    rng = random.Random(SEED)
    lone = (await ask(app, RAW, plain("still here"))).text
    for _ in range(num_clients // 50):
        await asyncio.gather(*(vanish(app, rng) for _ in range(50)))
    after = (await ask(app, RAW, plain("still here"))).text
    assert json.loads(after)["choices"] == json.loads(lone)["choices"]


async def test_hundred_clients_that_vanish_leave_nothing_behind(toy_dir: Path) -> None:
    async with served(toy_dir) as app:
        await crowd_that_vanishes(app, 100)


@pytest.mark.slow
async def test_thousand_clients_that_vanish_leave_nothing_behind(toy_dir: Path) -> None:
    async with served(toy_dir) as app:
        await crowd_that_vanishes(app, 1000)


BAD_RULES: list[dict[str, Any]] = [
    {"structured_outputs": {"json": ""}},
    {"structured_outputs": {"json": {"type": "array", "items": 5}}},
    {"structured_outputs": {"json": {"$ref": "#/nope"}}},
    {"structured_outputs": {"json": {"type": "string", "pattern": "("}}},
    {"structured_outputs": {"regex": "("}},
    {"structured_outputs": {"grammar": "@@"}},
    {"structured_outputs": {"json_object": False}},
    {"structured_outputs": {"choice": []}},
    {"guided_regex": "["},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "robot"}}}},
]


async def test_bad_rules_are_400_and_neighbours_say_the_same_as_before(toy_dir: Path) -> None:
    async with served(toy_dir) as app:
        prompts = ["one", "two", "three", "four"]
        alone = [json.loads((await ask(app, RAW, plain(text, 30))).text)["choices"] for text in prompts]
        neighbours = [Connection(app, RAW, plain(text, 30)) for text in prompts]
        for rule in BAD_RULES:
            refused = await ask(app, RAW, {"prompt": "x", "max_tokens": 3, **rule})
            assert status(refused) == 400, (rule, refused.text)
            assert json.loads(refused.text)["error"]["param"].split(".")[0] in rule, refused.text
        any_json = await ask(app, RAW, {"prompt": "x", "max_tokens": 3, "structured_outputs": {"json": {}}})
        assert status(any_json) == 200
        await asyncio.gather(*(one.task for one in neighbours))
        assert [json.loads(one.text)["choices"] for one in neighbours] == alone


async def test_clients_at_once_get_what_they_would_get_alone(toy_dir: Path) -> None:
    """150 clients, 4 requests each: some streamed, some that leave, some invalid. No reply is lost."""
    async with served(toy_dir) as app:
        rng = random.Random(SEED)
        prompts = ["y" * rng.randint(10, 300) + str(i) for i in range(12)]
        alone = {text: json.loads((await ask(app, RAW, plain(text, 4))).text)["choices"][0]["text"] for text in prompts}
        told = {"answered": 0, "refused": 0, "left": 0}

        async def client(number: int) -> None:
            for turn in range(4):
                kind, text = (number + turn) % 10, prompts[(number * 7 + turn) % 12]
                if kind == 0:
                    connection = Connection(app, RAW, plain(text, 500))
                    await asyncio.sleep(0.01)
                    await connection.hang_up()
                    told["left"] += 1
                elif kind == 1:
                    assert status(await ask(app, RAW, plain(text, temperature=-1))) == 400
                    told["refused"] += 1
                else:
                    said = await ask(app, RAW, plain(text, 4, stream=kind < 5))
                    assert status(said) == 200
                    assert _text(said.text) == alone[text]
                    told["answered"] += 1

        await asyncio.gather(*(client(number) for number in range(150)))
        assert told == {"answered": 480, "refused": 60, "left": 60}


async def test_over_the_limit_a_crowd_gets_503_and_a_time_and_the_rest_get_answers(toy_dir: Path) -> None:
    async with served(toy_dir, max_num_queued_reqs=20) as app:
        crowd = await asyncio.gather(*(ask(app, RAW, plain(f"crowd {i}")) for i in range(60)))
        assert {status(one) for one in crowd} == {200, 503}
        for one in crowd:
            if status(one) == 503:
                assert int(dict(one.sent[0]["headers"])[b"retry-after"]) >= 1
        assert status(await ask(app, RAW, plain("later"))) == 200


def _text(body: str) -> str:
    if not body.startswith("data:"):
        return str(json.loads(body)["choices"][0]["text"])
    events = [json.loads(block.removeprefix("data: ")) for block in body.split("\n\n") if block.startswith("data: {")]
    return "".join(event["choices"][0]["text"] for event in events)


SCALARS: list[Any] = [None, True, False, 0, -1, 1, 2**70, -(2**63), 0.5, 1e308, "", "x", "\x00", "｜DSML｜", "</think>", [], {}]
NAMES = ["model", "messages", "prompt", "stream", "stream_options", "n", "max_tokens", "temperature", "top_p", "seed", "stop", "logit_bias"]
NAMES += ["top_k", "min_p", "logprobs", "top_logprobs", "prompt_logprobs", "echo", "suffix", "tools", "tool_choice", "thinking", "system"]
NAMES += ["response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "reasoning_effort", "input", "metadata"]
NAMES += ["min_tokens", "stop_token_ids", "cache_salt", "chat_template_kwargs", "parallel_tool_calls", "role", "content", "type", "name"]


def fuzzed(rng: random.Random, depth: int = 0) -> Any:
    roll = rng.random()
    if depth > 3 or roll < 0.5:
        return rng.choice(SCALARS)
    if roll < 0.75:
        return [fuzzed(rng, depth + 1) for _ in range(rng.randint(0, 3))]
    return {rng.choice(NAMES): fuzzed(rng, depth + 1) for _ in range(rng.randint(0, 4))}


def fuzzed_body(rng: random.Random) -> bytes:
    """A wrong body: some good ones with fields replaced, some of fields only, some cut or with bytes changed."""
    good = {"prompt": "x", "messages": HI, "input": "x", "max_tokens": 2}
    changes = {rng.choice(NAMES): fuzzed(rng) for _ in range(rng.randint(1, 4))}
    body = bytearray(json.dumps(good | changes if rng.random() < 0.7 else changes).encode())
    if rng.random() < 0.3:
        body = body[: rng.randrange(len(body) + 1)]
    for _ in range(rng.choice([0, 0, 0, 3])):
        if body:
            body[rng.randrange(len(body))] = rng.randrange(256)
    return bytes(body)


async def fuzz(app: FastAPI, num_bodies: int) -> None:
    rng = random.Random(SEED)
    lone = json.loads((await ask(app, RAW, plain("still here"))).text)["choices"]
    paths = [RAW, CHAT, MESSAGES, "/v1/responses", "/tokenize", "/detokenize", "/v1/messages/count_tokens"]
    for place in range(num_bodies):
        path, raw = paths[place % len(paths)], fuzzed_body(rng)
        connection = Connection(app, path, {})
        connection._body = raw
        async with asyncio.timeout(30):
            try:
                # A body may by chance ask for a long answer, and that is no fault.
                await asyncio.wait({connection.task}, timeout=1.0)
                await connection.hang_up()
            except Exception as error:
                raise AssertionError((path, raw)) from error
        if connection.sent:
            code = status(connection)
            assert code == 200 or 400 <= code < 500, (path, raw, connection.text)
    assert json.loads((await ask(app, RAW, plain("still here"))).text)["choices"] == lone


async def test_fuzzed_bodies_never_give_5xx(toy_dir: Path) -> None:
    async with served(toy_dir) as app:
        await fuzz(app, 300)


@pytest.mark.slow
async def test_ten_thousand_fuzzed_bodies_never_give_5xx(toy_dir: Path) -> None:
    async with served(toy_dir) as app:
        await fuzz(app, 10_000)
