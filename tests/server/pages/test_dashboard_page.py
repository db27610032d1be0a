# SPDX-License-Identifier: Apache-2.0
"""The dashboard in a browser: the engine's own numbers, moving; what is absent is called off."""

from __future__ import annotations

import threading
from collections.abc import Callable

import httpx
import pytest

from tests.server.pages.conftest import Page, Site, until
from tests.server.support import PLAIN, engine_of

pytestmark = pytest.mark.browser

Serve, Visit = Callable[..., Site], Callable[..., Page]


def value(page: Page, name: str) -> str:
    """Of the row of this name in the table."""
    rows = "[...document.querySelectorAll('#numbers tbody tr')]"
    script = f"return {rows}.find((row) => row.cells[0].textContent === arguments[0])?.cells[1].textContent"
    return str(page.js(script, name))


def wait_value(page: Page, name: str, holds: Callable[[str], bool]) -> None:
    until(lambda: holds(value(page, name)), f"{name}, which is {value(page, name)}")


def ask(site: Site, **body: object) -> threading.Thread:
    thread = threading.Thread(target=lambda: httpx.post(site.url + "v1/chat/completions", json={**PLAIN, **body}, timeout=60))
    thread.start()
    return thread


def test_numbers_move_with_the_work(serve: Serve, visit: Visit) -> None:
    site = serve(engine_of(*["x"] * 3000, step_s=0.01))
    page = visit(site.url, "dashboard")
    page.wait_text("#health", "live")
    assert page.text("#model") == "whale" and value(page, "Requests: running") == "0"
    asking = ask(site, max_tokens=400)
    wait_value(page, "Requests: running", lambda text: text == "1")
    wait_value(page, "Generated tokens per second", lambda text: text not in ("–", "0"))
    asking.join()
    wait_value(page, "Requests: running", lambda text: text == "0")
    wait_value(page, "Ended: length", lambda text: text == "1")
    assert value(page, "Generated tokens") == "400" and value(page, "Requests") == "1"
    assert value(page, "Time to first token: p50") == "< 1 ms"  # the scripted engine has no clock
    assert value(page, "Prefix cache hits") == "0%"


def test_cards_show_what_the_table_says_and_draw_it(serve: Serve, visit: Visit) -> None:
    engine = engine_of("x")
    engine.stats().engine.blocks_used, engine.stats().engine.blocks_total = 3, 12
    page = visit(serve(engine).url, "dashboard")
    wait_value(page, "KV blocks in use: device", lambda text: text == "25%")
    assert value(page, "KV blocks, device") == "3 of 12"
    page.click("#pause")  # so that both are of one moment
    cards = page.texts(".card .value")
    assert len(cards) == 15
    rows = page.js("return [...document.querySelectorAll('#numbers tbody tr')].slice(0, 15).map((row) => row.cells[1].textContent)")
    assert cards == rows
    assert page.js("return [...document.querySelectorAll('.chart')].every((chart) => chart.clientWidth > 100)")
    outlines = page.js("return [...document.querySelectorAll('.card:first-child path')].map((path) => path.getAttribute('d'))")
    assert all(outline.startswith("M") for outline in outlines)


def test_absent_features_are_off_and_not_zero(serve: Serve, visit: Visit) -> None:
    page = visit(serve(engine_of("x")).url, "dashboard")
    page.wait_text("#health", "live")
    for name in ("KV blocks in use: host", "KV blocks in use: disk", "Drafts accepted"):
        assert value(page, name) == "off"
    assert value(page, "Prefix cache hits") == "–"


def test_pause_holds_the_numbers_still(serve: Serve, visit: Visit) -> None:
    site = serve(engine_of("x"))
    page = visit(site.url, "dashboard")
    page.wait_text("#health", "live")
    page.click("#pause")
    assert page.text("#health") == "paused" and page.one("#pause").get_attribute("aria-pressed") == "true"
    ask(site).join()
    assert value(page, "Requests") == "0"
    page.click("#pause")
    wait_value(page, "Requests", lambda text: text == "1")


def test_loading_and_lost_servers_are_called_that(serve: Serve, visit: Visit) -> None:
    site = serve(None)
    page = visit(site.url, "dashboard")
    page.wait_text("#health", "loading")
    site.app.state.door.open(engine_of("x"))
    page.wait_text("#health", "live")
    page.expected_errors = ["ERR_CONNECTION_REFUSED", "ERR_CONNECTION_RESET", "ERR_EMPTY_RESPONSE", "ERR_SOCKET"]
    site.close()
    page.wait_text("#health", "not reachable")
    assert page.one("#health").get_attribute("class") == "bad"


def test_every_control_has_a_name_and_charts_are_left_to_the_table(serve: Serve, visit: Visit) -> None:
    page = visit(serve(engine_of("x")).url, "dashboard")
    page.wait_text("#health", "live")
    nodes = page.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    seen = [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes if not node.get("ignored")]
    controls = [item for item in seen if item[0] in ("button", "link", "combobox")]
    assert len(controls) >= 5 and all(name for _, name in controls)
    assert {"main", "table", "rowheader", "columnheader", "status"} <= {role for role, _ in seen}
    assert page.all(".chart:not([aria-hidden=true])") == []
