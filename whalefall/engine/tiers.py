# SPDX-License-Identifier: Apache-2.0
"""The tiers below the device's blocks are made here, from what the config asks for. The step loop serves them through tier_pump.py."""

from __future__ import annotations

from pathlib import Path

from whalefall.core.batch import CacheTensors
from whalefall.core.cache_spec import CacheSpec
from whalefall.core.errors import ConfigError
from whalefall.engine.resolve import ResolvedConfig
from whalefall.observe.log import get_logger
from whalefall.runtime.kvcache.manager import CacheManager
from whalefall.runtime.kvcache.tiers.disk import BlockFiles
from whalefall.runtime.kvcache.tiers.layout import RecordLayout
from whalefall.runtime.kvcache.tiers.ledger import LedgerConfig, TierLedger
from whalefall.runtime.kvcache.tiers.mover import Mover
from whalefall.runtime.kvcache.tiers.objects import BlockObjects
from whalefall.runtime.kvcache.tiers.record import BlockCopier, HostSlab
from whalefall.runtime.kvcache.tiers.sizes import TierSizes
from whalefall.runtime.kvcache.tiers.store import BlockStore
from whalefall.weights.fingerprint import content_fingerprint, fingerprint

log = get_logger(__name__)


def build_tiers(config: ResolvedConfig, spec: CacheSpec, tensors: CacheTensors, cache: CacheManager) -> tuple[TierLedger, Mover] | None:
    """Account and mover of the tiers that the config asks for; None when it asks for none.

    Raises:
        ConfigError: no host memory for them, or nothing here reaches the URL.
    """
    sizes = config.tiers
    if sizes is None:
        return None
    layout = record_layout(config, spec)
    assert layout.record_bytes == sizes.record_bytes, "memory was planned for other records"
    try:
        slab = HostSlab(layout, sizes.num_rows, is_pinned=config.device == "cuda")
    except (RuntimeError, MemoryError) as error:
        raise ConfigError(f"host_cache_bytes is {sizes.host_bytes:,}, and the host does not give it ({error}): lower it") from error
    copier = BlockCopier(layout, {**tensors.growing, **tensors.snapshots}, config.num_blocks, slab)
    store = _open_store(sizes, layout)
    min_hit_tokens = config.replay_rows if config.replay == "bounded" else 0
    ledger = TierLedger(cache, LedgerConfig(num_rows=sizes.num_rows, has_store=store is not None, min_hit_tokens=min_hit_tokens))
    return ledger, Mover(copier, slab, store, write_bytes_per_s=sizes.write_bytes_per_s)


def name_weights(config: ResolvedConfig, model_dir: Path) -> str:
    """What stands for the weights in the keys of blocks: all of their content where records outlive the process."""
    if not config.prefix_caching:
        return ""
    if config.load_format == "random":
        return "random weights, seed 0"
    sizes = config.tiers
    if sizes is None or sizes.store_dir is None:
        return fingerprint(model_dir)
    return content_fingerprint(model_dir, None if sizes.is_url else Path(sizes.store_dir) / "weights")


def record_layout(config: ResolvedConfig, spec: CacheSpec) -> RecordLayout:
    # Records outlive the process: another release, or another kind of device, may compute the same blocks a little differently.
    from whalefall import __version__

    return RecordLayout.of(spec, with_snapshots=config.memory.snapshot_bytes > 0, tag=f"{__version__} {config.device}")


def _open_store(sizes: TierSizes, layout: RecordLayout) -> BlockStore | None:
    if sizes.store_dir is None:
        return None
    if sizes.is_url:
        return BlockObjects(sizes.store_dir, layout.layout_id)
    try:
        return BlockFiles(Path(sizes.store_dir), layout.layout_id, max_bytes=sizes.store_bytes)
    except OSError as error:
        log.warning("disk_cache_dir cannot be used, the engine runs without it: %s", error)
        return None
