# SPDX-License-Identifier: Apache-2.0
"""AsyncLLM: deltas that join to the offline answer, aborts that free, readers that leave, an engine that dies."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import NamedTuple

import pytest

from whalefall import LLM, AsyncLLM, EngineConfig, RequestOutput, SamplingParams
from whalefall.core.errors import BadSampling, EngineDead, PromptTooLong, RequestError
from whalefall.core.request import FinishReason
from whalefall.engine.client import ThreadEngine
from whalefall.engine.core import EngineCore
from whalefall.engine.wiring import load_engine, open_model
from whalefall.testing.engine import ScriptedWorker, piece_tokenizer, scripted_engine, small_config
from whalefall.testing.tokenizer import byte_tokenizer

PROMPTS = [[0, 5, 7], [0, *range(40, 60)], [0, 99]]
PIECES = ["he", "llo E", "ND m", "ore", "x", "y"]


@pytest.fixture(params=[False, True], ids=["serial", "ahead"])
def toy_parts(request: pytest.FixtureRequest, toy_dir: object) -> Iterator[Callable[[], AsyncLLM]]:
    config = EngineConfig(
        model=str(toy_dir),
        device="cpu",
        dtype="float32",
        block_size=8,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        async_scheduling=request.param,
    )
    opened = open_model(config)
    yield lambda: AsyncLLM(opened, ThreadEngine(load_engine(opened)))


@asynccontextmanager
async def running(engine: AsyncLLM) -> AsyncIterator[AsyncLLM]:
    """The engine, and the promise that nothing is left in it afterwards."""
    try:
        yield engine
        await until(lambda: not core_of(engine).has_work)
        assert not engine._mailboxes and not engine._processor._open
    finally:
        await engine.shutdown()
    core_of(engine).scheduler.cache.check()
    assert core_of(engine).scheduler.cache.is_pristine


def core_of(engine: AsyncLLM) -> EngineCore:
    client = engine._client
    assert isinstance(client, ThreadEngine)
    return client.core


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.001)


class Delta(NamedTuple):
    is_last: bool
    texts: list[str]


async def collect(engine: AsyncLLM, prompt: list[int], params: SamplingParams, name: str = "r") -> tuple[RequestOutput, list[Delta]]:
    whole = RequestOutput(name, None, prompt)
    deltas = []
    async for delta in engine.generate(prompt, params, name):
        deltas.append(Delta(delta.finished, [o.text for o in delta.outputs]))
        whole.add(delta)
    return whole, deltas


async def test_joined_deltas_equal_the_offline_answer(toy_parts: Callable[[], AsyncLLM], make_llm: Callable[..., LLM]) -> None:
    params = SamplingParams(temperature=1.0, seed=3, n=2, max_tokens=20, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    expected = make_llm().generate([{"prompt_token_ids": p} for p in PROMPTS], params, use_tqdm=False)
    async with running(toy_parts()) as engine:
        streamed = await asyncio.gather(*(collect(engine, p, params, "same name") for p in PROMPTS))
        stats = engine.stats()
    for offline, (whole, deltas) in zip(expected, streamed):
        assert [(o.text, o.token_ids, o.finish_reason) for o in whole.outputs] == [
            (o.text, o.token_ids, o.finish_reason) for o in offline.outputs
        ]
        assert all(o.logprobs is not None and len(o.logprobs) == 20 for o in whole.outputs)
        assert whole.prompt_logprobs is not None and len(whole.prompt_logprobs) == len(whole.prompt_token_ids)
        assert [delta.is_last for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    assert stats.finished == {"length": 6}
    assert stats.generation_tokens == 120
    assert stats.prompt_tokens == sum(map(len, PROMPTS))


async def test_random_leavers_disturb_nobody_and_leave_nothing(toy_parts: Callable[[], AsyncLLM]) -> None:
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=30, ignore_eos=True)
    rng = random.Random(2)

    async def leave_after(engine: AsyncLLM, count: int, name: str) -> None:
        stream = engine.generate(PROMPTS[1], params, name)
        async for _ in stream:
            count -= 1
            if count <= 0:
                break
        await stream.aclose()

    async def cancelled(engine: AsyncLLM, delay_s: float, name: str) -> None:
        task = asyncio.create_task(collect(engine, PROMPTS[1], params, name))
        await asyncio.sleep(delay_s)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async with running(toy_parts()) as engine:
        alone, _ = await collect(engine, PROMPTS[0], params)
        leavers = [leave_after(engine, rng.randint(1, 9), f"l{i}") for i in range(8)]
        leavers += [cancelled(engine, rng.random() * 0.01, f"c{i}") for i in range(8)]
        (crowded, _), *_ = await asyncio.gather(collect(engine, PROMPTS[0], params), *leavers)
    assert crowded.outputs == alone.outputs


def scripted(script: list[int], **config: object) -> tuple[AsyncLLM, ScriptedWorker]:
    worker = ScriptedWorker(lambda new: script)
    opened, core = scripted_engine(worker, piece_tokenizer(PIECES), small_config(vocab_size=8, **config))
    return AsyncLLM(opened, ThreadEngine(core)), worker


@pytest.mark.parametrize("is_ahead", [False, True])
async def test_a_stop_string_ends_the_stream_and_the_engines_work(is_ahead: bool) -> None:
    engine, worker = scripted([2, 3, 4, 5, *([6] * 40)], async_scheduling=is_ahead)
    worker.permits = threading.Semaphore(0)
    async with running(engine):
        reading = asyncio.create_task(collect(engine, [0, 2], SamplingParams(stop="END", logprobs=0, max_tokens=40)))
        while not reading.done():  # one step at a time, each when the reader has seen all before it
            before = worker.num_launches
            worker.permits.release()
            await until(lambda: reading.done() or worker.num_launches > before)  # noqa: B023
        worker.permits.release(50)
        await until(lambda: not core_of(engine).has_work)
        assert worker.num_launches <= 6  # three tokens, and what was under way when the match was seen
        whole, deltas = await reading
    (answer,) = whole.outputs
    assert (answer.text, answer.token_ids, answer.finish_reason, answer.stop_reason) == ("hello ", [2, 3, 4], "stop", "END")
    assert answer.logprobs is not None and len(answer.logprobs) == 3
    assert "".join(text for delta in deltas for text in delta.texts) == "hello "


async def test_a_slow_reader_gets_joined_deltas_and_misses_nothing() -> None:
    engine, _ = scripted([6, 7] * 20)
    async with running(engine):
        stream = engine.generate([0, 2], SamplingParams(max_tokens=40), "slow")
        first = await anext(stream)
        await until(lambda: not core_of(engine).has_work)
        await asyncio.sleep(0)
        rest = [delta async for delta in stream]
    assert len(rest) <= 2
    text = first.outputs[0].text + "".join(delta.outputs[0].text for delta in rest)
    assert text == "xy" * 20
    assert [len(d.outputs[0].token_texts) for d in rest] == [len(d.outputs[0].token_ids) for d in rest]


async def test_abort_ends_a_request_or_one_of_its_choices() -> None:
    engine, worker = scripted([6] * 60)
    worker.permits = threading.Semaphore(0)
    async with running(engine):
        streams = [asyncio.create_task(collect(engine, [0, 2], SamplingParams(n=2, max_tokens=50), name)) for name in ("a", "b")]
        await until(lambda: worker.num_launches > 0)
        await engine.abort("a")
        await engine.abort("b", choice=1, reason=FinishReason.STOP)
        await engine.abort("nobody")
        worker.permits.release(200)
        (a, _), (b, _) = await asyncio.gather(*streams)
    assert [o.finish_reason for o in a.outputs] == ["abort", "abort"]
    assert [(o.finish_reason, len(o.token_ids) == 50) for o in b.outputs] == [("length", True), ("stop", False)]


async def test_a_fault_ends_one_stream_with_its_reason() -> None:
    engine, worker = scripted([6] * 60)
    worker.faults["bad"] = "non-finite logits"
    async with running(engine):
        (bad, _), (good, _) = await asyncio.gather(
            *(collect(engine, [0, 2], SamplingParams(max_tokens=9), name) for name in ("bad", "good"))
        )
    assert (bad.outputs[0].finish_reason, bad.error) == ("error", "non-finite logits")
    assert (good.outputs[0].finish_reason, good.error) == ("length", None)
    assert engine.stats().finished == {"error": 1, "length": 1}


async def test_a_dead_engine_ends_open_streams_and_refuses_new_ones() -> None:
    engine, worker = scripted([6] * 60)
    worker.permits = threading.Semaphore(2)
    async with running(engine):
        stream = engine.generate([0, 2], SamplingParams(max_tokens=50), "r")
        await anext(stream)
        worker.fail_with = RuntimeError("the card fell out")
        worker.permits.release()
        last = [delta async for delta in stream][-1]
        assert (last.outputs[0].finish_reason, last.finished) == ("error", True)
        assert last.error == "RuntimeError: the card fell out"
        assert not engine.is_alive and not engine.is_ready
        with pytest.raises(EngineDead, match="the card fell out"):
            await anext(engine.generate([0, 2], SamplingParams(), "late"))


async def test_shutdown_ends_open_streams_with_abort() -> None:
    engine, worker = scripted([6] * 60)
    worker.permits = threading.Semaphore(0)
    task = asyncio.create_task(collect(engine, [0, 2], SamplingParams(max_tokens=50)))
    await until(lambda: worker.num_launches > 0)
    stopping = asyncio.create_task(engine.shutdown())
    await asyncio.sleep(0)
    worker.permits.release(200)
    await stopping
    whole, _ = await task
    assert whole.outputs[0].finish_reason == "abort"
    assert core_of(engine).scheduler.cache.is_pristine
    assert not engine.is_alive


@pytest.mark.parametrize(
    ("prompt", "params", "error", "words"),
    [
        ([], SamplingParams(), RequestError, "prompt has no tokens"),
        ([264], SamplingParams(), RequestError, "prompt token 0 is 264"),
        ([0] * 64, SamplingParams(), PromptTooLong, r"prompt has 64 tokens, limit 64 \(max_model_len\)"),
        ([0], SamplingParams(logprobs=21), BadSampling, "logprobs is 21, limit 20"),
        ([0], SamplingParams(prompt_logprobs=-1), BadSampling, "prompt_logprobs is -1"),
        ([0], SamplingParams(stop_token_ids=(264,)), BadSampling, "stop_token_ids names token 264"),
        ([0], SamplingParams(logit_bias={264: 1}), BadSampling, "logit_bias names token 264"),
    ],
)
async def test_validate_refuses_before_anything_is_queued(
    prompt: list[int], params: SamplingParams, error: type[RequestError], words: str
) -> None:
    worker = ScriptedWorker(lambda new: [2])
    opened, core = scripted_engine(worker, byte_tokenizer(), small_config())
    engine = AsyncLLM(opened, ThreadEngine(core))
    with pytest.raises(error, match=words):
        engine.validate(prompt, params)
    with pytest.raises(error, match=words):
        await anext(engine.generate(prompt, params, "r"))
    assert engine.stats().num_requests == 0
