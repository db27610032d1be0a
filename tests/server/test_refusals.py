# SPDX-License-Identifier: Apache-2.0
"""Bad requests: always 4xx, always the envelope, always the field's name; never a stack trace, never the engine's time."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.server.support import HI, PLAIN, asking, config, engine_of
from whalefall.server.app import create_app

CHAT, RAW = "/v1/chat/completions", "/v1/completions"
U = {"role": "user", "content": "x"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}}}}
BAD_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {'a"b': {"type": "integer"}}}}}


def check_envelope(answer: httpx.Response, status: int, param: str | None) -> None:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(answer.json()) == {"error"} and set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    assert "Traceback" not in answer.text and error["message"]
    if param is not None:
        assert param.split(".")[-1].split("[")[0] in error["message"]


@pytest.mark.parametrize(
    ("path", "change", "param"),
    [
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": None}, "messages"),
        (CHAT, {"messages": "x"}, "messages"),
        (CHAT, {"messages": [5]}, "messages[0]"),
        (CHAT, {"messages": [U, {"role": "robot", "content": "x"}]}, "messages[1].role"),
        (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role"),
        (CHAT, {"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        (CHAT, {"messages": [U, {"role": "assistant", "content": None}]}, "messages[1].content"),
        (CHAT, {"messages": [U, {"role": "tool", "content": None, "tool_call_id": "a"}]}, "messages[1].content"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "messages[0].content[0]"),
        (CHAT, {"temperature": -0.1}, "temperature"),
        (CHAT, {"temperature": 2.1}, "temperature"),
        (CHAT, {"temperature": "warm"}, "temperature"),
        (CHAT, {"top_p": 0}, "top_p"),
        (CHAT, {"top_p": 1.1}, "top_p"),
        (CHAT, {"top_logprobs": 3}, "top_logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"logprobs": 3}, "logprobs"),
        (CHAT, {"stop": ""}, "stop"),
        (CHAT, {"stop": ["a"] * 17}, "stop"),
        (CHAT, {"stop": 3}, "stop"),
        (CHAT, {"n": 0}, "n"),
        (CHAT, {"n": "2"}, "n"),
        (CHAT, {"n": 1000}, "n"),
        (CHAT, {"max_tokens": 0}, "max_tokens"),
        (CHAT, {"stream_options": {"include_usage": True}}, "stream_options"),
        (CHAT, {"stream": "yes"}, "stream"),
        (CHAT, {"presence_penalty": 3}, "presence_penalty"),
        (CHAT, {"repetition_penalty": 0}, "repetition_penalty"),
        (CHAT, {"logit_bias": {"x": 1}}, "logit_bias"),
        (CHAT, {"logit_bias": {"1": 101}}, "logit_bias"),
        (CHAT, {"reasoning_effort": "zzz"}, "reasoning_effort"),
        (CHAT, {"thinking": 5}, "thinking"),
        (CHAT, {"tools": "x"}, "tools"),
        (CHAT, {"tool_choice": "zz"}, "tool_choice"),
        (CHAT, {"response_format": {"type": "xml"}}, "response_format.type"),
        (CHAT, {"response_format": "json_object"}, "response_format"),
        (CHAT, {"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema.schema"),
        (CHAT, {"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        (CHAT, {"guided_regex": "a", "tools": [TOOL]}, "guided_regex"),
        (CHAT, {"tools": [BAD_TOOL], "tool_choice": "required"}, "tools[0].function.parameters.properties"),
        (CHAT, {"seed": 2**64}, "seed"),
        (CHAT, {"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        (RAW, {"prompt": None}, "prompt"),
        (RAW, {"prompt": []}, "prompt"),
        (RAW, {"prompt": [[]]}, "prompt"),
        (RAW, {"prompt": ["a", 1]}, "prompt"),
        (RAW, {"prompt": [-1]}, "prompt"),
        (RAW, {"suffix": "x"}, "suffix"),
        (RAW, {"max_tokens": 0}, "max_tokens"),
        (RAW, {"max_tokens": -1}, "max_tokens"),
        (RAW, {"logprobs": 21}, "logprobs"),
        (RAW, {"logprobs": -1}, "logprobs"),
        (RAW, {"best_of": 2}, "best_of"),
        (RAW, {"guided_json": ""}, "guided_json"),
        (RAW, {"guided_json": {"type": "object", "properties": {"a": {"not": {}}}}}, "guided_json"),
        (RAW, {"guided_json": [1]}, "guided_json"),
        (RAW, {"guided_json": False}, "guided_json"),
        (RAW, {"guided_json": {"type": "array", "items": 5}}, "guided_json"),
        (RAW, {"guided_json": {"$ref": "#/nope"}}, "guided_json"),
        (RAW, {"guided_json": {"type": "string", "pattern": "("}}, "guided_json"),
        (RAW, {"guided_regex": "("}, "guided_regex"),
        (RAW, {"guided_regex": "(?=a)b"}, "guided_regex"),
        (RAW, {"guided_grammar": "@@"}, "guided_grammar"),
        (RAW, {"guided_choice": []}, "guided_choice"),
        (RAW, {"guided_choice": "a"}, "guided_choice"),
        (RAW, {"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        (RAW, {"structured_outputs": {"json_object": False}}, "structured_outputs.json_object"),
        (RAW, {"structured_outputs": {"json": ""}}, "structured_outputs.json"),
        (RAW, {"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        (RAW, {"structured_outputs": {}}, "structured_outputs"),
        (RAW, {"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        (RAW, {"prompt": ["x"] * 129}, "n"),
    ],
)
async def test_wrong_value_names_its_field(path: str, change: dict[str, Any], param: str) -> None:
    engine = engine_of("a")
    async with asking(engine) as client:
        answer = await client.post(path, json={**(PLAIN if path == CHAT else {"prompt": "x"}), **change})
    check_envelope(answer, 400, param)
    assert engine.seen == []


@pytest.mark.parametrize("body", [b"", b"{", b"nonsense", b"[]", b'"x"', b"null", b"\xff\xfe", b"[" * 5000])
async def test_body_that_is_no_object(body: bytes) -> None:
    async with asking(engine_of("a")) as client:
        for path in (CHAT, RAW):
            check_envelope(await client.post(path, content=body), 400, None)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
async def test_nan_names_its_field(value: str) -> None:
    async with asking(engine_of("a")) as client:
        check_envelope(await client.post(RAW, content=f'{{"prompt": "x", "temperature": {value}}}'), 400, "temperature")


async def test_missing_messages() -> None:
    async with asking(engine_of("a")) as client:
        check_envelope(await client.post(CHAT, json={}), 400, "messages")


async def test_unknown_model_is_404_and_says_what_there_is() -> None:
    async with asking(engine_of("a")) as client:
        answer = await client.post(CHAT, json={**PLAIN, "model": "shark"})
        check_envelope(answer, 404, "model")
        assert "whale" in answer.json()["error"]["message"] and answer.json()["error"]["code"] == "model_not_found"
        assert (await client.post(CHAT, json={**PLAIN, "model": "alias"})).status_code == 200


async def test_unknown_route_is_404_and_wrong_method_405() -> None:
    async with asking(engine_of("a")) as client:
        check_envelope(await client.get("/v1/nope"), 404, None)
        answer = await client.get(CHAT)
        check_envelope(answer, 405, None)
        assert answer.headers["allow"] == "POST"


async def test_large_body_is_413_with_and_without_a_declared_length() -> None:
    async def pieces() -> Any:
        for _ in range(30):
            yield b" " * 100

    async with asking(engine_of("a"), max_body_bytes=1000) as client:
        check_envelope(await client.post(CHAT, content=b" " * 1001), 413, None)
        check_envelope(await client.post(CHAT, content=pieces()), 413, None)


async def test_prompt_over_the_limit_tells_both_numbers() -> None:
    async with asking(engine_of("a", max_model_len=50)) as client:
        for path, body, param in (
            (CHAT, {"messages": [{"role": "user", "content": "x" * 99}]}, "messages"),
            (RAW, {"prompt": "x" * 99}, "prompt"),
        ):
            answer = await client.post(path, json={**body, "thinking": {"type": "disabled"}, "max_tokens": 5})
            error = answer.json()["error"]
            assert answer.status_code == 400 and error["param"] == param and error["code"] == "context_length_exceeded"
            assert "50" in error["message"] and ("100" in error["message"] or "103" in error["message"])


async def test_hopelessly_long_text_is_refused_unencoded() -> None:
    engine = engine_of("a", max_model_len=50)
    engine.tokenizer.encode = None  # type: ignore[assignment, method-assign]  # must not be called
    async with asking(engine) as client:
        answer = await client.post(RAW, json={"prompt": "x" * 100_000})
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"


async def test_unknown_and_null_fields_are_ignored() -> None:
    nulls = dict.fromkeys(["n", "stop", "temperature", "top_p", "stream", "stream_options", "logit_bias", "seed", "tools", "max_tokens"])
    async with asking(engine_of("a")) as client:
        assert (await client.post(CHAT, json={**PLAIN, **nulls, "foo": {"bar": [1]}, "user": "me"})).status_code == 200


async def test_loading_engine_is_503_with_retry_after() -> None:
    async with asking(None) as client:
        for answer in (await client.post(CHAT, json=PLAIN), await client.get("/ready")):
            check_envelope(answer, 503, None)
            assert answer.headers["retry-after"] == "1"
        assert (await client.get("/health")).status_code == 200


async def test_key_is_needed_under_v1_only() -> None:
    async with asking(engine_of("a"), api_keys=("secret",)) as client:
        check_envelope(await client.post(CHAT, json=PLAIN), 401, None)
        check_envelope(await client.get("/v1/models", headers={"Authorization": "Bearer wrong"}), 401, None)
        assert (await client.get("/v1/models", headers={"Authorization": "Bearer secret"})).status_code == 200
        assert (await client.get("/health")).status_code == (await client.get("/metrics")).status_code == 200


SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=5))
ANYTHING = st.recursive(SCALARS, lambda s: st.lists(s, max_size=3) | st.dictionaries(st.text(max_size=5), s, max_size=3), max_leaves=6)
FIELDS = [
    *(
        "model",
        "messages",
        "prompt",
        "stream",
        "stream_options",
        "n",
        "max_tokens",
        "max_completion_tokens",
        "temperature",
        "top_p",
        "seed",
    ),
    *("stop", "presence_penalty", "frequency_penalty", "logit_bias", "top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos"),
    *("stop_token_ids", "skip_special_tokens", "prompt_logprobs", "logprobs", "top_logprobs", "tools", "tool_choice", "thinking", "echo"),
    *(
        "reasoning_effort",
        "chat_template_kwargs",
        "response_format",
        "structured_outputs",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "parallel_tool_calls",
        "suffix",
        "best_of",
        "add_special_tokens",
        "include_stop_str_in_output",
    ),
]
MESSAGE = st.dictionaries(st.sampled_from(["content", "tool_calls", "tool_call_id", "name", "prefix", "reasoning_content"]), ANYTHING)
ROLES = st.sampled_from(["user", "assistant", "tool", "system", "developer"])


@pytest.fixture(scope="module")
def app() -> FastAPI:
    return create_app(engine_of("a"), config())


def post(app: FastAPI, path: str, body: dict[str, Any]) -> httpx.Response:
    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://door") as client:
            return await client.post(path, content=json.dumps(body))

    return asyncio.run(ask())


@pytest.mark.parametrize("path", [CHAT, RAW])
@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.dictionaries(st.sampled_from(FIELDS), ANYTHING, min_size=1, max_size=2))
def test_whatever_a_field_holds_the_answer_is_ok_or_4xx(app: FastAPI, path: str, changes: dict[str, Any]) -> None:
    answer = post(app, path, {**PLAIN, "prompt": "x", **changes})
    assert answer.status_code in (200, 400, 404), answer.text
    assert answer.status_code == 200 or set(answer.json()["error"]) == {"message", "type", "param", "code"}


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(message=MESSAGE, role=ROLES)
def test_whatever_a_message_holds_the_answer_is_ok_or_400(app: FastAPI, message: dict[str, Any], role: str) -> None:
    answer = post(app, CHAT, {"messages": [*HI, {"content": "x", **message, "role": role}]})
    assert answer.status_code in (200, 400), answer.text
    assert answer.status_code == 200 or answer.json()["error"]["message"]
