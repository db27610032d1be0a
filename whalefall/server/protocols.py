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


_ANY_OBJECT = {"application/json": {"schema": {"type": "object"}}}
_FAILURE = {"application/json": {"schema": {"type": "object", "required": ["error"], "properties": {"error": {"type": "object"}}}}}
_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"description": "The answer, or a stream of it", "content": {**_ANY_OBJECT, "text/event-stream": {}}},
    "4XX": {"description": "The request is at fault; `error` says where", "content": _FAILURE},
    "5XX": {"description": "The server is at fault, or busy", "content": _FAILURE},
}


def protocol_router() -> APIRouter:
    router = APIRouter()
    for path, endpoint, schema in _POSTS:
        # The body is read and checked by hand (size limit, own envelope); the document still shows its schema.
        content = {"application/json": {"schema": _inlined(schema.model_json_schema())}}
        extra: dict[str, Any] = {"requestBody": {"content": content, "required": True}}
        router.add_api_route(path, endpoint, methods=["POST"], response_model=None, openapi_extra=extra, responses=_ANSWERS)
    for method, path, endpoint in _STORED:
        place = {"name": "response_id", "in": "path", "required": True, "schema": {"type": "string"}}
        extra = {"parameters": [place]}
        router.add_api_route(path, endpoint, methods=[method], response_model=None, openapi_extra=extra, responses=_ANSWERS)
    return router


def _inlined(schema: dict[str, Any]) -> dict[str, Any]:
    """The same schema with its definitions in place: what they are named by would mean nothing inside the larger document."""
    definitions = schema.pop("$defs", {})

    def walk(value: Any) -> Any:
        if isinstance(value, dict):
            name = value.get("$ref", "").removeprefix("#/$defs/") if isinstance(value.get("$ref"), str) else ""
            return walk(definitions[name]) if name in definitions else {key: walk(inner) for key, inner in value.items()}
        return [walk(item) for item in value] if isinstance(value, list) else value

    inlined: dict[str, Any] = walk(schema)
    return inlined
