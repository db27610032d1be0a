# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import csv
import json
import math
import statistics
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whalefall.bench.metrics import e2e_s, icls_s, itls_s, meets, percentile, spread, summarise, tpot_s, ttft_s
from whalefall.bench.records import Arrival, Record
from whalefall.bench.report import to_csv, to_json, to_picture, to_table


def record(sent: float, arrivals: list[tuple[float, int]], **more) -> Record:
    ended = more.pop("ended_s", arrivals[-1][0] if arrivals else sent)
    return Record(sent_s=sent, ended_s=ended, arrivals=tuple(Arrival(at, n) for at, n in arrivals), **more)


ONE_BY_ONE = record(10.0, [(10.5, 1), (10.6, 1), (10.9, 1)], prompt_tokens=100)


def test_one_token_a_chunk_gives_the_textbook_figures() -> None:
    assert ttft_s(ONE_BY_ONE) == pytest.approx(0.5)
    assert e2e_s(ONE_BY_ONE) == pytest.approx(0.9)
    assert tpot_s(ONE_BY_ONE) == pytest.approx((0.9 - 0.5) / 2)
    assert itls_s(ONE_BY_ONE) == pytest.approx([0.1, 0.3]) == icls_s(ONE_BY_ONE)


def test_tokens_of_one_chunk_share_its_gap() -> None:
    speculative = record(0.0, [(1.0, 2), (1.4, 4)])
    assert itls_s(speculative) == pytest.approx([0.0, 0.1, 0.1, 0.1, 0.1])
    assert icls_s(speculative) == pytest.approx([0.4])
    assert tpot_s(speculative) == pytest.approx(0.4 / 5)


def test_single_token_has_no_tpot_and_meets_any_limit_on_it() -> None:
    single = record(0.0, [(0.2, 1)])
    assert tpot_s(single) is None
    assert meets(single, {"tpot": 0.001, "ttft": 200})
    assert not meets(single, {"ttft": 199})


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 10), st.integers(1, 9)), min_size=1, max_size=30))
def test_gaps_sum_to_the_time_after_the_first_token(steps) -> None:
    at, arrivals = 0.0, []
    for gap, tokens in steps:
        at += gap
        arrivals.append((at, tokens))
    made = record(0.0, arrivals)
    assert len(itls_s(made)) == made.output_tokens - 1
    assert math.fsum(itls_s(made)) == pytest.approx(e2e_s(made) - ttft_s(made), abs=1e-9)


@settings(deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.floats(0, 100))
def test_percentiles_equal_numpys(values: list[float], percent: float) -> None:
    assert percentile(sorted(values), percent) == pytest.approx(float(np.percentile(values, percent)), abs=1e-6)


def test_spread_holds_mean_and_population_deviation() -> None:
    made = spread([1.0, 2.0, 4.0])
    assert made is not None
    assert (made.mean, made.std) == (pytest.approx(7 / 3), pytest.approx(statistics.pstdev([1, 2, 4])))
    assert spread([]) is None


def test_summary_counts_failures_apart_and_divides_by_the_whole_duration() -> None:
    failed = record(10.0, [(10.1, 50)], error="500: broken", ended_s=14.0, prompt_tokens=9)
    late = record(11.0, [(12.0, 1), (14.9, 3)], ended_s=15.0, prompt_tokens=50, cached_tokens=30, counted_by="usage")
    summary = summarise([ONE_BY_ONE, failed, late], {"ttft": 600, "e2e": 10_000})
    assert (summary.requests, summary.failed, summary.duration_s) == (3, 1, 5.0)
    assert (summary.prompt_tokens, summary.cached_tokens, summary.output_tokens) == (150, 30, 7)
    assert summary.output_tokens_per_s == pytest.approx(7 / 5)
    assert summary.total_tokens_per_s == pytest.approx(157 / 5)
    assert summary.goodput_per_s == pytest.approx(1 / 5)
    assert summary.errors == (("500: broken", 1),)
    assert dict(summary.counted_by) == {"chunks": 1, "usage": 1}


def test_no_requests_is_an_empty_summary() -> None:
    summary = summarise([])
    assert (summary.requests, summary.duration_s, summary.ttft_ms, summary.requests_per_s) == (0, 0.0, None, 0.0)


def test_reports_hold_the_same_figures() -> None:
    records = [ONE_BY_ONE, record(10.0, [], error="refused, with a comma", label="chat")]
    summary = summarise(records)
    rows = list(csv.DictReader(to_csv(records).splitlines()))
    assert (rows[0]["ttft_ms"], rows[0]["max_itl_ms"], rows[0]["output_tokens"]) == ("500.000", "300.000", "3")
    assert (rows[1]["ttft_ms"], rows[1]["error"], rows[1]["label"]) == ("", "refused, with a comma", "chat")
    body = json.loads(to_json(summary, {"seed": 1}))
    assert body["summary"]["ttft_ms"]["percentiles"]["p50"] == pytest.approx(500)
    assert body["settings"] == {"seed": 1}
    assert "1 ok, 1 failed" in to_table(summary)
    assert "estimates" in to_table(summary)


def test_picture_is_well_formed_whatever_the_values() -> None:
    for records in ([], [ONE_BY_ONE], [record(0.0, [(0.0, 1)])], [record(0.0, [(i / 7, 1) for i in range(1, 2_000)])]):
        root = ElementTree.fromstring(to_picture(records, 'a < b & "c"'))
        assert root.tag.endswith("svg")
