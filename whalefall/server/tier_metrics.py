# SPDX-License-Identifier: Apache-2.0
"""Metrics of the tiers below the device's blocks: where vLLM has no name for it, ours begin with `kv_tier_`. Absent without such tiers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from whalefall.observe.metrics import TierStats


def tier_blocks(tiers: TierStats | None) -> list[tuple[str, str, int]]:
    """(tier, state, count) for the gauge of blocks."""
    if tiers is None:
        return []
    rows = [("host", "used", tiers.host_blocks_used), ("host", "free", tiers.host_blocks_total - tiers.host_blocks_used)]
    if tiers.disk_blocks_total:
        rows += [("disk", "used", tiers.disk_blocks_used), ("disk", "free", max(0, tiers.disk_blocks_total - tiers.disk_blocks_used))]
    return rows


def tier_metrics(tiers: TierStats | None, labels: Sequence[str], values: Sequence[str]) -> Iterator[Metric]:
    if tiers is None:
        return
    for name, host, disk, text in (
        ("queries", tiers.host_queries, tiers.disk_queries, "Blocks of entering requests that were looked for in a tier."),
        ("hits", tiers.host_hits, tiers.disk_hits, "Blocks found there."),
        ("read_bytes", tiers.host_loaded_bytes, tiers.disk_read_bytes, "Bytes brought up from a tier."),
        ("written_bytes", tiers.host_stored_bytes, tiers.disk_written_bytes, "Bytes put down to a tier."),
        ("failures", tiers.host_failures, tiers.disk_failures, "Copies and file operations that failed, and records found damaged."),
        ("evictions", tiers.host_evictions, tiers.disk_evictions, "Blocks that made room for others."),
    ):
        counter = CounterMetricFamily(f"whalefall:kv_tier_{name}", text, labels=[*labels, "tier"])
        counter.add_metric([*values, "host"], host)
        if tiers.has_disk:
            counter.add_metric([*values, "disk"], disk)
        yield counter
    for name, count, text in (
        ("skipped_blocks", tiers.skipped_blocks, "Blocks not kept or not written because a tier did not keep up."),
        ("timeouts", tiers.num_timeouts, "Requests that gave up waiting for blocks and computed them."),
    ):
        counter = CounterMetricFamily(f"whalefall:kv_tier_{name}", text, labels=list(labels))
        counter.add_metric(list(values), count)
        yield counter
    if tiers.has_disk:
        gauge = GaugeMetricFamily(
            "whalefall:kv_tier_is_off", "1: reading or writing was given up after failures.", labels=[*labels, "tier"]
        )
        gauge.add_metric([*values, "disk"], int(tiers.is_disk_off))
        yield gauge
