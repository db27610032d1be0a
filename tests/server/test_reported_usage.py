# SPDX-License-Identifier: Apache-2.0
"""Reported faults of usage: cached tokens in every form that clients look for, reasoning counted, drafts never."""

from __future__ import annotations

import pytest

from tests.server.support import HI, chat, chat_stream, engine_of
from whalefall.server.openai.answer import Usage


def test_cached_tokens_stand_in_nested_and_flat_fields() -> None:
    usage = Usage(prompt_tokens=10, completion_tokens=4, cached_tokens=7).json()
    assert usage["prompt_tokens_details"] == {"cached_tokens": 7}
    assert (usage["prompt_cache_hit_tokens"], usage["prompt_cache_miss_tokens"], usage["total_tokens"]) == (7, 3, 14)


@pytest.mark.parametrize("k", [1, 4])
async def test_tokens_are_counted_once_however_many_come_in_a_step(k: int) -> None:
    thinking = {"messages": HI, "thinking": {"type": "enabled"}}
    whole = (await chat(engine_of("a", "b", "</think>", "c", k=k), **thinking))["usage"]
    assert whole["completion_tokens"] == 5 and whole["completion_tokens_details"]["reasoning_tokens"] in (2, 3)
    streamed = await chat_stream(engine_of("a", "b", "</think>", "c", k=k), **thinking, stream_options={"include_usage": True})
    assert streamed[-1]["usage"] == whole and streamed[-1]["choices"] == []
    assert all("usage" not in chunk for chunk in await chat_stream(engine_of("a"), **thinking))
