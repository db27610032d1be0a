# SPDX-License-Identifier: Apache-2.0
"""A whole serving process: taken ports, broken checkpoints, early health, drain on SIGTERM."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from whalefall.cli.main import main
from whalefall.testing.toy_checkpoint import write_toy_checkpoint

PATIENCE_S = 120


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def serving(model: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    port = free_port()
    command = [sys.executable, "-m", "whalefall.cli.main", "serve", str(model), "--port", str(port), "--device", "cpu", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S) as client:
            yield process, client
    finally:
        process.kill()
        process.communicate()


def wait_for(client: httpx.Client, path: str) -> list[int]:
    """Statuses seen until the first 200."""
    seen: list[int] = []
    end_s = time.monotonic() + PATIENCE_S
    while seen[-1:] != [200]:
        assert time.monotonic() < end_s, f"{path} never came"
        try:
            seen.append(client.get(path).status_code)
        except httpx.ConnectError:
            time.sleep(0.02)
    return seen


def test_taken_port_is_one_clear_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(SystemExit) as left:
        main(["serve", str(write_toy_checkpoint(tmp_path / "toy")), "--port", str(listener.getsockname()[1])])
    text = capsys.readouterr().err
    assert left.value.code == 2 and "in use" in text and "--port" in text and text.count("\n") == 1


@pytest.mark.slow
def test_broken_checkpoint_ends_the_process_with_its_problem(tmp_path: Path) -> None:
    toy = write_toy_checkpoint(tmp_path / "toy")
    values = json.loads((toy / "config.json").read_text())
    (toy / "config.json").write_text(json.dumps({**values, "architectures": ["Nobody"]}))
    with serving(toy) as (process, _):
        said, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 2 and "error: " in said and "Nobody" in said and "Traceback" not in said


@pytest.mark.slow
def test_process_serves_drains_and_leaves(tmp_path: Path) -> None:
    toy = write_toy_checkpoint(tmp_path / "toy")
    with serving(toy, "--served-model-name", "toy", "--drain-timeout-s", "0.2") as (process, client):
        assert wait_for(client, "/health") == [200], "health answers before the model has loaded"
        wait_for(client, "/ready")
        body = {"prompt": "he", "max_tokens": 5, "temperature": 0, "ignore_eos": True}
        whole = client.post("/v1/completions", json=body).json()
        assert whole["model"] == "toy" and whole["usage"]["completion_tokens"] == 5
        endless = {**body, "max_tokens": None, "prompt": "he", "stream": True, "n": 2}
        limit = client.get("/v1/models").json()["data"][0]["max_model_len"]
        with client.stream("POST", "/v1/completions", json={**endless, "max_tokens": limit - 10}) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        reasons = [c["finish_reason"] for line in rest[:-1] for c in json.loads(line[6:])["choices"] if c["finish_reason"]]
        assert len(reasons) == 2 and set(reasons) <= {"abort", "length"}
        said, _ = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0 and "Whalefall serves toy at http://127.0.0.1:" in said and "Traceback" not in said


def test_every_line_of_a_json_log_is_an_object(tmp_path: Path) -> None:
    model = write_toy_checkpoint(tmp_path / "toy")
    with serving(model, "--log-format", "json", "--stats-interval-s", "0.01") as (process, client):
        wait_for(client, "/ready")
        for _ in range(3):
            client.post("/v1/completions", json={"prompt": "a", "max_tokens": 20, "ignore_eos": True}).raise_for_status()
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=PATIENCE_S)
    lines = [line for line in said.splitlines() if not line.startswith("Whalefall serves ")]  # that one goes to stdout
    parsed = [json.loads(line) for line in lines]
    assert all({"time", "level", "logger", "message", "pid"} <= set(line) for line in parsed)
    requests = [line for line in parsed if "request_id" in line]
    assert len({line["request_id"] for line in requests}) == 3
    assert any("tokens/s out" in line["message"] for line in parsed)
    assert any("draining" in line["message"] for line in parsed)
