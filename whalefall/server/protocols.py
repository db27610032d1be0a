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
from whalefall.server.openai.responses import cancel_response, create_response, delete_response, get_response, list_input_items
from whalefall.server.openai.responses_schema import ResponsesRequest
from whalefall.server.openai.schema import ChatRequest, CompletionRequest
from whalefall.server.tokens import DetokenizeRequest, TokenizeRequest, detokenize, tokenize

Endpoint = Callable[[Request], Awaitable[Response]]
_STORED: tuple[tuple[str, str, Endpoint], ...] = (
    ("GET", "/v1/responses/{response_id}", get_response),
    ("DELETE", "/v1/responses/{response_id}", delete_response),
    ("POST", "/v1/responses/{response_id}/cancel", cancel_response),
    ("GET", "/v1/responses/{response_id}/input_items", list_input_items),
)
_POSTS: tuple[tuple[str, Endpoint, type[BaseModel]], ...] = (
    ("/v1/chat/completions", chat_completions, ChatRequest),
    ("/v1/completions", completions, CompletionRequest),
    ("/v1/responses", create_response, ResponsesRequest),
    ("/v1/messages", messages, MessagesRequest),
    ("/v1/messages/count_tokens", count_tokens, MessagesRequest),
    ("/tokenize", tokenize, TokenizeRequest),
    ("/detokenize", detokenize, DetokenizeRequest),
    ("/v1/tokenize", tokenize, TokenizeRequest),
    ("/v1/detokenize", detokenize, DetokenizeRequest),
)


def protocol_router() -> APIRouter:
    router = APIRouter()
    for path, endpoint, schema in _POSTS:
        # The body is read and checked by hand (size limit, own envelope); the document still shows its schema.
        content = {"application/json": {"schema": schema.model_json_schema()}}
        extra: dict[str, Any] = {"requestBody": {"content": content, "required": True}}
        router.add_api_route(path, endpoint, methods=["POST"], response_model=None, openapi_extra=extra)
    for method, path, endpoint in _STORED:
        router.add_api_route(path, endpoint, methods=[method], response_model=None)
    return router
