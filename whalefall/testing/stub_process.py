# SPDX-License-Identifier: Apache-2.0
"""An engine process without a model or torch: real loop, real scheduler, real sockets, and tokens that spell the alphabet.

Answer i of a prompt goes on from the letter that its ids add up to, so an answer tells which prompt it belongs to. The factories differ in
how they behave; name one as the `factory` of a Supervisor. The front's half, `stub_folder`, is the same for all.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from whalefall.core.errors import ConfigError
from whalefall.core.plan import StepPlan
from whalefall.engine.config import EngineConfig
from whalefall.engine.core import EngineCore
from whalefall.engine.opened import ModelFolder
from whalefall.engine.resolve import ResolvedConfig
from whalefall.observe.phases import Phases
from whalefall.testing.engine import ScriptedWorker, scripted_engine, small_config
from whalefall.testing.scripted import piece_tokenizer

MAX_MODEL_LEN = 4096
STEP_VARIABLE = "WHALEFALL_STUB_STEP_S"
"""How long a step of `paced` takes, in seconds."""
_TOKENIZER = piece_tokenizer(())
_A, _LETTERS = ord("a"), 26


def stub_folder() -> ModelFolder:
    """What the API process knows of the stub's model."""
    facts = cast(Any, SimpleNamespace(eos_token_ids=(_TOKENIZER.eos_token_id,), vocab_size=_TOKENIZER.vocab_size, chat_format="none"))
    return ModelFolder(model_dir=Path("."), definition=facts, model_config=facts, tokenizer=_TOKENIZER)


def expected_text(prompt_token_ids: Sequence[int], count: int) -> str:
    return "".join(map(chr, Alphabet(prompt_token_ids)[:count]))


class Alphabet(Sequence[int]):
    """Token ids of an endless answer."""

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        self._first = sum(prompt_token_ids)

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return [self[k] for k in range(i.start or 0, i.stop)]
        return _A + (self._first + i) % _LETTERS

    def __len__(self) -> int:
        return MAX_MODEL_LEN


class PacedWorker(ScriptedWorker):
    """Spells alphabets; a step takes `step_s`, whatever is in it."""

    def __init__(self, step_s: float) -> None:
        super().__init__(lambda new: Alphabet(new.token_ids[: new.num_prompt_tokens]))
        self._step_s = step_s
        self._next_s = 0.0

    def launch(self, plan: StepPlan) -> Any:
        # Paced by the clock, so that a step that comes late does not delay all later ones.
        now_s = time.monotonic()
        if self._next_s > now_s:
            time.sleep(self._next_s - now_s)
        self._next_s = max(self._next_s, now_s - self._step_s) + self._step_s
        return super().launch(plan)


def plain(config: EngineConfig, phases: Phases) -> tuple[ResolvedConfig, EngineCore]:
    """As fast as it goes."""
    return _build(config, PacedWorker(0.0))


def paced(config: EngineConfig, phases: Phases) -> tuple[ResolvedConfig, EngineCore]:
    """A step takes what STEP_VARIABLE says, 10 ms by default."""
    return _build(config, PacedWorker(float(os.environ.get(STEP_VARIABLE, "0.01"))))


def failing(config: EngineConfig, phases: Phases) -> tuple[ResolvedConfig, EngineCore]:
    """Its fifth step fails."""

    class Worker(PacedWorker):
        def launch(self, plan: StepPlan) -> Any:
            if self.num_launches == 4:
                raise RuntimeError("the card fell out")
            return super().launch(plan)

    return _build(config, Worker(0.0))


def refusing(config: EngineConfig, phases: Phases) -> tuple[ResolvedConfig, EngineCore]:
    raise ConfigError(["first problem", "second problem"])


def crashing(config: EngineConfig, phases: Phases) -> tuple[ResolvedConfig, EngineCore]:
    os._exit(3)


def hanging(config: EngineConfig, phases: Phases) -> tuple[ResolvedConfig, EngineCore]:
    """Never ready."""
    time.sleep(600)
    raise AssertionError


def _build(config: EngineConfig, worker: ScriptedWorker) -> tuple[ResolvedConfig, EngineCore]:
    most = config.max_num_seqs or 256
    resolved = small_config(
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=most,
        max_num_batched_tokens=8192,
        block_size=256,
        num_blocks=1 + most * 16,
        num_slots=most + 1,
        vocab_size=_TOKENIZER.vocab_size,
        async_scheduling=bool(config.async_scheduling),
        seed=config.seed,
    )
    _, core = scripted_engine(worker, _TOKENIZER, resolved)
    return resolved, core
