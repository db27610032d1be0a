# SPDX-License-Identifier: Apache-2.0
"""The loop: serial and one step ahead, faults of one request and of a step, storms of aborts, stopping."""

from __future__ import annotations

import random
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whalefall.core.errors import EngineDead
from whalefall.core.request import AbortRequests, EngineRequest, FinishReason, RequestUpdate
from whalefall.core.sampling import SamplingParams
from whalefall.engine.core import EngineCore, Launcher
from whalefall.runtime.kvcache.manager import CacheManager
from whalefall.runtime.scheduler.config import SchedulerConfig
from whalefall.runtime.scheduler.scheduler import Scheduler
from whalefall.testing.engine import ScriptedWorker
from whalefall.testing.fakes import FakeClock, FakeWorker, expected_answer

BLOCK, VOCAB, MAX_LEN = 4, 64, 48
BOTH = pytest.mark.parametrize("is_ahead", [False, True], ids=["serial", "ahead"])


def make_core(worker: Launcher, *, is_ahead: bool, num_blocks: int = 30) -> EngineCore:
    config = SchedulerConfig(max_model_len=MAX_LEN, max_num_seqs=4, max_num_batched_tokens=10)
    scheduler = Scheduler(config, CacheManager(num_blocks, BLOCK, 4 + is_ahead))
    return EngineCore(scheduler, worker, clock=FakeClock(), is_one_step_ahead=is_ahead)


def request(name: str, num_prompt: int = 5, **sampling: object) -> EngineRequest:
    params = SamplingParams(**{"max_tokens": 8, "seed": 1, **sampling})  # type: ignore[arg-type]
    return EngineRequest(request_id=name, prompt_token_ids=tuple(range(num_prompt)), sampling=params, eos_token_ids=(63,))


def drain(core: EngineCore) -> list[RequestUpdate]:
    updates = []
    while core.has_work:
        updates += core.turn()
    return updates


def tokens_of(updates: list[RequestUpdate], name: str) -> tuple[int, ...]:
    return tuple(t for u in updates if u.request_id == name for t in u.new_token_ids)


def ends(updates: list[RequestUpdate]) -> dict[str, FinishReason]:
    finished = [u for u in updates if u.finish_reason is not None]
    assert len({u.request_id for u in finished}) == len(finished), "a request ended twice"
    return {u.request_id: u.finish_reason for u in finished if u.finish_reason is not None}


@BOTH
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_every_request_gets_its_answer_once_through_a_storm_of_aborts(is_ahead: bool, seed: int) -> None:
    rng = random.Random(seed)
    core = make_core(FakeWorker(block_tokens=BLOCK, vocab_size=VOCAB), is_ahead=is_ahead, num_blocks=rng.randint(14, 40))
    requests = [request(f"r{i}", rng.randint(1, 20), seed=i, max_tokens=rng.randint(1, 20)) for i in range(20)]
    updates: list[RequestUpdate] = []
    aborted = set()
    for item in requests:
        core.send(item)
        for _ in range(rng.randrange(4)):
            updates += core.turn()
        if rng.random() < 0.3:
            name = f"r{rng.randrange(20)}"
            aborted.add(name)
            core.send(AbortRequests(request_ids=(name,)))
    updates += drain(core)
    reasons = ends(updates)
    assert set(reasons) == {item.request_id for item in requests}
    for item in requests:
        ids, reason = expected_answer(item, MAX_LEN, VOCAB)
        got = tokens_of(updates, item.request_id)
        assert ids[: len(got)] == got
        if reasons[item.request_id] is FinishReason.ABORT:
            assert item.request_id in aborted
        else:
            assert (got, reasons[item.request_id]) == (ids, reason)
    core.scheduler.cache.check()
    assert core.scheduler.cache.is_pristine
    assert core.gauges.blocks_used == core.gauges.slots_used == core.gauges.num_running == 0


@BOTH
def test_a_request_the_scheduler_refuses_ends_with_an_error_alone(is_ahead: bool) -> None:
    core = make_core(FakeWorker(block_tokens=BLOCK, vocab_size=VOCAB), is_ahead=is_ahead)
    core.send(request("long", MAX_LEN))
    core.send(request("fine"))
    updates = drain(core)
    assert ends(updates) == {"long": FinishReason.ERROR, "fine": FinishReason.LENGTH}
    assert "48 tokens" in next(u.error or "" for u in updates if u.request_id == "long")
    assert core.fault is None


@BOTH
def test_a_fault_of_one_request_leaves_its_neighbours_alone(is_ahead: bool) -> None:
    core = make_core(FakeWorker(block_tokens=BLOCK, vocab_size=VOCAB, fault_at={"bad": 7}), is_ahead=is_ahead)
    good = request("good")
    core.send(request("bad"))
    core.send(good)
    updates = drain(core)
    assert ends(updates) == {"bad": FinishReason.ERROR, "good": FinishReason.LENGTH}
    assert tokens_of(updates, "good") == expected_answer(good, MAX_LEN, VOCAB)[0]
    assert core.scheduler.cache.is_pristine


@BOTH
def test_a_fault_of_a_step_ends_everything_with_an_error_and_refuses_more(is_ahead: bool) -> None:
    worker = ScriptedWorker(lambda new: [2] * 8)
    core = make_core(worker, is_ahead=is_ahead)
    for name in "abcdef":
        core.send(request(name))
    updates = [*core.turn(), *core.turn()]
    worker.fail_with = RuntimeError("the card fell out")
    core.send(request("unread"))
    core.send(request("refused", MAX_LEN))
    core.send(AbortRequests(request_ids=("b",)))
    updates += core.turn()
    reasons = ends(updates)
    assert reasons.pop("b") is FinishReason.ABORT
    assert reasons == dict.fromkeys([*"acdef", "unread", "refused"], FinishReason.ERROR)
    errors = {u.error for u in updates if u.finish_reason is FinishReason.ERROR and u.request_id != "refused"}
    assert errors == {"RuntimeError: the card fell out"}
    assert core.fault == "RuntimeError: the card fell out"
    assert core.scheduler.cache.is_pristine
    with pytest.raises(EngineDead, match="the card fell out"):
        core.send(request("late"))


def test_a_broken_scheduler_still_lets_every_request_end(monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core(ScriptedWorker(lambda new: [2] * 8), is_ahead=True)
    core.send(request("a"))
    core.turn()

    def broken(*_: object) -> None:
        raise AssertionError("lost count")

    monkeypatch.setattr(core.scheduler, "commit", broken)
    monkeypatch.setattr(core.scheduler, "fail_all", broken)
    assert ends(core.turn()) == {"a": FinishReason.ERROR}


def test_work_that_can_never_run_is_a_fault_and_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core(ScriptedWorker(lambda new: [2]), is_ahead=False)
    monkeypatch.setattr(core.scheduler, "plan", lambda now_s: None)
    core.send(request("a"))
    assert ends(core.turn()) == {"a": FinishReason.ERROR}
    assert core.fault is not None and "no step can be planned" in core.fault


@BOTH
def test_one_step_ahead_launches_before_it_reads(is_ahead: bool) -> None:
    worker = ScriptedWorker(lambda new: [2] * 8)
    core = make_core(worker, is_ahead=is_ahead)
    core.send(request("a"))
    updates = core.turn()
    assert worker.num_launches == 1
    assert len(updates) == (0 if is_ahead else 1)
    core.turn()
    assert worker.num_launches == 2
    drain(core)


class Threaded:
    """A core in a thread, with what it delivered."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.updates: list[RequestUpdate] = []
        self._changed = threading.Condition()
        self.thread = threading.Thread(target=core.run, args=(self._take,))
        self.thread.start()

    def _take(self, updates: list[RequestUpdate]) -> None:
        with self._changed:
            self.updates += updates
            self._changed.notify()

    def wait_for_ends(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: sum(u.is_finished for u in self.updates) >= count, timeout=60)

    def stop(self) -> None:
        self.core.stop()
        self.thread.join(60)
        assert not self.thread.is_alive()


@BOTH
def test_in_a_thread_it_rests_without_work_and_wakes_for_more(is_ahead: bool) -> None:
    threaded = Threaded(make_core(FakeWorker(block_tokens=BLOCK, vocab_size=VOCAB), is_ahead=is_ahead))
    for count in (1, 2, 3):
        threaded.core.send(request(f"r{count}"))
        threaded.wait_for_ends(count)
    steps = threaded.core.gauges.num_steps
    threaded.stop()
    assert threaded.core.gauges.num_steps == steps
    with pytest.raises(EngineDead, match="shut down"):
        threaded.core.send(request("late"))


@BOTH
def test_stopping_ends_open_requests_with_abort_and_frees_them(is_ahead: bool) -> None:
    worker = ScriptedWorker(lambda new: [2] * 30)
    worker.permits = threading.Semaphore(0)
    threaded = Threaded(make_core(worker, is_ahead=is_ahead))
    for name in "abcdef":
        threaded.core.send(request(name, max_tokens=30))
    threaded.core.stop()
    worker.permits.release(50)
    threaded.stop()
    assert ends(threaded.updates) == dict.fromkeys("abcdef", FinishReason.ABORT)
    assert threaded.core.scheduler.cache.is_pristine
