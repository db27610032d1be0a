# SPDX-License-Identifier: Apache-2.0
"""The routes of all protocols, with their bodies' schemas for the OpenAPI document. A new protocol is one line here."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from whalefall.server.anthropic.messages import count_tokens, messages
from whalefall.server.anthropic.schema import MessagesRequest
from whalefall.server.openai.chat import chat_completions
from whalefall.server.openai.completions import completions
from whalefall.server.openai.schema import ChatRequest, CompletionRequest

Endpoint = Callable[[Request], Awaitable[Response]]
_POSTS: tuple[tuple[str, Endpoint, type[BaseModel]], ...] = (
    ("/v1/chat/completions", chat_completions, ChatRequest),
    ("/v1/completions", completions, CompletionRequest),
    ("/v1/messages", messages, MessagesRequest),
    ("/v1/messages/count_tokens", count_tokens, MessagesRequest),
)


def protocol_router() -> APIRouter:
    router = APIRouter()
    for path, endpoint, schema in _POSTS:
        # The body is read and checked by hand (size limit, own envelope); the document still shows its schema.
        content = {"application/json": {"schema": schema.model_json_schema()}}
        extra: dict[str, Any] = {"requestBody": {"content": content, "required": True}}
        router.add_api_route(path, endpoint, methods=["POST"], response_model=None, openapi_extra=extra)
    return router
