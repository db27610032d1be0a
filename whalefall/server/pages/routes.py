# SPDX-License-Identifier: Apache-2.0
"""Routes of the pages: `/` is the chat, `/dashboard` the dashboard, `/static/NAME` what they load.

The files are read once, when the app is made, so one process always serves files of one version. A browser keeps them and asks each time
whether they have changed. The security policy allows nothing from elsewhere and no inline code.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

_FOLDER = Path(__file__).with_name("static")
_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # keep it, but ask first; an unchanged file costs one 304
}


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    media_type: str
    etag: str

    def response(self, request: Request) -> Response:
        headers = {**_HEADERS, "ETag": self.etag}
        if self.etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(self.content, headers=headers, media_type=self.media_type)


def pages_router() -> APIRouter:
    router = APIRouter(include_in_schema=False)
    files = {path.name: _read(path) for path in _FOLDER.iterdir() if path.suffix in _MEDIA_TYPES}

    async def static(request: Request, name: str) -> Response:
        if name not in files:
            raise HTTPException(404)
        return files[name].response(request)

    async def chat(request: Request) -> Response:
        return files["chat.html"].response(request)

    async def dashboard(request: Request) -> Response:
        return files["dashboard.html"].response(request)

    for path, endpoint in (("/", chat), ("/dashboard", dashboard), ("/static/{name}", static)):
        router.add_api_route(path, endpoint, methods=["GET", "HEAD"], response_model=None)
    return router


def _read(path: Path) -> _File:
    content = path.read_bytes()
    return _File(content, _MEDIA_TYPES[path.suffix], f'"{hashlib.sha256(content).hexdigest()[:24]}"')
