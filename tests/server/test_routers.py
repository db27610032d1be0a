# SPDX-License-Identifier: Apache-2.0
"""Public routers, where they are installed (in PATH or WHALEFALL_ROUTERS), share requests out over two of our servers."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

pytestmark = pytest.mark.slow
ROUTERS = {"smg": ["launch"], "sglang-router": ["launch"], "vllm-router": []}
PATIENCE_S = 120.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_200(url: str) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < end_s:
        try:
            if httpx.get(url, timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    raise AssertionError(f"{url} did not answer with 200 within {PATIENCE_S:g} s")


@pytest.fixture(scope="module")
def workers() -> Iterator[list[str]]:
    ports = [free_port(), free_port()]
    command = [sys.executable, "-m", "whalefall.cli.main", "serve", "--served-model-name", "whale", "--max-num-seqs", "4", "--port"]
    servers = [subprocess.Popen([*command, str(port)]) for port in ports]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    try:
        for url in urls:
            wait_until_200(f"{url}/ready")
        yield urls
    finally:
        for server in servers:
            server.terminate()
        for server in servers:
            server.wait(60)


def num_requests(url: str) -> float:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return float(next(line for line in lines if line.startswith("whalefall:requests_total")).rsplit(" ", 1)[1])


@pytest.mark.parametrize("router", ROUTERS)
def test_router_balances_two_servers(router: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    found = shutil.which(router, path=os.pathsep.join([os.environ.get("WHALEFALL_ROUTERS", ""), os.environ.get("PATH", "")]))
    if found is None:
        pytest.skip(f"{router} is not installed: put its folder in WHALEFALL_ROUTERS")
    workers: list[str] = request.getfixturevalue("workers")
    port, before = free_port(), [num_requests(url) for url in workers]
    flags = ["--policy", "round_robin", "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    with (tmp_path / "router.log").open("w") as log:
        process = subprocess.Popen([found, *ROUTERS[router], "--worker-urls", *workers, *flags], stdout=log, stderr=log)
    try:
        wait_until_200(f"http://127.0.0.1:{port}/v1/models")
        for _ in range(4):
            answer = httpx.post(
                f"http://127.0.0.1:{port}/v1/completions", json={"model": "whale", "prompt": "A", "max_tokens": 2}, timeout=60
            )
            assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 2
    finally:
        process.terminate()
        process.wait(30)
    assert [num_requests(url) - was for url, was in zip(workers, before, strict=True)] == [2, 2]
