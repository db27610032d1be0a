# SPDX-License-Identifier: Apache-2.0
"""Messages between the processes: whatever goes in comes out, arrays with their dtype."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whalefall.core.request import AbortRequests, EngineRequest, FinishReason, RequestTimings, RequestUpdate, TokenLogprobs
from whalefall.core.sampling import SamplingParams
from whalefall.engine import messages
from whalefall.engine.messages import Abort, Ended, LaunchSpec, Loading, Ready, Refused, Stop, Submit, Updates
from whalefall.observe.metrics import EngineGauges
from whalefall.testing.engine import small_config

token_ids = st.integers(0, 2**31 - 1)
# Not a NaN, which equals nothing; -inf is an honest log-probability.
logprob = st.floats(max_value=0, allow_nan=False, width=32)
seconds = st.floats(0, 1e9)
text = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
sampling = st.builds(
    SamplingParams,
    temperature=st.floats(0, 2),
    top_k=st.integers(-1, 100),
    seed=st.integers(0, 2**64 - 1),
    max_tokens=st.none() | st.integers(1, 100),
    stop=st.lists(text.filter(bool), max_size=3).map(tuple),
    stop_token_ids=st.lists(token_ids, max_size=3).map(tuple),
    logit_bias=st.dictionaries(token_ids, st.floats(-100, 100), max_size=3),
    logprobs=st.none() | st.integers(-1, 20),
)
request = st.builds(
    EngineRequest,
    request_id=text,
    prompt_token_ids=st.lists(token_ids, max_size=50).map(tuple),
    sampling=sampling,
    eos_token_ids=st.lists(token_ids, max_size=2).map(tuple),
    arrival_s=seconds,
)


@st.composite
def token_logprobs(draw: st.DrawFn) -> TokenLogprobs:
    values = draw(st.lists(logprob, max_size=6))
    ids = np.array(draw(st.lists(token_ids, min_size=len(values), max_size=len(values))), np.int32)
    whole = draw(st.booleans())
    return TokenLogprobs(
        token_id=draw(token_ids),
        logprob=draw(logprob),
        rank=draw(st.integers(1, 10**6)),
        top_ids=None if whole else ids,
        top_logprobs=np.array(values, np.float32),
    )


timings = st.builds(
    RequestTimings, arrival_s=seconds, first_scheduled_s=st.none() | seconds, token_s=st.lists(seconds, max_size=4).map(tuple)
)
scores = st.none() | st.lists(token_logprobs(), max_size=3).map(tuple)
update = st.builds(
    RequestUpdate,
    request_id=text,
    new_token_ids=st.lists(token_ids, max_size=6).map(tuple),
    logprobs=scores,
    prompt_logprobs=scores,
    finish_reason=st.none() | st.sampled_from(FinishReason),
    stop_token_id=st.none() | token_ids,
    error=st.none() | text,
    num_cached_tokens=st.integers(0, 10**6),
    timings=st.none() | timings,
)


def plain(value: Any) -> Any:
    """With arrays as (dtype, list), so that == says all."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.tolist()
    if dataclasses.is_dataclass(value):
        return type(value), {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, msgspec.Struct):
        return type(value), {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, list | tuple):
        return type(value), [plain(item) for item in value]
    return value


@settings(max_examples=60, deadline=None)
@given(request)
def test_a_request_arrives_as_it_was_sent(sent: EngineRequest) -> None:
    assert plain(messages.decode_to_engine(messages.encode(Submit(sent)))) == plain(Submit(sent))


@settings(max_examples=60, deadline=None)
@given(st.lists(update, max_size=4), st.integers(0, 99))
def test_updates_arrive_as_they_were_sent(sent: list[RequestUpdate], count: int) -> None:
    message = Updates(sent, EngineGauges(num_running=count))
    got = messages.decode_from_engine(messages.encode(message))
    assert plain(got) == plain(message)
    assert all(isinstance(u.finish_reason, FinishReason | None) for u in sent)


def test_infinite_logprobs_and_an_empty_list_of_alternatives_survive() -> None:
    score = TokenLogprobs(
        token_id=1, logprob=-math.inf, rank=3, top_ids=np.zeros(0, np.int32), top_logprobs=np.array([-math.inf, -0.0], np.float32)
    )
    got = messages.decode_from_engine(messages.encode(Updates([RequestUpdate(request_id="a", logprobs=(score,))], EngineGauges())))
    assert isinstance(got, Updates) and plain(got.updates[0].logprobs) == plain((score,))


@pytest.mark.parametrize("sent", [Abort(AbortRequests(request_ids=("a", "b"), reason=FinishReason.STOP)), Stop()])
def test_other_commands_arrive(sent: messages.ToEngine) -> None:
    assert messages.decode_to_engine(messages.encode(sent)) == sent


@pytest.mark.parametrize(
    "sent", [Loading(), Ready(small_config(chosen_by={"dtype": "user"}), [("imports", 1.5)]), Refused(["a", "b"]), Ended(None), Ended("x")]
)
def test_other_answers_arrive(sent: messages.FromEngine) -> None:
    assert messages.decode_from_engine(messages.encode(sent)) == sent


def test_a_launch_spec_arrives() -> None:
    spec = LaunchSpec(
        factory="m:f", options={"model": "/x", "seed": None, "block_size": 256, "gpu_memory_utilization": 0.9}, log_format="json"
    )
    assert messages.decode_launch_spec(messages.encode(spec)) == spec
