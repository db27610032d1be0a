# SPDX-License-Identifier: Apache-2.0
"""From ids to answers: trimming at a stop string, what waits, what is flushed, n choices, prompt log-probabilities, counts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whalefall.core.request import FinishReason, RequestUpdate, TokenLogprobs
from whalefall.core.sampling import SamplingParams
from whalefall.engine.assembly import OpenRequest, OutputProcessor
from whalefall.engine.outputs import RequestOutput, VocabLogprobs, position_logprobs
from whalefall.testing.engine import piece_tokenizer

EOS_ID = 1


def entry(token_id: int, logprob: float = -1.0) -> TokenLogprobs:
    return TokenLogprobs(token_id=token_id, logprob=logprob, rank=1, top_ids=np.zeros(0, np.int32), top_logprobs=np.zeros(0, np.float32))


class Front:
    """One request of a processor, fed by hand."""

    def __init__(self, pieces: Sequence[str | bytes], sampling: SamplingParams, prompt: Sequence[int] = (2, 3, 4)) -> None:
        self.processor = OutputProcessor(piece_tokenizer(pieces), draw_seed=lambda: 7)
        self.request: OpenRequest
        self.request, self.sent = self.processor.open("r", prompt, sampling, prompt=None, eos_token_ids=(EOS_ID,), arrival_s=0.0)
        self.whole = self.request.empty_output()
        self.deltas: list[RequestOutput] = []
        self.stopped_ids: list[str] = []

    def feed(self, ids: Sequence[int], *, choice: int = 0, now_s: float = 1.0, **fields: object) -> None:
        logprobs = None if self.sent[choice].sampling.logprobs is None else tuple(entry(i) for i in ids)
        update = RequestUpdate(request_id=self.sent[choice].request_id, new_token_ids=tuple(ids), logprobs=logprobs, **fields)  # type: ignore[arg-type]
        done = self.processor.process([update], now_s)
        self.stopped_ids += done.stopped_ids
        for request, delta in done.deltas:
            assert request is self.request
            self.deltas.append(delta)
            self.whole.add(delta)


SCRIPT = ["he", "llo E", "ND m", "ore", "x", "y"]
ALL = [2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("per_step", [1, 2, 6])
def test_ids_and_logprobs_behind_a_stop_string_are_trimmed_with_the_text(per_step: int) -> None:
    front = Front(SCRIPT, SamplingParams(stop="END", logprobs=0))
    for first in range(0, 6, per_step):
        front.feed(ALL[first : first + per_step])
    (answer,) = front.whole.outputs
    assert answer.text == "hello "
    assert answer.token_ids == [2, 3, 4]
    assert answer.logprobs is not None and len(answer.logprobs) == 3
    assert answer.cumulative_logprob == -3.0
    assert (answer.finish_reason, answer.stop_reason) == (FinishReason.STOP, "END")
    assert front.whole.finished
    assert front.stopped_ids == [front.sent[0].request_id]
    assert front.processor.stats.generation_tokens == 3


def test_a_stop_string_in_the_engines_final_update_needs_no_abort() -> None:
    front = Front(SCRIPT, SamplingParams(stop="END"))
    front.feed(ALL, finish_reason=FinishReason.LENGTH)
    assert front.whole.outputs[0].finish_reason == FinishReason.STOP
    assert front.stopped_ids == []


def test_the_possible_beginning_of_a_stop_string_waits_and_is_flushed_at_the_end() -> None:
    front = Front(["hello EN", "D"], SamplingParams(stop=("END",)))
    front.feed([2])
    assert front.whole.outputs[0].text == "hello "
    front.feed([EOS_ID], finish_reason=FinishReason.STOP)
    answer = front.whole.outputs[0]
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("hello EN", FinishReason.STOP, None)
    assert answer.token_ids == [2, EOS_ID]
    assert answer.token_texts == ["hello ", "EN"]


def test_included_stop_string_and_stop_id_stay_in_the_text() -> None:
    front = Front(SCRIPT, SamplingParams(stop="END", include_stop_str_in_output=True))
    front.feed(ALL)
    assert front.whole.outputs[0].text == "hello END"
    for include, text in ((False, "he"), (True, "hex")):
        front = Front(SCRIPT, SamplingParams(stop_token_ids=(6,), include_stop_str_in_output=include))
        front.feed([2])
        front.feed([6], finish_reason=FinishReason.STOP, stop_token_id=6)
        answer = front.whole.outputs[0]
        assert (answer.text, answer.stop_reason, answer.token_ids) == (text, 6, [2, 6])


def test_stop_strings_do_not_count_within_the_first_min_tokens() -> None:
    front = Front(["a", "b"], SamplingParams(stop="a", min_tokens=2))
    for token in (2, 3, 3, 2, 3):
        front.feed([token])
    answer = front.whole.outputs[0]
    assert (answer.text, answer.token_ids) == ("abb", [2, 3, 3, 2])


def test_half_a_character_waits_and_shows_as_replacement_only_at_the_end() -> None:
    whale = "🐋".encode()
    front = Front([whale[:2], whale[2:], "a"], SamplingParams())
    front.feed([2])
    assert front.whole.outputs[0].text == ""
    front.feed([3])
    assert front.whole.outputs[0].text == "🐋"
    front.feed([2], finish_reason=FinishReason.LENGTH)
    assert front.whole.outputs[0].text == "🐋\ufffd"


def test_what_the_engine_sends_after_a_stop_string_is_dropped() -> None:
    front = Front(SCRIPT, SamplingParams(stop="END"))
    front.feed(ALL[:3])
    count = len(front.deltas)
    front.feed([5])
    front.feed([], finish_reason=FinishReason.STOP)
    assert len(front.deltas) == count
    assert front.processor.stats.finished == {FinishReason.STOP: 1}


PIECES = ["a", "b", "ab", "ba", "aab", "é".encode()[:1], "é".encode()[1:]]


@given(
    st.lists(st.integers(2, 8), max_size=15),
    st.lists(st.text("abé", min_size=1, max_size=3), max_size=2),
    st.booleans(),
    st.data(),
)
def test_the_answer_does_not_depend_on_how_tokens_are_spread_over_steps(
    ids: list[int], stops: list[str], include: bool, data: st.DataObject
) -> None:
    sampling = SamplingParams(stop=tuple(stops), include_stop_str_in_output=include, logprobs=0)
    one_by_one, grouped = Front(PIECES, sampling), Front(PIECES, sampling)
    for token in ids:
        one_by_one.feed([token])
    one_by_one.feed([EOS_ID], finish_reason=FinishReason.STOP)
    rest = [*ids, EOS_ID]
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        now, rest = rest[:size], rest[size:]
        grouped.feed(now, finish_reason=None if rest else FinishReason.STOP)
    assert grouped.whole.outputs == one_by_one.whole.outputs
    answer = grouped.whole.outputs[0]
    assert answer.text == "".join(answer.token_texts)
    assert answer.logprobs is not None and len(answer.logprobs) == len(answer.token_ids) == len(answer.token_texts)
    assert answer.finish_reason == FinishReason.STOP


def test_choices_are_separate_seeded_requests_that_score_the_prompt_once() -> None:
    front = Front(SCRIPT, SamplingParams(n=3, seed=5, prompt_logprobs=0))
    assert len({r.request_id for r in front.sent}) == 3
    assert len({r.sampling.seed for r in front.sent}) == 3
    assert [r.sampling.n for r in front.sent] == [1, 1, 1]
    assert [r.sampling.prompt_logprobs for r in front.sent] == [0, None, None]
    front.feed([2], choice=2, finish_reason=FinishReason.LENGTH)
    assert not front.whole.finished
    front.feed([3], choice=0, finish_reason=FinishReason.LENGTH, prompt_logprobs=(entry(3), entry(4)))
    front.feed([4], choice=1, finish_reason=FinishReason.LENGTH)
    assert front.whole.finished
    assert [(o.index, o.token_ids) for o in front.whole.outputs] == [(0, [3]), (1, [4]), (2, [2])]
    assert front.processor.stats.prompt_tokens == 3
    assert front.processor.stats.finished == {FinishReason.LENGTH: 3}


def test_prompt_logprobs_come_whole_and_once_when_the_chunks_are_complete() -> None:
    front = Front(SCRIPT, SamplingParams(prompt_logprobs=0), prompt=[2, 3, 4, 5])
    front.feed([], prompt_logprobs=(entry(3, -3.0), entry(4, -4.0)))
    assert front.deltas == []
    front.feed([6], prompt_logprobs=(entry(5, -5.0),))
    front.feed([7], finish_reason=FinishReason.LENGTH)
    assert [d.prompt_logprobs is not None for d in front.deltas] == [True, False]
    scored = front.whole.prompt_logprobs
    assert scored is not None and scored[0] is None
    assert [{i: p.logprob for i, p in position.items()} for position in scored[1:] if position] == [{3: -3.0}, {4: -4.0}, {5: -5.0}]


def test_a_prompt_of_one_token_has_one_empty_place_of_prompt_logprobs() -> None:
    front = Front(SCRIPT, SamplingParams(prompt_logprobs=0, max_tokens=0), prompt=[2])
    front.feed([], finish_reason=FinishReason.LENGTH)
    assert front.whole.prompt_logprobs == [None]
    assert front.whole.outputs[0].token_ids == []


def test_a_fresh_seed_is_drawn_only_when_none_is_given() -> None:
    assert Front(SCRIPT, SamplingParams()).sent[0].sampling.seed == 7
    assert Front(SCRIPT, SamplingParams(seed=5)).sent[0].sampling.seed == 5


def test_an_end_without_text_is_counted_as_an_empty_answer() -> None:
    front = Front(SCRIPT, SamplingParams())
    front.feed([EOS_ID], finish_reason=FinishReason.STOP)
    answer = front.whole.outputs[0]
    assert (answer.text, answer.token_ids, answer.finish_reason) == ("", [EOS_ID], FinishReason.STOP)
    assert front.processor.stats.empty_answers == 1


def test_token_times_and_histograms_follow_the_clock() -> None:
    front = Front(SCRIPT, SamplingParams())
    front.feed([2], now_s=1.0)
    front.feed([3], now_s=1.5)
    front.feed([4], now_s=4.0, finish_reason=FinishReason.LENGTH)
    metrics = front.whole.metrics
    assert metrics is not None
    assert metrics.token_times == [[1.0, 1.5, 4.0]]
    assert (metrics.time_to_first_token, metrics.last_token_time, metrics.finished_time) == (1.0, 4.0, 4.0)
    stats = front.processor.stats
    assert (stats.ttft_s.count, stats.ttft_s.sum, stats.itl_s.count, stats.itl_s.sum) == (1, 1.0, 2, 3.0)


def test_alternatives_hold_the_chosen_token_first_and_each_id_once() -> None:
    tokenizer = piece_tokenizer(SCRIPT)
    position = TokenLogprobs(
        token_id=5,
        logprob=-9.0,
        rank=6,
        top_ids=np.array([2, 3], np.int32),
        top_logprobs=np.array([-0.5, -1.0], np.float32),
    )
    entries = position_logprobs(position, tokenizer)
    assert [(i, p.logprob, p.rank, p.decoded_token) for i, p in entries.items()] == [
        (5, -9.0, 6, "ore"),
        (2, -0.5, 1, "he"),
        (3, -1.0, 2, "llo E"),
    ]


def test_the_whole_vocabulary_is_a_lazy_mapping_with_ranks() -> None:
    tokenizer = piece_tokenizer(SCRIPT)
    values_V = np.log(np.array([0.1, 0.3, 0.1, 0.5], np.float32))
    position = TokenLogprobs(token_id=2, logprob=float(values_V[2]), rank=4, top_ids=None, top_logprobs=values_V)
    entries = position_logprobs(position, tokenizer)
    assert isinstance(entries, VocabLogprobs) and len(entries) == 4
    assert list(entries) == [2, 3, 1, 0]
    assert {i: p.rank for i, p in entries.items()} == {3: 1, 1: 2, 0: 3, 2: 4}
    assert entries[3].logprob == pytest.approx(np.log(0.5))
    assert 4 not in entries and -1 not in entries
