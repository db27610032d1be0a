# SPDX-License-Identifier: Apache-2.0
"""A real server on a socket and a real browser in front of it. Each test has a server of its own, so it also has a storage of its own.

Afterwards every test is asked: were there errors in the console, did the page ask any other host?
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from tests.server.support import config
from whalefall.server.app import create_app
from whalefall.testing.scripted import ScriptedLLM

PATIENCE_S = 60
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--lang=en-US"),
)


def until(holds: Callable[[], Any], what: str = "") -> Any:
    """The first true value of `holds`; a test that waits in vain says for what."""
    end_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < end_s:
        if value := holds():
            return value
        time.sleep(0.02)
    raise AssertionError(f"waited in vain: {what or holds}")


class Site:
    """A served engine. `call` runs something in the server's own thread."""

    def __init__(self, engine: ScriptedLLM | None, **changes: Any) -> None:
        self.engine = engine
        self.app = create_app(engine, config(**changes))
        self._server = uvicorn.Server(
            uvicorn.Config(self.app, port=0, log_level="error", ws="none", lifespan="off", timeout_graceful_shutdown=1)
        )
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        until(lambda: self._server.started, "the server to start")
        self.url = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}/"

    def hold(self) -> None:
        assert self.engine is not None
        self.engine.gate.clear()

    def release(self) -> None:
        """Wakes the steps that wait, which live on the server's loop."""
        assert self.engine is not None
        waiting = list(self.engine.gate._waiters)  # type: ignore[attr-defined]
        if waiting:
            waiting[0].get_loop().call_soon_threadsafe(self.engine.gate.set)
        else:
            self.engine.gate.set()

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()


class Page:
    """The browser at one site, seen through CSS selectors."""

    def __init__(self, driver: Any, url: str) -> None:
        self.driver = driver
        self.url = url
        self.expected_errors: list[str] = []
        """Parts of console messages that belong to what is tested, such as the status of a refusal."""

    def open(self, path: str = "") -> None:
        self.driver.get(self.url + path)

    def all(self, selector: str) -> list[Any]:
        found: list[Any] = self.driver.find_elements("css selector", selector)
        return found

    def one(self, selector: str) -> Any:
        return until(lambda: self.all(selector), selector)[0]

    def texts(self, selector: str) -> list[str]:
        """As they are in the page, seen or not."""
        return list(self.js("return [...document.querySelectorAll(arguments[0])].map((element) => element.textContent)", selector))

    def text(self, selector: str) -> str:
        return "\n".join(self.texts(selector))

    def wait_text(self, selector: str, part: str) -> None:
        until(lambda: part in self.text(selector), f"{part!r} in {selector}, which has {self.text(selector)!r}")

    def is_shown(self, selector: str) -> bool:
        return any(element.is_displayed() for element in self.all(selector))

    def wait_shown(self, selector: str, shown: bool = True) -> None:
        until(lambda: self.is_shown(selector) is shown, f"{selector} to be shown: {shown}")

    def click(self, selector: str) -> None:
        self.wait_shown(selector)
        self.one(selector).click()

    def keys(self, *keys: str) -> None:
        """To whatever has the focus."""
        self.driver.switch_to.active_element.send_keys(*keys)

    def focus(self) -> str:
        return str(self.js("return document.activeElement.id"))

    def js(self, script: str, *values: Any) -> Any:
        return self.driver.execute_script(script, *values)

    def ask(self, text: str) -> None:
        """Send a message and wait for the end of the answer."""
        before = len(self.all(".turn"))
        self.one("#prompt").send_keys(text, "\ue007")
        until(lambda: len(self.all(".turn")) == before + 2, "the turns to appear")
        until(lambda: not self.all(".turn.running"), "the answer to end")

    def check(self) -> None:
        entries = [entry["message"] for entry in self.driver.get_log("browser")]
        assert [text for text in entries if not any(part in text for part in self.expected_errors)] == []
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        asked = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
        assert asked and [url for url in asked if not url.startswith((self.url, "blob:" + self.url, "about:", "chrome:"))] == []


def missing_browser() -> str | None:
    """Why there is no browser here."""
    for program, package in (("chromium", "chromium"), ("chromedriver", "chromium-driver")):
        if shutil.which(program) is None:
            return f"no {program}: apt-get install {package}, or `make test-browser`"
    return None


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    if problem := missing_browser():
        pytest.skip(problem)
    webdriver = pytest.importorskip("selenium.webdriver", reason="no selenium: pip install selenium")
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    driver.set_script_timeout(PATIENCE_S)
    driver.get("about:blank")
    try:
        yield driver
    finally:
        driver.quit()


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Page]]:
    """visit(url) -> a page of ordinary size at that address."""
    opened: list[Page] = []

    def visit(url: str, path: str = "", *, width: int = 1200) -> Page:
        browser.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride", {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600}
        )
        page = Page(browser, url)
        page.open(path)
        opened.append(page)
        return page

    browser.get_log("browser"), browser.get_log("performance")
    yield visit
    try:
        for page in opened:
            page.check()
    finally:
        browser.get("about:blank")
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


@contextmanager
def _closing(sites: list[Site]) -> Iterator[None]:
    try:
        yield
    finally:
        for site in sites:
            site.close()


@pytest.fixture
def serve() -> Iterator[Callable[..., Site]]:
    """serve(engine, **server_config) -> a site."""
    sites: list[Site] = []

    def serve(engine: ScriptedLLM | None, **changes: Any) -> Site:
        sites.append(Site(engine, **changes))
        return sites[-1]

    with _closing(sites):
        yield serve


@pytest.fixture
def downloads(browser: Any, tmp_path: Path) -> Path:
    browser.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
    return tmp_path
