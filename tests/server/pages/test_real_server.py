# SPDX-License-Identifier: Apache-2.0
"""The pages in front of the real thing: `whalefall serve` with the embedded model."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from tests.server.pages.conftest import Page, until
from whalefall.engine import embedded

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.fixture
def address(browser: object) -> Iterator[str]:
    """The browser comes first: without one nothing needs to be served."""
    command = [sys.executable, "-m", "whalefall.cli.main", "serve", "--port", "0", "--drain-timeout-s", "1"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert process.stdout is not None
    try:
        found = re.search(r"http://\S+", process.stdout.readline())
        assert found is not None, "the server did not start"
        yield found[0] + "/"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        process.stdout.close()


def test_embedded_model_answers_and_the_dashboard_counts_it(address: str, visit: Callable[..., Page]) -> None:
    page = visit(address)
    page.wait_text("#notice", embedded.NOTICE)
    page.click("#settings-toggle")
    page.one("[name=max_tokens]").send_keys("24")
    page.ask("What is 2 + 3?")
    assert re.match(r"\d+ tokens · [\d.]+ tokens/s · first token after [\d.]+ s", page.text(".stats"))
    assert page.text(".answer") + page.text(".reasoning .markdown") and not page.is_shown(".turn .error")
    page.open("dashboard")
    page.wait_text("#health", "live")
    cells = "return [...document.querySelectorAll('#numbers tbody tr')].map((row) => [row.cells[0].textContent, row.cells[1].textContent])"
    numbers = until(lambda: dict(page.js(cells)))
    tokens = int(page.js("return Object.values(localStorage).map((text) => JSON.parse(text).messages?.at(-1).stats.tokens).find(Boolean)"))
    assert int(numbers["Generated tokens"]) == tokens and numbers["Requests"] == "1"
    assert re.fullmatch(r"[\d,]+ of [\d,]+", numbers["KV blocks, device"])
    assert int(numbers["Steps"]) >= tokens
