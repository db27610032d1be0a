# SPDX-License-Identifier: Apache-2.0
"""The tiers' series stand in /metrics when there are tiers, each under its tier, and are absent when there are none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from whalefall.observe.metrics import EngineGauges, EngineStats, TierStats
from whalefall.server.metrics import registry_for, render


def series(tiers: TierStats | None) -> dict[str, float]:
    stats = EngineStats(engine=EngineGauges(blocks_total=5, tiers=tiers))
    door: Any = SimpleNamespace(model_name="m", engine_if_loaded=SimpleNamespace(stats=lambda: stats))
    text = cast("bytes", render(registry_for(door))).decode()
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    return {name.replace('engine="0",model_name="m",', ""): float(value) for name, value in lines if "tier" in name}


def test_without_tiers_only_the_device_has_a_series() -> None:
    assert {name for name in series(None) if 'tier="device"' not in name} == set()


def test_each_tier_has_its_counts() -> None:
    tiers = TierStats(
        host_blocks_used=1, host_blocks_total=4, host_hits=2, has_disk=True, disk_hits=3, disk_blocks_used=8, disk_blocks_total=9
    )
    found = series(tiers)
    assert found['whalefall:kv_tier_hits_total{tier="host"}'] == 2 and found['whalefall:kv_tier_hits_total{tier="disk"}'] == 3
    assert found['whalefall:kv_blocks{state="used",tier="host"}'] == 1 and found['whalefall:kv_blocks{state="free",tier="host"}'] == 3
    assert found['whalefall:kv_blocks{state="free",tier="disk"}'] == 1 and found['whalefall:kv_tier_is_off{tier="disk"}'] == 0


def test_a_host_tier_alone_has_no_disk_series() -> None:
    assert not any('tier="disk"' in name for name in series(TierStats(host_blocks_total=4)))
