# SPDX-License-Identifier: Apache-2.0
"""The prefix cache at the door: salts and opting out reach the engine, cached tokens reach the usage, resets need the key."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.server.support import PLAIN, asking, engine_of
from whalefall import LLM, SamplingParams
from whalefall.core.errors import BadSampling, RequestError
from whalefall.engine.async_llm import AsyncLLM
from whalefall.engine.config import EngineConfig
from whalefall.testing.toy_checkpoint import write_toy_checkpoint

BODIES = [("/v1/completions", {"prompt": "hi"}), ("/v1/chat/completions", PLAIN)]
SMALL = {"max_model_len": 128, "block_size": 4, "max_num_seqs": 4}


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_salt_and_opting_out_reach_the_engine(path: str, body: dict[str, object]) -> None:
    engine = engine_of("a")
    async with asking(engine) as client:
        for more in ({}, {"cache_salt": "tenant"}, {"use_prefix_cache": False}, {"cache_salt": None, "use_prefix_cache": True}):
            assert (await client.post(path, json={**body, **more})).status_code == 200
    assert engine.cache_use == [("", True), ("tenant", True), ("", False), ("", True)]


@pytest.mark.parametrize(("path", "body"), BODIES)
@pytest.mark.parametrize(("field", "value"), [("cache_salt", ""), ("cache_salt", 7), ("use_prefix_cache", "no")])
async def test_salt_that_is_none_is_refused(path: str, body: dict[str, object], field: str, value: object) -> None:
    engine = engine_of("a")
    async with asking(engine) as client:
        answer = await client.post(path, json={**body, field: value})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field
    assert engine.cache_use == []


@pytest.mark.parametrize("path", ["/reset_prefix_cache", "/flush_cache"])
async def test_reset_has_two_names_and_needs_the_key(path: str) -> None:
    engine = engine_of("a")
    async with asking(engine, api_keys=("secret",)) as client:
        refused = await client.post(path)
        done = await client.post(path, headers={"Authorization": "Bearer secret"})
    assert (refused.status_code, done.status_code, engine.num_resets) == (401, 200, 1)


async def test_reset_while_loading_says_so() -> None:
    async with asking(None) as client:
        assert (await client.post("/reset_prefix_cache")).status_code == 503


async def test_usage_tells_cached_tokens_and_a_reset_ends_them(tmp_path: Path) -> None:
    engine = AsyncLLM.from_config(EngineConfig(model=write_toy_checkpoint(tmp_path), **SMALL))  # type: ignore[arg-type]
    body = {"prompt": list(range(5, 45)), "max_tokens": 2, "temperature": 0}
    cached = []
    async with asking(engine) as client:  # type: ignore[arg-type]
        for before in (None, None, "/flush_cache", None):
            if before:
                assert (await client.post(before)).status_code == 200
            usage = (await client.post("/v1/completions", json=body)).json()["usage"]
            cached.append(usage["prompt_tokens_details"]["cached_tokens"])
        salted = (await client.post("/v1/completions", json={**body, "cache_salt": "other"})).json()["usage"]
        metrics = (await client.get("/metrics")).text
    await engine.shutdown()

    assert cached == [0, 36, 0, 36]
    assert salted["prompt_tokens_details"]["cached_tokens"] == 0

    def counted(name: str) -> float:
        return float(next(line for line in metrics.splitlines() if line.startswith(f"whalefall:{name}_total{{")).split()[-1])

    names = ("stored_blocks", "adopted_tokens", "replayed_tokens", "evicted_blocks", "evicted_tokens")
    assert [counted(f"prefix_{name}") for name in names] == [30, 72, 0, 0, 0]
    assert counted("prefix_cache_hits") == 72


def test_offline_prompts_take_a_salt(tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=1, temperature=0.0)
    with LLM(write_toy_checkpoint(tmp_path), use_tqdm=False, **SMALL) as llm:
        prompt = {"prompt_token_ids": list(range(5, 45))}
        salted = {**prompt, "cache_salt": "a"}
        cached = [llm.generate(p, params)[0].num_cached_tokens for p in (prompt, prompt, salted, salted)]
        assert llm.reset_prefix_cache()
        cached += [llm.generate(prompt, params)[0].num_cached_tokens]
        with pytest.raises(RequestError, match="cache_salt"):
            llm.generate({**prompt, "cache_salt": 3})
        with pytest.raises(RequestError, match="cache_slat"):
            llm.generate({**prompt, "cache_slat": "a"})
    assert cached == [0, 36, 0, 36, 0]


def test_one_offline_request_opts_out_and_its_blocks_serve_others(tmp_path: Path) -> None:
    """By the name that vLLM's users write."""
    plain = SamplingParams(max_tokens=2, temperature=0.0)
    opted_out = SamplingParams(max_tokens=2, temperature=0.0, skip_reading_prefix_cache=True)
    ids = list(range(5, 45))
    with LLM(write_toy_checkpoint(tmp_path), use_tqdm=False, **SMALL) as llm:
        outputs = llm.generate([ids, ids], opted_out) + llm.generate([ids, ids], [plain, opted_out])
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 36, 0]
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    with pytest.raises(BadSampling, match="skip_reading_prefix_cache must be true or false"):
        SamplingParams(skip_reading_prefix_cache="yes")  # type: ignore[arg-type]


def test_cache_can_be_switched_off(tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=1, temperature=0.0)
    with LLM(write_toy_checkpoint(tmp_path), use_tqdm=False, enable_prefix_caching=False, **SMALL) as llm:
        cached = [llm.generate({"prompt_token_ids": list(range(5, 45))}, params)[0].num_cached_tokens for _ in range(2)]
        assert cached == [0, 0] and llm.core.scheduler.cache.num_cached_blocks == 0
