# SPDX-License-Identifier: Apache-2.0
"""The engine process: same tokens as in a thread; its death told at once, survived, and nothing left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from whalefall import AsyncLLM, EngineConfig, RequestOutput, SamplingParams
from whalefall.core.errors import Busy, ConfigError, EngineDead
from whalefall.engine.client import ThreadEngine
from whalefall.engine.supervisor import RestartPolicy, Supervisor
from whalefall.observe.phases import Phases
from whalefall.testing import stub_process
from whalefall.testing.stub_process import MAX_MODEL_LEN, expected_text, stub_folder

ENDLESS = SamplingParams(max_tokens=MAX_MODEL_LEN - 8)
QUICK = RestartPolicy(max_restarts=3, first_delay_s=0.01, healthy_after_s=0.0)
CONFIG = EngineConfig(model="stub", max_num_seqs=64)


def factory(name: str) -> str:
    return f"whalefall.testing.stub_process:{name}"


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where socket files would be left behind."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@asynccontextmanager
async def running(
    name: str = "plain", policy: RestartPolicy = QUICK, config: EngineConfig = CONFIG
) -> AsyncIterator[tuple[AsyncLLM, Supervisor]]:
    supervisor = Supervisor(config, policy, factory=factory(name))
    try:
        resolved = await supervisor.wait_ready()
        yield AsyncLLM(stub_folder().opened(resolved), supervisor), supervisor
    finally:
        pid = supervisor.pid
        await supervisor.shutdown()
        assert pid is None or not is_running(pid)


def is_running(pid: int) -> bool:
    """A zombie does not: who reaps orphans is not our business."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.005)


async def collect(engine: AsyncLLM, prompt: list[int], params: SamplingParams) -> RequestOutput:
    whole = RequestOutput("r", None, prompt)
    async for delta in engine.generate(prompt, params, "r"):
        whole.add(delta)
    return whole


@pytest.mark.parametrize("is_ahead", [False, True], ids=["serial", "ahead"])
async def test_a_process_gives_what_a_thread_gives(is_ahead: bool) -> None:
    config = EngineConfig(model="stub", async_scheduling=is_ahead, seed=5)
    params = SamplingParams(n=2, max_tokens=40, logprobs=2, prompt_logprobs=1)
    prompts = [[1, 2, 3], [7], list(range(200))]
    resolved, core = stub_process.plain(config, Phases())
    threaded = AsyncLLM(stub_folder().opened(resolved), ThreadEngine(core))
    expected = await asyncio.gather(*(collect(threaded, p, params) for p in prompts))
    await threaded.shutdown()
    async with running(config=config) as (engine, _):
        assert engine.config == resolved
        got = await asyncio.gather(*(collect(engine, p, params) for p in prompts))
        stats = engine.stats()
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.outputs == theirs.outputs and ours.prompt_logprobs == theirs.prompt_logprobs
    assert got[0].outputs[1].text == expected_text(prompts[0], 40)
    assert stats.finished == {"length": 6} and stats.engine.num_steps >= 40


async def test_every_open_request_hears_of_a_killed_engine_and_the_next_one_is_answered(own_temporary_folder: Path) -> None:
    async with running("paced") as (engine, supervisor):
        tasks = [asyncio.create_task(collect(engine, [i], ENDLESS)) for i in range(30)]
        await until(lambda: engine.stats().generation_tokens > 60)
        steps_before, first_pid = engine.stats().engine.num_steps, supervisor.pid
        assert first_pid is not None
        os.kill(first_pid, signal.SIGKILL)
        killed_s = time.monotonic()
        ended = await asyncio.gather(*tasks)
        told_after_s = time.monotonic() - killed_s
        assert {whole.outputs[0].finish_reason for whole in ended} == {"error"}
        assert all("SIGKILL" in (whole.error or "") for whole in ended)
        assert told_after_s < 10, "ten times what it takes on a busy machine"
        assert engine.is_alive and not engine.is_ready
        with pytest.raises(Busy, match="started again") as busy:
            await collect(engine, [1], ENDLESS)
        assert 0 < busy.value.retry_after_s < 600
        await until(lambda: engine.is_ready)
        assert supervisor.pid != first_pid and supervisor.num_restarts == 1
        answer = await collect(engine, [3], SamplingParams(max_tokens=5))
        assert answer.outputs[0].text == expected_text([3], 5)
        stats = engine.stats()
        assert stats.finished == {"error": 30, "length": 1} and stats.num_restarts == 1
        assert stats.engine.num_steps > steps_before, "a counter never falls"
        assert not list(own_temporary_folder.iterdir())


async def test_a_fault_of_the_step_loop_restarts_the_engine_and_names_its_reason() -> None:
    async with running("failing") as (engine, supervisor):
        whole = await collect(engine, [1], ENDLESS)
        assert (whole.outputs[0].finish_reason, whole.error) == ("error", "RuntimeError: the card fell out")
        await until(lambda: supervisor.num_restarts == 1 and engine.is_ready)


async def test_an_engine_that_keeps_dying_is_given_up() -> None:
    policy = RestartPolicy(max_restarts=1, first_delay_s=0.01, healthy_after_s=600)
    async with running(policy=policy) as (engine, supervisor):
        for _ in range(2):
            await until(lambda: engine.is_ready)
            assert supervisor.pid is not None
            os.kill(supervisor.pid, signal.SIGKILL)
            await until(lambda: not engine.is_ready)
        await until(lambda: not engine.is_alive)
        with pytest.raises(EngineDead, match="given up after 1 restarts"):
            await collect(engine, [1], ENDLESS)
        assert supervisor.pid is None


async def test_a_silent_engine_is_killed() -> None:
    async with running("plain", RestartPolicy(silence_s=1.5, first_delay_s=0.01)) as (_, supervisor):
        assert supervisor.pid is not None
        os.kill(supervisor.pid, signal.SIGSTOP)
        await until(lambda: supervisor.num_restarts == 1)


async def test_problems_are_told_as_the_engine_told_them() -> None:
    with pytest.raises(ConfigError, match="second problem") as refused:
        async with running("refusing"):
            pass
    assert refused.value.problems == ("first problem", "second problem")


async def test_a_crash_while_loading_is_told() -> None:
    with pytest.raises(EngineDead, match="exit code 3"):
        async with running("crashing"):
            pass


async def test_shutdown_ends_open_streams_with_abort(own_temporary_folder: Path) -> None:
    async with running("paced") as (engine, _):
        task = asyncio.create_task(collect(engine, [1], ENDLESS))
        await until(lambda: engine.stats().generation_tokens > 2)
        await engine.shutdown()
        whole = await task
        assert whole.outputs[0].finish_reason == "abort" and whole.error is None
        assert not engine.is_alive
    assert not list(own_temporary_folder.iterdir())


async def test_shutdown_while_loading_leaves_nothing(own_temporary_folder: Path) -> None:
    supervisor = Supervisor(CONFIG, factory=factory("hanging"))
    pid = supervisor.pid
    assert pid is not None and list(own_temporary_folder.iterdir())
    await supervisor.shutdown()
    assert not is_running(pid) and not list(own_temporary_folder.iterdir())


async def test_a_storm_of_leavers_leaves_nothing() -> None:
    async with running("paced") as (engine, _):
        open_files = len(os.listdir("/proc/self/fd"))
        for _ in range(5):
            tasks = [asyncio.create_task(collect(engine, [i], ENDLESS)) for i in range(60)]
            await asyncio.sleep(0.03)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        # Nothing runs any more, so only signs of life can tell: a scraper must see zeros all the same.
        await until(
            lambda: engine.stats().engine.num_running == engine.stats().engine.num_waiting == engine.stats().engine.blocks_used == 0
        )
        assert engine.stats().finished["abort"] == 300
        assert not engine._mailboxes and not engine._processor._open
        assert (await collect(engine, [9], SamplingParams(max_tokens=3))).outputs[0].text == expected_text([9], 3)
        assert len(os.listdir("/proc/self/fd")) <= open_files


_ORPHAN = """
import asyncio, os, signal, sys
from whalefall import EngineConfig
from whalefall.engine.supervisor import Supervisor
async def main():
    supervisor = Supervisor(EngineConfig(model="stub"), factory="whalefall.testing.stub_process:" + sys.argv[1])
    if sys.argv[1] == "plain":
        await supervisor.wait_ready()
    print(supervisor.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""


@pytest.mark.parametrize("name", ["plain", "hanging"])
def test_the_engine_leaves_when_its_parent_is_killed(name: str, own_temporary_folder: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(own_temporary_folder)}
    # The pipe closes when the last process that holds it has ended, so `run` returns when both are gone.
    done = subprocess.run([sys.executable, "-c", _ORPHAN, name], env=environment, stdout=subprocess.PIPE, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    end_s = time.monotonic() + 60
    while is_running(int(done.stdout)):  # its files are closed, its end may be a moment away
        assert time.monotonic() < end_s
        time.sleep(0.01)
    assert not list(own_temporary_folder.iterdir())


def test_the_api_process_does_not_import_torch() -> None:
    modules = "whalefall.cli.serve, whalefall.cli.server_process, whalefall.engine.process"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"
