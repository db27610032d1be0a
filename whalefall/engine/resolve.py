# SPDX-License-Identifier: Apache-2.0
"""resolve: a user's choices, a model's facts and a machine's facts -> every value the engine runs with. Pure; runs once.

All problems are reported in one ConfigError. Each value remembers who chose it. `MemoryTable` adds up what will be allocated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeVar

from whalefall.core.cache_spec import CacheSpec
from whalefall.core.errors import ConfigError
from whalefall.engine.config import EngineConfig, check_options
from whalefall.engine.drafting import DraftPlan
from whalefall.engine.facts import DeviceFacts, DtypeName, ModelFacts
from whalefall.engine.kv_events import KvEventsConfig
from whalefall.runtime.kvcache.tiers.layout import RecordLayout
from whalefall.runtime.kvcache.tiers.sizes import TierSizes
from whalefall.runtime.worker.memory import WorkerMemory, plan_memory

T = TypeVar("T")
GIB = 2**30
COMFORTABLE_SHARE = 0.5
"""Weights up to this share of free memory fit comfortably: the rest holds caches, activations and the page cache of the shards."""
CPU_CACHE_SHARE = 0.4
CPU_CACHE_MAX_BYTES = 4 * GIB
"""Pools are zeroed at start, and a desktop has other uses for its memory."""
HOST_CACHE_BYTES = GIB
"""Of the host tier when only a disk tier was asked for: everything passes through it."""
HOST_CACHE_SHARE = 0.1
"""And no more than this share of what is free on the host."""
DISK_CACHE_BYTES = 32 * GIB
GPU_WORKSPACE_BYTES = 4 * GIB
"""Kept free on a GPU for activations and libraries."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedConfig:
    """Nothing left open. Field names as in EngineConfig where they mean the same."""

    model_name: str
    family: str
    device: Literal["cpu", "cuda"]
    dtype: DtypeName
    weights: Literal["packed", "dense"]
    kv_cache_dtype: Literal["model", "unrounded"]
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int
    """Physical blocks, counting the null block."""
    num_slots: int
    replay: Literal["exact", "bounded"]
    decoder_window: int | None
    prefix_caching: bool = False
    replay_rows: int = 0
    """Rows that refill every window after a prefix hit."""
    has_fixed_state: bool = False
    """Whether a request keeps more than blocks."""
    kv_events: KvEventsConfig | None = None
    async_scheduling: bool
    has_graphs: bool = False
    """Decode steps run as captured CUDA graphs; the last state slot is theirs."""
    drafts: DraftPlan | None = None
    """None: no speculation."""
    load_format: Literal["auto", "random"] = "auto"
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = "raw_logprobs"
    is_deterministic: bool = False
    max_logprobs: int
    seed: int | None
    stats_interval_s: float
    vocab_size: int
    history_tokens: int
    weights_bytes: int
    """Of weights on the device: the family's own footprint, or an estimate from the shard headers."""
    is_weights_exact: bool = False
    """Whether it is the footprint, which is exact to the byte."""
    mapped_bytes: int = 0
    """Of tables that are read in place from the checkpoint's files, in host memory as far as there is any."""
    memory: WorkerMemory
    tiers: TierSizes | None = None
    """Below the device's blocks; None for none."""
    chosen_by: dict[str, str]
    """Option -> "user", or the reason of the choice."""

    def memory_table(self, weights_bytes: int | None = None) -> str:
        """What is allocated at start, adding up to its last line.

        Args:
            weights_bytes: measured after loading; without it the footprint or, called so, the estimate is shown.
        """
        m = self.memory
        weights = self.weights_bytes if weights_bytes is None else weights_bytes
        is_exact = self.is_weights_exact or weights_bytes is not None
        rows = [
            ("weights", f"{self.weights}, {self.dtype}" + ("" if is_exact else ", estimated"), weights),
            ("cache blocks", f"{m.num_blocks:,} of {self.block_size} tokens, {m.block_bytes:,} bytes each", m.num_blocks * m.block_bytes),
            ("rings and state", f"{m.num_slots:,} requests, {m.slot_bytes:,} bytes each", m.num_slots * m.slot_bytes),
            ("token and block table", f"{m.num_slots:,} x {self.max_model_len:,} tokens", m.table_bytes),
        ]
        if m.snapshot_bytes:
            rows.insert(2, ("window snapshots", f"one per block, {m.snapshot_bytes:,} bytes each", m.num_blocks * m.snapshot_bytes))
        tier_rows = [] if self.tiers is None else _tier_rows(self.tiers)
        if self.device == "cpu":
            rows += tier_rows[:1]  # the host's memory is the device's
        rows.append(("total", f"on {self.device}", sum(size for _, _, size in rows)))
        rows += tier_rows[1:] if self.device == "cpu" else tier_rows
        if self.mapped_bytes:
            rows.append(("not counted", "tables mapped from the checkpoint's files", self.mapped_bytes))
        return "\n".join(f"  {name:<22} {how:<48} {size:>18,} bytes" for name, how, size in rows)


def _tier_rows(tiers: TierSizes) -> list[tuple[str, str, int]]:
    rows = [("host tier", f"{tiers.num_rows:,} blocks of {tiers.record_bytes:,} bytes, in host memory", tiers.host_bytes)]
    if tiers.store_dir is not None:
        rows.append(("object store" if tiers.is_url else "disk tier, at most", tiers.store_dir, tiers.store_bytes))
    return rows


def resolve(user: EngineConfig, model: ModelFacts, device: DeviceFacts | None) -> ResolvedConfig:
    """
    Args:
        device: of the kind `user.device` asks for; None when the machine has none.
    Raises:
        ConfigError: every problem found, each with the value, the limit and the way out.
    """
    return _Resolver(user, model, device).result()


class _Resolver:
    def __init__(self, user: EngineConfig, model: ModelFacts, device: DeviceFacts | None) -> None:
        self._user = user
        self._model = model
        self._problems = check_options(user)
        self._chosen_by: dict[str, str] = {}
        if device is None:
            self._problems.append("device is 'cuda', but this machine has no usable GPU; use --device cpu or auto")
        self._device = device

    def result(self) -> ResolvedConfig:
        user, model, device = self._user, self._model, self._device
        self._check_length()
        if self._problems or device is None:
            raise ConfigError(self._problems)
        dtype = self._dtype(device)
        weights = self._weights(device, dtype)
        kv_cache_dtype = self._kv_cache_dtype(dtype)
        spec = self._cache_spec(dtype, weights, kv_cache_dtype)
        is_caching = self._prefix_caching(spec)
        kv_events = self._kv_events(is_caching)
        keeps_snapshots = is_caching and user.replay == "exact" and spec.snapshot_bytes > 0
        bytes_per_block = spec.block_bytes + (spec.snapshot_bytes if keeps_snapshots else 0)
        weights_bytes = self._weights_bytes(dtype, weights)
        is_ahead = self._pick(
            "async_scheduling", user.async_scheduling, device.kind == "cuda", "on a CPU a launch has finished when it returns"
        )
        is_kernel_road = device.kind == "cuda" and dtype == "bfloat16" and weights == "packed"  # the references read counts on the host
        has_graphs = is_kernel_road and model.is_capturable and not (user.enforce_eager or user.deterministic)
        # One step ahead, the slot of a request that has just ended is still in use; rows that fill up a graph need a slot of their own.
        num_slots_extra = int(is_ahead) + int(has_graphs)
        cache_bytes = self._cache_bytes(device, weights_bytes)
        max_num_seqs = self._max_num_seqs(spec, cache_bytes)
        num_slots = max_num_seqs + num_slots_extra
        max_model_len = self._max_model_len(spec, bytes_per_block, cache_bytes, num_slots)
        batched_default = 8192 if device.kind == "cuda" else 2048
        max_num_batched_tokens = self._pick("max_num_batched_tokens", user.max_num_batched_tokens, batched_default, f"on a {device.kind}")
        memory = self._memory(spec, num_slots, max_model_len, max_num_batched_tokens, cache_bytes, keeps_snapshots)
        tiers = self._tiers(device, spec, is_caching=is_caching, keeps_snapshots=keeps_snapshots)
        on_device = 0 if memory is None else memory.total_bytes
        if tiers is not None and device.kind == "cpu":
            on_device += tiers.host_bytes
        if memory is not None and weights_bytes + on_device > device.free_bytes:
            self._problems.append(
                f"weights ({weights_bytes:,} bytes) and caches ({on_device:,}) exceed the {device.free_bytes:,} bytes free on "
                f"{device.name}: lower kv_cache_memory_bytes, max_num_seqs or max_model_len, or use weights=packed"
            )
        if self._problems or memory is None:
            raise ConfigError(self._problems)
        return ResolvedConfig(
            model_name=user.served_model_name or model.name,
            family=model.family,
            device=device.kind,
            dtype=dtype,
            weights=weights,
            kv_cache_dtype=kv_cache_dtype,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            block_size=user.block_size,
            num_blocks=memory.num_blocks,
            num_slots=num_slots,
            replay=user.replay,
            decoder_window=model.decoder_window,
            prefix_caching=is_caching,
            replay_rows=spec.replay_rows,
            has_fixed_state=spec.snapshot_bytes > 0,
            kv_events=kv_events,
            async_scheduling=is_ahead,
            has_graphs=has_graphs,
            drafts=model.drafts,
            load_format=user.load_format,
            logprobs_mode=user.logprobs_mode,
            is_deterministic=user.deterministic,
            max_logprobs=user.max_logprobs,
            seed=user.seed,
            stats_interval_s=user.stats_interval_s,
            vocab_size=model.vocab_size,
            history_tokens=model.history_tokens,
            weights_bytes=weights_bytes,
            is_weights_exact=model.weights.is_exact,
            mapped_bytes=model.weights.mapped_bytes(),
            memory=memory,
            tiers=tiers,
            chosen_by=self._chosen_by,
        )

    def _pick(self, name: str, wanted: T | None, otherwise: T, reason: str) -> T:
        self._chosen_by[name] = "user" if wanted is not None else reason
        return otherwise if wanted is None else wanted

    def _check_length(self) -> None:
        user = self._user
        longest = self._model.max_position_embeddings
        if isinstance(user.max_model_len, int) and user.max_model_len > longest:
            self._problems.append(f"max_model_len is {user.max_model_len:,}, the model goes to {longest:,} (max_position_embeddings)")

    def _dtype(self, device: DeviceFacts) -> DtypeName:
        wanted = None if self._user.dtype == "auto" else self._user.dtype
        if device.kind == "cuda":
            return self._pick("dtype", wanted, "bfloat16", "on a GPU")
        if self._model.weights.packed_bytes("float32") <= COMFORTABLE_SHARE * device.free_bytes:
            return self._pick("dtype", wanted, "float32", "exact, and the weights fit comfortably")
        return self._pick("dtype", wanted, "bfloat16", "float32 weights would not fit comfortably")

    def _weights(self, device: DeviceFacts, dtype: DtypeName) -> Literal["packed", "dense"]:
        wanted = None if self._user.weights == "auto" else self._user.weights
        if device.kind == "cuda" and self._model.weights.packed_bytes(dtype) < self._model.weights.dense_bytes(dtype):
            return self._pick("weights", wanted, "packed", "the kernels of a GPU read packed weights, which are fewer bytes")
        if self._model.weights.dense_bytes(dtype) <= COMFORTABLE_SHARE * device.free_bytes:
            return self._pick("weights", wanted, "dense", "they fit comfortably")
        return self._pick("weights", wanted, "packed", f"dense weights would take more than half of {device.free_bytes:,} bytes")

    def _weights_bytes(self, dtype: DtypeName, weights: Literal["packed", "dense"]) -> int:
        facts = self._model.weights
        return facts.dense_bytes(dtype) if weights == "dense" else facts.packed_bytes(dtype)

    def _kv_cache_dtype(self, dtype: DtypeName) -> Literal["model", "unrounded"]:
        wanted = None if self._user.kv_cache_dtype == "auto" else self._user.kv_cache_dtype
        if dtype == "float32":
            return self._pick("kv_cache_dtype", wanted, "unrounded", "dtype is float32")
        return self._pick("kv_cache_dtype", wanted, "model", f"dtype is {dtype}")

    def _cache_spec(
        self, dtype: DtypeName, weights: Literal["packed", "dense"], kv_cache_dtype: Literal["model", "unrounded"]
    ) -> CacheSpec:
        # The ratios do not depend on the block size: read them at a size that suits all models, then judge the user's.
        spec = self._model.cache_spec(dtype, weights, kv_cache_dtype, EngineConfig(model="").block_size)
        size = self._user.block_size
        bad = sorted({f.tokens_per_entry for f in spec.growing if size % f.tokens_per_entry})
        if bad:
            self._problems.append(f"block_size is {size}, must be a multiple of the compression ratios {bad}")
            return spec
        return self._model.cache_spec(dtype, weights, kv_cache_dtype, size)

    def _kv_events(self, is_caching: bool) -> KvEventsConfig | None:
        if self._user.kv_events_config is None:
            return None
        try:
            config = KvEventsConfig.parse(self._user.kv_events_config)
        except ConfigError as error:
            self._problems += error.problems
            return None
        if config is not None and not is_caching:
            self._problems.append("kv_events_config has nothing to tell without a prefix cache: leave out --no-enable-prefix-caching")
        return config

    def _prefix_caching(self, spec: CacheSpec) -> bool:
        wanted = self._user.enable_prefix_caching
        if self._user.replay == "bounded" and spec.states:
            # Rows before the hit refill windows; a state that depends on the whole sequence they cannot refill.
            if wanted:
                self._problems.append(
                    "enable_prefix_caching needs replay=exact with this model: its state cannot be rebuilt from the last rows of a prefix"
                )
            return self._pick("enable_prefix_caching", wanted, False, "the model's state cannot be rebuilt by bounded replay")
        return self._pick("enable_prefix_caching", wanted, True, "default")

    def _cache_bytes(self, device: DeviceFacts, weights_bytes: int) -> int:
        """For blocks and state slots together."""
        if device.kind == "cuda":
            used = device.total_bytes - device.free_bytes
            room = int(self._user.gpu_memory_utilization * device.total_bytes) - used - weights_bytes - GPU_WORKSPACE_BYTES
            reason = "gpu_memory_utilization, less weights and workspace"
        else:
            room = min(CPU_CACHE_MAX_BYTES, int(CPU_CACHE_SHARE * (device.free_bytes - weights_bytes)))
            reason = f"{CPU_CACHE_SHARE:.0%} of what weights leave, at most {CPU_CACHE_MAX_BYTES // GIB} GiB"
        chosen = self._pick("kv_cache_memory_bytes", self._user.kv_cache_memory_bytes, room, reason)
        if chosen <= 0:
            self._problems.append(
                f"the weights ({weights_bytes:,} bytes) leave no room for the KV cache: {device.free_bytes:,} bytes free on {device.name}"
            )
        return max(chosen, 0)

    def _tiers(self, device: DeviceFacts, spec: CacheSpec, *, is_caching: bool, keeps_snapshots: bool) -> TierSizes | None:
        user = self._user
        for name in ("disk_cache_bytes", "disk_cache_write_bytes_per_s"):
            if getattr(user, name) is not None and user.disk_cache_dir is None:
                self._problems.append(f"{name} is {getattr(user, name)}, but there is no disk_cache_dir")
        asked = "disk_cache_dir" if user.disk_cache_dir is not None else "host_cache_bytes"
        if user.disk_cache_dir is None and not user.host_cache_bytes:
            return None
        if not is_caching:
            self._problems.append(f"{asked} needs enable_prefix_caching: what cannot be found again need not be kept")
            return None
        record_bytes = RecordLayout.of(spec, with_snapshots=keeps_snapshots).record_bytes
        host_free = device.free_bytes if device.host_free_bytes is None else device.host_free_bytes
        otherwise = max(4 * record_bytes, min(HOST_CACHE_BYTES, int(HOST_CACHE_SHARE * host_free)))
        host_bytes = self._pick("host_cache_bytes", user.host_cache_bytes, otherwise, "a way station to disk_cache_dir")
        if record_bytes == 0 or host_bytes < record_bytes:
            self._problems.append(f"host_cache_bytes is {host_bytes:,}, but one block takes {record_bytes:,}: raise it, or leave it out")
            return None
        if host_bytes > host_free:
            self._problems.append(f"host_cache_bytes is {host_bytes:,}, but the host has {host_free:,} bytes free")
        store_dir = None if user.disk_cache_dir is None else str(user.disk_cache_dir)
        is_url = store_dir is not None and "://" in store_dir
        if is_url and user.disk_cache_bytes is not None:
            self._problems.append(
                f"disk_cache_bytes is {user.disk_cache_bytes:,}, but {store_dir} makes room by its own rules: leave it out"
            )
        has_cap = store_dir is not None and not is_url
        return TierSizes(
            num_rows=host_bytes // record_bytes,
            record_bytes=record_bytes,
            store_dir=store_dir,
            store_bytes=self._pick("disk_cache_bytes", user.disk_cache_bytes, DISK_CACHE_BYTES, "default") if has_cap else 0,
            write_bytes_per_s=user.disk_cache_write_bytes_per_s,
        )

    def _max_num_seqs(self, spec: CacheSpec, cache_bytes: int) -> int:
        wanted = self._user.max_num_seqs
        if not spec.slot_bytes:
            return self._pick("max_num_seqs", wanted, 256, "default")
        most = max(1, cache_bytes // 2 // spec.slot_bytes)
        return self._pick(
            "max_num_seqs", wanted, min(256, most), "default" if most >= 256 else "their state takes half of the cache memory"
        )

    def _max_model_len(self, spec: CacheSpec, bytes_per_block: int, cache_bytes: int, num_slots: int) -> int:
        longest = self._model.max_position_embeddings
        if not spec.block_bytes:
            return self._pick("max_model_len", self._user.max_model_len, longest, "the model's limit")
        usable = (cache_bytes - num_slots * spec.slot_bytes) // bytes_per_block - 1
        fitting = usable * spec.block_tokens
        if fitting >= longest:
            return self._pick("max_model_len", self._user.max_model_len, longest, "the model's limit")
        return self._pick("max_model_len", self._user.max_model_len, max(fitting, 2), "what the cache memory holds")

    def _memory(
        self, spec: CacheSpec, num_slots: int, max_model_len: int, max_batched: int, cache_bytes: int, keeps_snapshots: bool
    ) -> WorkerMemory | None:
        try:
            return plan_memory(
                spec,
                num_slots=num_slots,
                max_model_len=max_model_len,
                max_num_batched_tokens=max_batched,
                vocab_size=self._model.vocab_size,
                kv_cache_memory_bytes=cache_bytes,
                keeps_snapshots=keeps_snapshots,
            )
        except ConfigError as error:
            self._problems += error.problems
            return None
