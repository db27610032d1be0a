# SPDX-License-Identifier: Apache-2.0
"""What resolve needs to know about a machine and a model, as plain numbers: so a config can be resolved for a machine one does not have."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Literal, Protocol

from whalefall.core.cache_spec import DTYPE_BYTES, CacheSpec
from whalefall.engine.drafting import DraftPlan
from whalefall.models.definition import WeightKind

DtypeName = Literal["float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceFacts:
    kind: Literal["cpu", "cuda"]
    name: str
    total_bytes: int
    free_bytes: int
    """What this process could still take."""
    host_free_bytes: int | None = None
    """The same of host memory, where that is another memory; None: it is the same, or unknown."""


class WeightSizes(Protocol):
    """Bytes of the weights on the device, once loaded."""

    @property
    def is_exact(self) -> bool: ...

    def packed_bytes(self, dtype: DtypeName) -> int: ...

    def dense_bytes(self, dtype: DtypeName) -> int: ...

    def mapped_bytes(self) -> int:
        """What is read in place from the checkpoint's files and takes no memory of the device."""
        ...


@dataclass(frozen=True, slots=True)
class WeightFootprint:
    """Sizes as the model family itself states them: exact."""

    kinds: Callable[[DtypeName, Literal["packed", "dense"]], tuple[WeightKind, ...]]
    num_expert_ranks: int = 1
    """Ranks that share the routed experts; every other kind is copied to each."""

    @property
    def is_exact(self) -> bool:
        return True

    def packed_bytes(self, dtype: DtypeName) -> int:
        return self._device_bytes(dtype, "packed")

    def dense_bytes(self, dtype: DtypeName) -> int:
        return self._device_bytes(dtype, "dense")

    def mapped_bytes(self) -> int:
        return sum(kind.num_bytes for kind in self.kinds("bfloat16", "packed") if kind.place == "mapped")

    def per_rank(self, kind: WeightKind) -> int:
        return -(-kind.num_bytes // self.num_expert_ranks) if kind.is_split_over_experts else kind.num_bytes

    def _device_bytes(self, dtype: DtypeName, weights: Literal["packed", "dense"]) -> int:
        return sum(self.per_rank(kind) for kind in self.kinds(dtype, weights) if kind.place == "device")


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightFacts:
    """Sizes of the tensors that a model consumes, estimated from shard headers: for families without a footprint."""

    quantised_bytes: int
    """Quantised tensors with their scales, as stored."""
    quantised_elements: int
    plain_elements: int

    @property
    def is_exact(self) -> bool:
        return False

    def packed_bytes(self, dtype: DtypeName) -> int:
        return self.quantised_bytes + self.plain_elements * DTYPE_BYTES[dtype]

    def dense_bytes(self, dtype: DtypeName) -> int:
        return (self.quantised_elements + self.plain_elements) * DTYPE_BYTES[dtype]

    def mapped_bytes(self) -> int:
        return 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    name: str
    """Of the checkpoint's directory."""
    family: str
    vocab_size: int
    max_position_embeddings: int
    decoder_window: int | None
    history_tokens: int
    weights: WeightSizes
    cache_spec: Callable[[DtypeName, Literal["packed", "dense"], Literal["model", "unrounded"], int], CacheSpec]
    """(dtype, weights, kv_cache_dtype, block_tokens) -> what the caches need, those of the drafter among them."""
    drafts: DraftPlan | None = None
    """None: no speculation."""
    is_capturable: bool = False
    """Whether decode steps may become CUDA graphs."""


_SCALE_ENDINGS = (".scale", "_scale", "_scale_inv")


def weight_facts(headers: Mapping[str, tuple[str, tuple[int, ...], int]], consumed: Iterable[str]) -> WeightFacts:
    """
    Args:
        headers: tensor name -> (safetensors dtype name, shape, bytes).
        consumed: names the model loads.
    """
    quantised_bytes = quantised_elements = plain_elements = 0
    for name in consumed:
        dtype, shape, num_bytes = headers[name]
        if name.endswith(_SCALE_ENDINGS):
            quantised_bytes += num_bytes
        elif dtype.startswith("F8") or dtype in ("I8", "U8", "F4"):
            quantised_bytes += num_bytes
            quantised_elements += prod(shape) * (1 if dtype.startswith("F8") else 2)  # bytes hold two 4-bit values
        else:
            plain_elements += prod(shape)
    return WeightFacts(quantised_bytes=quantised_bytes, quantised_elements=quantised_elements, plain_elements=plain_elements)


def find_device(wanted: Literal["auto", "cpu", "cuda"]) -> DeviceFacts | None:
    """The machine's device of that kind; None when there is no such device."""
    import torch  # not above: who only reads facts, as the API process does, is spared the seconds of importing it

    has_gpu = wanted != "cpu" and torch.cuda.is_available()
    if wanted == "cuda" and not has_gpu:
        return None
    if has_gpu:
        free, total = torch.cuda.mem_get_info()
        host_free, _ = _host_memory()
        name = torch.cuda.get_device_name()
        return DeviceFacts(kind="cuda", name=name, total_bytes=total, free_bytes=free, host_free_bytes=host_free)
    free, total = _host_memory()
    return DeviceFacts(kind="cpu", name=f"{os.cpu_count()} CPU cores", total_bytes=total, free_bytes=free)


def _host_memory() -> tuple[int, int]:
    """Free and total bytes, as far as this process (maybe in a container) may go."""
    page = os.sysconf("SC_PAGE_SIZE")
    total = page * os.sysconf("SC_PHYS_PAGES")
    free = _meminfo_available() or page * os.sysconf("SC_AVPHYS_PAGES")
    limit, used = _read_number("/sys/fs/cgroup/memory.max"), _read_number("/sys/fs/cgroup/memory.current")
    if limit is not None and used is not None:
        total, free = min(total, limit), min(free, max(0, limit - used))
    return free, total


def _meminfo_available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)


def _read_number(file: str) -> int | None:
    try:
        text = Path(file).read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
