# SPDX-License-Identifier: Apache-2.0
"""Counters, and the throughput line that comes only when due."""

from __future__ import annotations

import logging

import pytest

from whalefall.observe.log import RequestLog, setup_logging
from whalefall.observe.metrics import EngineGauges, EngineStats, Histogram, ThroughputReport


def test_a_histogram_counts_each_value_in_the_first_bucket_that_holds_it() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        histogram.observe(value)
    assert (histogram.counts, histogram.sum, histogram.count) == ([2, 2, 1], 14.0, 5)


def test_usage_is_a_share_of_the_blocks() -> None:
    stats = EngineStats()
    assert stats.kv_usage == 0.0
    stats.engine = EngineGauges(blocks_used=3, blocks_total=12)
    assert stats.kv_usage == 0.25


def test_the_throughput_line_comes_once_per_interval_and_starts_anew_after_a_rest() -> None:
    report, gauges = ThroughputReport(10.0), EngineGauges(num_running=2, blocks_total=8)
    assert report.line(100.0, gauges, num_rows=50, num_drawn=5) is None
    assert report.line(109.0, gauges, num_rows=60, num_drawn=6) is None
    line = report.line(110.0, gauges, num_rows=150, num_drawn=25)
    assert line == "2.0 tokens/s out, 10.0 rows/s run; 2 running, 0 waiting; blocks 0/8"
    report.rest()
    assert report.line(500.0, gauges, num_rows=150, num_drawn=25) is None


def test_request_messages_carry_the_id(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("test.request")
    with caplog.at_level(logging.INFO, "test.request"):
        RequestLog(logger, "r7").info("closed after %d", 3)
    assert caplog.messages == ["request=r7 closed after 3"]
    assert caplog.records[0].request_id == "r7"


def test_setup_leaves_an_existing_handler_alone() -> None:
    logger = logging.getLogger("whalefall")
    before, level = list(logger.handlers), logger.level
    setup_logging("WARNING")  # the test runner has handlers on the root logger
    assert logger.handlers == before and logger.level == logging.WARNING
    logger.setLevel(level)
