# SPDX-License-Identifier: Apache-2.0
"""The client against a stub server: what is counted, when, and what every kind of failure becomes."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whalefall.bench.http import Address, HttpError, parse_events
from whalefall.bench.metrics import itls_s, ttft_s
from whalefall.bench.openai import Ask, Target, list_models, send, share_out

ASK = Ask(prompt="say x", max_tokens=5)


def target(server, **more) -> Target:
    return Target(address=server.address, endpoint="completions", model="stub", **more)


async def test_final_usage_is_shared_over_chunks_by_their_text(server, events, ticking) -> None:
    server.script = lambda body: events([1, 3, 1])
    record = await send(target(server), ASK, ticking)
    assert record.error is None
    assert ([a.tokens for a in record.arrivals], record.counted_by, record.output_tokens) == ([1, 3, 1], "usage", 5)
    # The clock reads: sent 0, events 1 2 3, the finish event 4, usage 5, end 6.
    assert ([a.at_s for a in record.arrivals], record.sent_s, record.ended_s) == ([1, 2, 3], 0, 6)
    assert ttft_s(record) == 1
    assert itls_s(record) == pytest.approx([1 / 3, 1 / 3, 1 / 3, 1])
    assert (record.prompt_tokens, record.finish_reason, record.text) == (7, "length", "xxxxx")


async def test_growing_usage_counts_each_chunk_exactly(server, ticking) -> None:
    pieces = [("a", 1), ("long text of one token", 2), ("b", 6)]
    server.script = lambda body: [
        *({"choices": [{"text": t}], "usage": {"prompt_tokens": 4, "completion_tokens": n}} for t, n in pieces),
        {"choices": [{"text": "", "finish_reason": "stop"}], "usage": {"prompt_tokens": 4, "completion_tokens": 6}},
    ]
    record = await send(target(server), ASK, ticking)
    assert ([a.tokens for a in record.arrivals], record.counted_by) == ([1, 1, 4], "continuous_usage")


async def test_token_ids_count_even_where_text_is_held_back(server, ticking) -> None:
    server.script = lambda body: [
        {"choices": [{"text": "", "token_ids": [5]}]},
        {"choices": [{"text": "é", "token_ids": [6, 7]}]},
        {"choices": [{"text": "", "token_ids": [], "finish_reason": "stop"}]},
    ]
    record = await send(target(server, token_ids=True), ASK, ticking)
    assert ([a.tokens for a in record.arrivals], record.counted_by, record.token_ids) == ([1, 2], "token_ids", (5, 6, 7))
    assert server.bodies[0]["return_token_ids"] is True


async def test_logprobs_count_tokens_of_a_chat_chunk(server, ticking) -> None:
    server.script = lambda body: [
        {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"delta": {"content": "ab"}, "logprobs": {"content": [{"token": "a"}, {"token": "b"}]}}]},
        {"choices": [{"delta": {}, "finish_reason": "stop"}]},
    ]
    chat = replace(target(server), endpoint="chat")
    record = await send(chat, Ask(prompt=[{"role": "user", "content": "hi"}], max_tokens=2), ticking)
    assert ([a.tokens for a in record.arrivals], record.counted_by) == ([2], "logprobs")
    assert server.paths == ["/v1/chat/completions"]
    assert server.bodies[0]["messages"] == [{"role": "user", "content": "hi"}]


async def test_role_chunk_is_no_first_token_and_reasoning_and_tool_calls_are(server, ticking) -> None:
    server.script = lambda body: [
        {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"delta": {"reasoning_content": "hm"}}]},
        {"choices": [{"delta": {"tool_calls": [{"function": {"name": "bash", "arguments": ""}}]}}]},
        {"choices": [{"delta": {"content": "ok"}, "finish_reason": "stop"}]},
    ]
    record = await send(replace(target(server), endpoint="chat"), ASK, ticking)
    assert [a.at_s for a in record.arrivals] == [2, 3, 4]
    assert record.counted_by == "chunks"


async def test_cached_tokens_are_read_under_both_names(server, events, ticking) -> None:
    server.script = lambda body: events([1], cached=4)
    assert (await send(target(server), ASK, ticking)).cached_tokens == 4
    server.script = lambda body: [
        {"choices": [{"text": "x", "finish_reason": "stop"}], "usage": {"prompt_cache_hit_tokens": 3, "completion_tokens": 1}}
    ]
    assert (await send(target(server), ASK, ticking)).cached_tokens == 3


async def test_comments_and_split_bytes_do_not_matter(server, ticking) -> None:
    raw = 'data: {"choices":[{"text":"ü","finish_reason":"stop"}]}\r\n\r\n'.encode()
    server.script = lambda body: [b": keep-alive\n\n", *(raw[i : i + 1] for i in range(len(raw)))]
    record = await send(target(server), ASK, ticking)
    assert (record.error, record.text) == (None, "ü")


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (lambda body: (429, '{"error": {"message": "too many"}}'), "429: "),
        (lambda body: [{"choices": [{"text": "x"}]}, {"error": {"message": "engine died"}}], "error in the stream: engine died"),
        (lambda body: [{"choices": [{"text": "x"}]}, b"CUT"], "middle of the stream"),
        (lambda body: [{"choices": [{"text": "", "finish_reason": "stop"}]}], "without a single token"),
        (lambda body: [b"data: {nonsense\n\n"], "JSONDecodeError"),
    ],
)
async def test_every_failure_is_a_record_with_its_reason(server, ticking, script, words: str) -> None:
    server.script = script
    record = await send(target(server), ASK, ticking)
    assert record.error is not None
    assert words in record.error
    assert not record.is_ok


async def test_stream_that_stops_without_a_finish_is_a_failure(server, ticking) -> None:
    server.ending = b""
    server.script = lambda body: [{"choices": [{"text": "x"}]}]
    assert "finish reason" in ((await send(target(server), ASK, ticking)).error or "")


async def test_refused_connection_is_a_record(ticking) -> None:
    nowhere = Target(address=Address("http", "127.0.0.1", 1, ""), endpoint="completions", model="m")
    assert "refused" in (await send(nowhere, ASK, ticking)).error.lower()


async def test_slow_request_is_given_up(server, ticking) -> None:
    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()  # until the client has gone
        writer.close()

    hanging = await asyncio.start_server(hang, "127.0.0.1", 0)
    async with hanging:
        address = Address("http", "127.0.0.1", hanging.sockets[0].getsockname()[1], "")
        record = await send(Target(address=address, endpoint="completions", model="m", timeout_s=0.05), ASK, ticking)
    assert "TimeoutError" in record.error


async def test_body_asks_for_usage_and_all_tokens(server, ticking) -> None:
    await send(target(server, extra={"top_p": 0.5}), ASK, ticking)
    body = server.bodies[0]
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert (body["ignore_eos"], body["temperature"], body["top_p"], body["prompt"]) == (True, 0.0, 0.5, "say x")


async def test_models_are_listed(server) -> None:
    assert await list_models(server.address) == ["stub"]


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("127.0.0.1:8000", Address("http", "127.0.0.1", 8000, "")),
        ("https://host/api/", Address("https", "host", 443, "/api")),
        ("http://[::1]:81", Address("http", "::1", 81, "")),
    ],
)
def test_addresses_are_read(url: str, expected: Address) -> None:
    assert Address.parse(url) == expected


def test_other_schemes_are_refused() -> None:
    with pytest.raises(ValueError, match="http or https"):
        Address.parse("ftp://host")


@settings(deadline=None)
@given(st.integers(0, 60), st.lists(st.integers(0, 30), max_size=20))
def test_shares_sum_to_the_total_and_leave_no_chunk_empty(total: int, weights: list[int]) -> None:
    shares = share_out(total, weights)
    assert len(shares) == len(weights)
    assert sum(shares) == (total if weights else 0)
    assert min(shares, default=0) >= 0
    if total >= len(weights):
        assert all(shares)


async def test_event_lines_of_one_event_are_joined() -> None:
    async def parts():
        yield b"event: x\ndata: a\nda"
        yield b"ta: b\n\ndata: last"
        yield b"\n"

    assert [event async for event in parse_events(parts())] == ["a\nb", "last"]


def test_http_error_keeps_its_status() -> None:
    assert HttpError("x", 503).status == 503
