# SPDX-License-Identifier: Apache-2.0
"""Whole engines over host and disk tiers: restarts and neighbours hit, damage and full disks cost hits and nothing else, and the tokens
are those of a run without tiers.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.engine.test_resolve import CPU, GPU, MODEL, USER, problems
from whalefall import LLM, RequestOutput, SamplingParams
from whalefall.core.request import AbortRequests, EngineRequest
from whalefall.engine.resolve import GIB, resolve
from whalefall.models.toy.config import ToyConfig
from whalefall.runtime.kvcache.tiers.disk import BlockFiles
from whalefall.runtime.kvcache.tiers.store import HEADER_BYTES
from whalefall.testing.toy_checkpoint import write_toy_checkpoint
from whalefall.weights.fingerprint import fingerprint

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=3)
PROMPT = [3 + (7 * i * i) % 200 for i in range(61)]
WHALE = Path(__file__).parents[1] / "goldens" / "v41-a-quant"
"""A V4.1 model with a window of 16."""
OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_num_seqs": 4, "use_tqdm": False, "max_model_len": 128}


@pytest.fixture(scope="module")
def toy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy_checkpoint(tmp_path_factory.mktemp("toy"), ToyConfig(max_position_embeddings=128), seed=3)


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def ask(llm: LLM, prompt: list[int] = PROMPT, params: SamplingParams = GREEDY) -> RequestOutput:
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    return output


def asked_once(model_dir: Path, prompt: list[int] = PROMPT, **options: Any) -> RequestOutput:
    with LLM(model_dir, **OPTIONS | options) as llm:
        return ask(llm, prompt)


def logprobs(output: RequestOutput) -> list[float]:
    choice = output.outputs[0]
    assert choice.logprobs is not None
    return [position[token_id].logprob for position, token_id in zip(choice.logprobs, choice.token_ids, strict=True)]


def block_files(disk: Path) -> list[Path]:
    return sorted(disk.rglob("*.kv"))


@pytest.mark.parametrize("replay", ["exact", "bounded"])
def test_a_restart_hits_and_answers_as_a_hit_on_the_device_does(replay: str, disk: Path) -> None:
    options = {"replay": replay, "block_size": 8, "disk_cache_dir": disk}
    with LLM(WHALE, **OPTIONS | options) as llm:
        cold, hit = ask(llm), ask(llm)
    again = asked_once(WHALE, **options)

    assert (cold.num_cached_tokens, hit.num_cached_tokens, again.num_cached_tokens) == (0, 56, 56)
    assert again.outputs[0].token_ids == hit.outputs[0].token_ids
    assert logprobs(again) == pytest.approx(logprobs(hit), abs=1e-5)  # pools lie elsewhere in memory, which shifts last bits on a CPU
    if replay == "exact":
        assert again.outputs[0].token_ids == cold.outputs[0].token_ids
        assert logprobs(again) == pytest.approx(logprobs(cold), abs=1e-4)


def test_blocks_that_the_device_evicted_come_back_from_the_host() -> None:
    small = {"replay": "exact", "block_size": 8, "kv_cache_memory_bytes": None, "host_cache_bytes": 64 * 2**20}
    other = [5 + (3 * i) % 150 for i in range(100)]
    with LLM(WHALE, **OPTIONS | {"replay": "exact", "block_size": 8}) as llm:
        plenty = llm.config.memory
        cold = ask(llm)
    small["kv_cache_memory_bytes"] = plenty.num_slots * plenty.slot_bytes + 17 * (plenty.block_bytes + plenty.snapshot_bytes)
    with LLM(WHALE, **OPTIONS | small) as llm:
        first = ask(llm)
        ask(llm, other)
        again = ask(llm)
        stats = llm.stats().engine.tiers
        cache = llm.core.scheduler.cache
        assert cache.counters.evicted_blocks > 0 and first.num_cached_tokens == 0 and again.num_cached_tokens == 56
        assert stats is not None and stats.host_hits > 0 and stats.host_loaded_bytes > 0 and not stats.has_disk
    assert cold.outputs[0].token_ids == first.outputs[0].token_ids == again.outputs[0].token_ids
    assert logprobs(again) == pytest.approx(logprobs(cold), abs=1e-4)


def test_two_engines_at_once_share_a_disk(toy_dir: Path, disk: Path) -> None:
    options = OPTIONS | {"block_size": 8, "disk_cache_dir": disk}
    with LLM(toy_dir, **options) as first, LLM(toy_dir, **options) as second:
        cold = ask(first)
        first.core._tiers._mover.close(drain_s=10)  # type: ignore[union-attr]  # what it wrote is there now
        hit = ask(second)
    assert (cold.num_cached_tokens, hit.num_cached_tokens) == (0, 56)
    assert hit.outputs[0].token_ids == cold.outputs[0].token_ids


SCRIPT = """
import sys
from whalefall import LLM, SamplingParams
prompt = [3 + (7 * i * i) % 200 for i in range(61)]
with LLM(sys.argv[1], device="cpu", dtype="float32", max_num_seqs=4, max_model_len=128, block_size=8, disk_cache_dir=sys.argv[2]) as llm:
    out = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True), use_tqdm=False)[0]
    print(out.num_cached_tokens, *out.outputs[0].token_ids)
"""


def test_another_process_hits_what_this_one_wrote(toy_dir: Path, disk: Path) -> None:
    here = asked_once(toy_dir, block_size=8, disk_cache_dir=disk)
    there = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(toy_dir), str(disk)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert there.stdout.split() == ["56", *map(str, here.outputs[0].token_ids)]


@pytest.mark.parametrize("changed", [{"block_size": 16}, {"dtype": "bfloat16"}, {"replay": "exact"}], ids=lambda c: next(iter(c)))
def test_other_settings_never_hit(changed: dict[str, Any], disk: Path) -> None:
    options = {"block_size": 8, "disk_cache_dir": disk}
    asked_once(WHALE, **options)
    assert asked_once(WHALE, **options | changed).num_cached_tokens == 0
    assert asked_once(WHALE, **options).num_cached_tokens == 56


def test_other_weights_of_the_same_shape_never_hit(toy_dir: Path, tmp_path: Path, disk: Path) -> None:
    other = write_toy_checkpoint(tmp_path / "other", ToyConfig(max_position_embeddings=128), seed=4)
    asked_once(toy_dir, block_size=8, disk_cache_dir=disk)
    assert asked_once(other, block_size=8, disk_cache_dir=disk).num_cached_tokens == 0


def test_weights_that_differ_in_one_byte_never_hit(tmp_path: Path, disk: Path) -> None:
    """Same size, same headers, same samples."""
    model = Path(shutil.copytree(WHALE, tmp_path / "model"))
    shard = model / "model-00002-of-00002.safetensors"
    asked_once(model, block_size=8, disk_cache_dir=disk)
    before, content = fingerprint(model), bytearray(shard.read_bytes())
    content[len(content) // 2 + 1_001] ^= 1
    shard.write_bytes(content)

    assert fingerprint(model) == before, "a sample lies here: the test needs another place"
    assert asked_once(model, block_size=8, disk_cache_dir=disk).num_cached_tokens == 0


def test_a_corrupt_block_ends_the_hit_before_it_and_is_written_again(toy_dir: Path, disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = {"block_size": 8, "disk_cache_dir": disk}
    cold = asked_once(toy_dir, **options)
    for file in block_files(disk):
        content = bytearray(file.read_bytes())
        content[HEADER_BYTES + 5] ^= 1
        file.write_bytes(content)
    with caplog.at_level(logging.WARNING, logger="whalefall"):
        damaged = asked_once(toy_dir, **options)
    assert damaged.num_cached_tokens == 0 and damaged.outputs[0].token_ids == cold.outputs[0].token_ids
    assert sum("checksum" in record.getMessage() for record in caplog.records) == 1  # reading stops at the first
    healed = asked_once(toy_dir, **options)
    assert healed.num_cached_tokens == 8  # the others are still damaged, and found so one by one
    assert healed.outputs[0].token_ids == cold.outputs[0].token_ids


def test_a_full_disk_is_one_warning_and_requests_go_on(
    toy_dir: Path, disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_space(self: BlockFiles, key: bytes, record: memoryview) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(BlockFiles, "write", no_space)
    with caplog.at_level(logging.WARNING, logger="whalefall"), LLM(toy_dir, **OPTIONS | {"block_size": 8, "disk_cache_dir": disk}) as llm:
        cold, other, hit = ask(llm), ask(llm, PROMPT[::-1]), ask(llm)
        llm.core._tiers._mover.close(drain_s=10)  # type: ignore[union-attr]
        stats = llm.stats().engine.tiers
    assert len(other.outputs[0].token_ids) == 6 and hit.outputs[0].token_ids == cold.outputs[0].token_ids
    assert [r.getMessage() for r in caplog.records if "No space" in r.getMessage()] == [
        "cache store turned off for writing: [Errno 28] No space left on device; what it holds is still read"
    ]
    assert stats is not None and block_files(disk) == []


def test_a_directory_that_cannot_be_used_is_a_warning(toy_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level(logging.WARNING, logger="whalefall"):
        output = asked_once(toy_dir, block_size=8, disk_cache_dir=tmp_path / "file" / "cache")
    assert len(output.outputs[0].token_ids) == 6
    assert any("disk_cache_dir cannot be used" in record.getMessage() for record in caplog.records)


def test_a_small_quota_holds(toy_dir: Path, disk: Path) -> None:
    file_bytes = 0
    asked_once(toy_dir, block_size=8, disk_cache_dir=disk)
    file_bytes = block_files(disk)[0].stat().st_size
    with LLM(toy_dir, **OPTIONS | {"block_size": 8, "disk_cache_dir": disk, "disk_cache_bytes": 9 * file_bytes}) as llm:
        for n in range(6):
            ask(llm, [3 + (n * 31 + i * i) % 200 for i in range(61)])
    assert 0 < len(block_files(disk)) <= 9


def test_an_object_store_works_as_the_disk_does(toy_dir: Path, tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    options = {"block_size": 8, "disk_cache_dir": f"memory://{tmp_path}/blocks"}
    cold, hit = asked_once(toy_dir, **options), asked_once(toy_dir, **options)
    assert (cold.num_cached_tokens, hit.num_cached_tokens) == (0, 56)
    assert hit.outputs[0].token_ids == cold.outputs[0].token_ids


@pytest.fixture
def slow_reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A disk that answers only when the event is set."""
    may_read = threading.Event()
    read = BlockFiles.read

    def wait_then_read(self: BlockFiles, key: bytes, record: memoryview) -> bool:
        assert may_read.wait(30)
        return read(self, key, record)

    monkeypatch.setattr(BlockFiles, "read", wait_then_read)
    yield may_read
    may_read.set()


def test_a_disk_that_does_not_answer_delays_a_request_and_never_stops_it(toy_dir: Path, disk: Path, slow_reads: threading.Event) -> None:
    options = {"block_size": 8, "disk_cache_dir": disk}
    cold = asked_once(toy_dir, **options)
    with LLM(toy_dir, **OPTIONS | options) as llm:
        output = ask(llm)  # gives up waiting after two seconds
        stats = llm.stats().engine.tiers
        slow_reads.set()
    assert output.num_cached_tokens == 0 and output.outputs[0].token_ids == cold.outputs[0].token_ids
    assert stats is not None and stats.num_timeouts == 1


def test_an_abort_while_a_request_waits_leaves_nothing_behind(toy_dir: Path, disk: Path, slow_reads: threading.Event) -> None:
    options = {"block_size": 8, "disk_cache_dir": disk}
    asked_once(toy_dir, **options)
    with LLM(toy_dir, **OPTIONS | options) as llm:
        sampling = SamplingParams(max_tokens=4, seed=0)
        llm.core.send(EngineRequest(request_id="gone", prompt_token_ids=tuple(PROMPT), sampling=sampling, arrival_s=0.0))
        assert llm.core.turn() == []
        llm.core.send(AbortRequests(request_ids=("gone",)))
        (update,) = llm.core.turn()
        assert update.finish_reason == "abort" and not llm.core.scheduler.has_work
        slow_reads.set()
        while llm.core.scheduler.waits_for_moves:
            llm.core.turn()
        scheduler = llm.core.scheduler
        scheduler.cache.check()
        assert scheduler.tiers is not None
        scheduler.tiers.check()
        assert scheduler.cache.is_pristine


def test_a_storm_leaves_pools_and_rows_as_at_the_start(toy_dir: Path, disk: Path) -> None:
    with LLM(toy_dir, **OPTIONS | {"block_size": 8, "disk_cache_dir": disk, "host_cache_bytes": 2**18}) as llm:
        record_bytes = llm.config.tiers.record_bytes  # type: ignore[union-attr]
        assert llm.config.tiers is not None and llm.config.tiers.num_rows == 2**18 // record_bytes
        prompts = [[3 + (n % 5 * 31 + i * i) % 200 for i in range(20 + n % 40)] for n in range(120)]
        for first in range(0, 120, 40):
            llm.generate(prompts[first : first + 40], SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True), use_tqdm=False)
        while llm.core.scheduler.waits_for_moves:
            llm.core.turn()
        scheduler = llm.core.scheduler
        scheduler.cache.check()
        assert scheduler.tiers is not None
        scheduler.tiers.check()
        assert scheduler.cache.is_pristine and scheduler.tiers.book.num_available == scheduler.tiers.book.num_rows


def test_the_memory_table_has_a_row_per_tier_and_still_adds_up() -> None:
    user = replace(USER, host_cache_bytes=2 * GIB, disk_cache_dir="/somewhere")
    table = resolve(user, MODEL, CPU).memory_table()
    rows = {line[2:24].strip(): int(line.split()[-2].replace(",", "")) for line in table.splitlines()}
    names = list(rows)
    parts = names[: names.index("total")]
    assert rows["total"] == sum(rows[name] for name in parts) and "host tier" in parts
    assert names[names.index("total") + 1 :] == ["disk tier, at most"] and rows["disk tier, at most"] == 32 * GIB

    on_gpu = resolve(user, MODEL, replace(GPU, host_free_bytes=100 * GIB)).memory_table()
    assert on_gpu.index("total") < on_gpu.index("host tier")


def test_device_memory_does_not_depend_on_the_host_tier() -> None:
    """Case D11: scratch must not grow with blocks that are not on the device."""
    device = replace(GPU, host_free_bytes=500 * GIB)
    without, with_host = (resolve(replace(USER, host_cache_bytes=size), MODEL, device) for size in (None, 400 * GIB))
    assert without.memory == with_host.memory and without.tiers is None and with_host.tiers is not None
    assert with_host.tiers.host_bytes <= 400 * GIB


class LargestTensor(TorchDispatchMode):
    """The bytes of the largest tensor that any operation gave."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        sizes = [leaf.numel() * leaf.element_size() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.num_bytes = max([self.num_bytes, *sizes])
        return result


def test_scratch_of_a_full_context_does_not_grow_with_a_full_host_tier() -> None:
    """Case D11, run: a host pool of four times the device's, both filled, then a prompt of the whole context."""
    with LLM(WHALE, **OPTIONS | {"block_size": 8}) as llm:
        memory, record_bytes = llm.config.memory, llm.config.memory.block_bytes
    num_blocks = 20
    options = OPTIONS | {"block_size": 8, "kv_cache_memory_bytes": memory.num_slots * memory.slot_bytes + num_blocks * memory.block_bytes}
    largest = []
    for host_bytes in (None, 4 * num_blocks * (record_bytes + 1_024)):
        with LLM(WHALE, **options, host_cache_bytes=host_bytes) as llm:
            for number in range(10):
                ask(llm, [3 + (number * 17 + i * i) % 200 for i in range(100)])
            if llm.core.scheduler.tiers is not None:
                book = llm.core.scheduler.tiers.book
                assert book.num_listed >= 0.9 * book.num_rows >= 3 * num_blocks
            with LargestTensor() as seen:
                output = ask(llm, [5 + (i * i) % 190 for i in range(127)], replace(GREEDY, max_tokens=1))
            assert len(output.outputs[0].token_ids) == 1
            largest.append(seen.num_bytes)
    assert largest[0] == largest[1] > 0


def test_tier_options_that_cannot_be_are_told() -> None:
    assert "disk_cache_bytes is 5, but there is no disk_cache_dir" in problems(replace(USER, disk_cache_bytes=5))
    assert "host_cache_bytes needs enable_prefix_caching" in problems(replace(USER, host_cache_bytes=GIB, enable_prefix_caching=False))[0]
    assert "one block takes" in problems(replace(USER, host_cache_bytes=100))[0]
    assert any("the host has" in p for p in problems(replace(USER, host_cache_bytes=100 * GIB)))
    url = replace(USER, disk_cache_dir="s3://bucket/cache", disk_cache_bytes=GIB)
    assert "makes room by its own rules" in problems(url)[0]
    assert resolve(replace(USER, host_cache_bytes=0), MODEL, CPU).tiers is None
