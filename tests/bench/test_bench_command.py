# SPDX-License-Identifier: Apache-2.0
"""The commands from outside, against the stub server in a thread of its own."""

from __future__ import annotations

import asyncio
import csv
import json
import threading
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from tests.bench.conftest import StubServer, text_events
from whalefall.bench.command import app
from whalefall.bench.http import Address


@pytest.fixture
def stub() -> Iterator[StubServer]:
    server, loop, ready = StubServer(), asyncio.new_event_loop(), threading.Event()

    async def listen() -> None:
        server.listener = await asyncio.start_server(server.handle, "127.0.0.1", 0)
        server.address = Address("http", "127.0.0.1", server.listener.sockets[0].getsockname()[1], "")
        ready.set()

    async def close() -> None:
        server.listener.close()
        await server.listener.wait_closed()

    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    asyncio.run_coroutine_threadsafe(listen(), loop)
    ready.wait(5)
    yield server
    asyncio.run_coroutine_threadsafe(close(), loop).result(5)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(5)
    loop.close()


def url(server: StubServer) -> str:
    return f"http://127.0.0.1:{server.address.port}"


def test_serve_writes_its_three_files(stub: StubServer, tmp_path) -> None:
    args = [
        "serve",
        url(stub),
        "--num-requests",
        "6",
        "--input-len",
        "4",
        "--output-len",
        "5",
        "--concurrency",
        "2",
        "--goodput",
        "e2e:60000",
    ]
    result = CliRunner().invoke(app, [*args, "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    body = json.loads((tmp_path / "summary.json").read_text())
    assert (body["summary"]["output_tokens"], body["settings"]["model"], body["summary"]["failed"]) == (30, "stub", 0)
    assert body["summary"]["goodput_per_s"] > 0
    assert len(list(csv.DictReader((tmp_path / "requests.csv").read_text().splitlines()))) == 6
    assert (tmp_path / "picture.svg").read_text().startswith("<svg")


def test_server_that_knows_no_running_usage_is_asked_without(stub: StubServer) -> None:
    def strict(body):
        return (400, "unknown field") if "continuous_usage_stats" in body["stream_options"] else text_events([1, 1])

    stub.script = strict
    result = CliRunner().invoke(app, ["serve", url(stub), "--num-requests", "2", "--output-len", "2"])
    assert result.exit_code == 0, result.output
    assert "continuous_usage_stats" not in stub.bodies[-1]["stream_options"]


def test_server_that_is_still_loading_is_waited_for(stub: StubServer) -> None:
    answers = iter([(503, "loading")])
    stub.script = lambda body: next(answers, None) or text_events([1])
    result = CliRunner().invoke(app, ["serve", url(stub), "--num-requests", "1"])
    assert result.exit_code == 0, result.output
    assert "1 ok, 0 failed" in result.output


def test_failures_make_the_exit_code_one(stub: StubServer) -> None:
    answers = iter([text_events([1])])
    stub.script = lambda body: next(answers, (500, "broken"))
    result = CliRunner().invoke(app, ["serve", url(stub), "--num-requests", "2"])
    assert result.exit_code == 1
    assert "2 x 500: broken" in result.output


def test_agent_runs_sessions_and_reports_the_ideal(stub: StubServer, tmp_path) -> None:
    def script(body):
        ids = list(range(body["max_tokens"]))
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(ids), "prompt_tokens_details": {"cached_tokens": 16}}
        return [{"choices": [{"text": "x", "token_ids": ids, "finish_reason": "length"}], "usage": usage}]

    stub.script = script
    args = ["agent", url(stub), "--users", "2", "--sessions", "3", "--system", "64", "--turns", "3", "--tool-result", "10", "--answer", "4"]
    result = CliRunner().invoke(app, [*args, "--tool-time-s", "0", "--block", "16", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "ideal" in result.output
    summary = json.loads((tmp_path / "summary.json").read_text())["summary"]
    assert summary["sessions"] == 3
    assert 0 < summary["hit_rate"] < summary["ideal_hit_rate"] < 1


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["serve", "--mix", "chit"], "must be one of fixed, chat"),
        (["serve", "--goodput", "ttft:fast"], "ttft:500"),
        (["serve", "--endpoint", "chats"], "must be one of completions, chat"),
        (["agent", "--form", "words"], "must be one of ids, chat"),
    ],
)
def test_wrong_options_name_the_right_ones(args: list[str], words: str) -> None:
    result = CliRunner(env={"COLUMNS": "300", "TERMINAL_WIDTH": "300"}).invoke(app, args)
    assert result.exit_code == 2
    assert words in " ".join(result.output.split())


def test_dead_address_ends_with_one_line() -> None:
    result = CliRunner().invoke(app, ["serve", "http://127.0.0.1:1"])
    assert result.exit_code == 2
    assert "127.0.0.1:1" in result.output
