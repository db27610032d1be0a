# SPDX-License-Identifier: Apache-2.0
"""The pages as files: what is served, with which headers, and that they need nothing from elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest

import whalefall.server.pages
from tests.server.support import asking, engine_of
from whalefall.engine import embedded

STATIC = Path(whalefall.server.pages.__file__).parent / "static"
FILES = sorted(path.name for path in STATIC.iterdir())
PAGES = ("/", "/dashboard")


async def get(path: str, headers: dict[str, str] | None = None, method: str = "GET", **changes: object) -> httpx.Response:
    async with asking(engine_of("a"), **changes) as client:
        return await client.request(method, path, headers=headers)


@pytest.mark.parametrize(("path", "title"), [("/", "Whalefall chat"), ("/dashboard", "Whalefall dashboard")])
async def test_page_is_html_with_its_title(path: str, title: str) -> None:
    answer = await get(path)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert f"<title>{title}</title>" in answer.text


@pytest.mark.parametrize("name", FILES)
async def test_every_static_file_is_served_as_what_it_is(name: str) -> None:
    answer = await get(f"/static/{name}")
    kinds = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
    assert answer.headers["content-type"].startswith(kinds[name.rpartition(".")[2]])
    assert answer.content == (STATIC / name).read_bytes()


@pytest.mark.parametrize("path", [*PAGES, "/static/chat.js"])
async def test_policy_allows_nothing_from_elsewhere_and_no_inline_code(path: str) -> None:
    headers = (await get(path)).headers
    rules = dict(rule.strip().split(" ", 1) for rule in headers["content-security-policy"].split(";"))
    assert rules["default-src"] == "'none'" and rules["frame-ancestors"] == "'none'" and rules["base-uri"] == "'none'"
    assert {rules[name] for name in ("script-src", "style-src", "img-src", "connect-src")} == {"'self'"}
    assert headers["x-content-type-options"] == "nosniff" and headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize("path", [*PAGES, "/static/base.css"])
async def test_unchanged_file_costs_a_304(path: str) -> None:
    first = await get(path)
    assert first.headers["cache-control"] == "no-cache"
    again = await get(path, {"If-None-Match": first.headers["etag"]})
    assert again.status_code == 304 and again.content == b"" and again.headers["etag"] == first.headers["etag"]
    assert (await get(path, {"If-None-Match": '"of another version"'})).status_code == 200


async def test_etags_of_different_files_differ() -> None:
    tags = [(await get(f"/static/{name}")).headers["etag"] for name in FILES]
    assert len(set(tags)) == len(tags)


@pytest.mark.parametrize(
    "path", ["/static/nothing.js", "/static/../routes.py", "/static/%2e%2e/routes.py", "/static/..%2froutes.py", "/static/"]
)
async def test_only_the_files_of_the_folder_are_served(path: str) -> None:
    answer = await get(path)
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "route_not_found"


async def test_pages_answer_head_and_refuse_post() -> None:
    assert (await get("/", method="HEAD")).status_code == 200
    assert (await get("/", method="POST")).status_code == 405


async def test_pages_need_no_key_while_the_api_does() -> None:
    assert (await get("/", api_keys=("k",))).status_code == 200
    assert (await get("/v1/models", api_keys=("k",))).status_code == 401


async def test_pages_answer_while_the_model_loads() -> None:
    async with asking(None) as client:
        assert [(await client.get(path)).status_code for path in PAGES] == [200, 200]


async def test_pages_are_not_in_the_api_document() -> None:
    paths = (await get("/openapi.json")).json()["paths"]
    assert "/v1/models" in paths and not {"/", "/dashboard", "/static/{name}"} & set(paths)


async def test_only_the_embedded_model_has_a_notice() -> None:
    assert (await get("/v1/models")).json()["data"][0]["notice"] is None
    engine = engine_of("a")
    engine.model_name = embedded.NAME
    async with asking(engine) as client:
        assert (await client.get("/v1/models/whale")).json()["notice"] == embedded.NOTICE


def test_a_page_with_all_it_loads_stays_small() -> None:
    shared = {"base.css", "theme.js", "icon.svg"}
    dashboard = shared | {name for name in FILES if name.partition(".")[0] in ("dashboard", "metrics", "chart")}
    chat = set(FILES) - dashboard | shared
    for page in (chat, dashboard):
        assert sum((STATIC / name).stat().st_size for name in page) < 64_000


@pytest.mark.parametrize("name", FILES)
def test_no_file_names_another_host_or_writes_html(name: str) -> None:
    text = (STATIC / name).read_text()
    assert set(re.findall(r"https?://[\w.-]+\w", text)) <= {"http://www.w3.org"}  # the name of SVG, nothing is loaded from there
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text)
    assert not re.search(r'<script(?![^>]*src=)|\son\w+="|style="', text)
