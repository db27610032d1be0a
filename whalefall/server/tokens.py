# SPDX-License-Identifier: Apache-2.0
"""POST /tokenize and /detokenize, in vLLM's shape: what the engine would see of a prompt or a conversation, and ids back to text."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator
from starlette.requests import Request
from starlette.responses import Response

from whalefall.core.errors import RequestError
from whalefall.server.body import parse, read_json
from whalefall.server.door import Door
from whalefall.server.openai.answer import content_size, respond
from whalefall.server.openai.schema import refuse


class TokenizeRequest(BaseModel):
    """A prompt, or messages with whatever else a chat request says about the conversation."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: str | None = None
    prompt: str | None = None
    messages: Any = None
    add_special_tokens: bool | None = None
    """Begin a prompt with the begin-of-sequence token if the model has one; true unless said otherwise."""
    parse_special_tokens: bool | None = None
    """Control tokens spelled in the prompt mean those tokens; true unless said otherwise."""
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _check_one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            refuse("prompt", "prompt or messages must be given, and not both")
        return self


class DetokenizeRequest(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    model: str | None = None
    tokens: list[int]


async def tokenize(request: Request) -> Response:
    door: Door = request.app.state.door
    body = await read_json(request, door.config.max_body_bytes)
    ask = parse(TokenizeRequest, body)
    door.check_model(ask.model)
    engine = door.admit()
    if ask.prompt is not None:
        text, rules = ask.prompt, {"add_bos": ask.add_special_tokens is not False, "allow_special": ask.parse_special_tokens is not False}
        ids: list[int] = await door.encode(lambda: engine.tokenizer.encode(text, **rules), len(text), "prompt")
    else:
        prompt = await door.encode(lambda: door.codec.encode(body), content_size(ask.messages), "messages")
        ids = prompt.token_ids
    spelled = [engine.tokenizer.token_text(token_id) for token_id in ids] if ask.return_token_strs else None
    return respond({"count": len(ids), "max_model_len": engine.config.max_model_len, "tokens": ids, "token_strs": spelled})


async def detokenize(request: Request) -> Response:
    door: Door = request.app.state.door
    ask = parse(DetokenizeRequest, await read_json(request, door.config.max_body_bytes))
    door.check_model(ask.model)
    engine = door.admit()
    limit = int(engine.tokenizer.vocab_size)
    for place, token_id in enumerate(ask.tokens):
        if not 0 <= token_id < limit:
            raise RequestError(f"tokens[{place}] must be in [0, {limit}), got {token_id}", param=f"tokens[{place}]")
    return respond({"prompt": engine.tokenizer.decode(ask.tokens, skip_special_tokens=False)})
