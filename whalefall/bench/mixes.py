# SPDX-License-Identifier: Apache-2.0
"""Prompt mixes: what kinds of requests, in which proportions, of which lengths. Everything comes from one seed.

Prompts are random token ids (exact lengths, completions only) or random common words (about 1.3 tokens each, any endpoint). Random text
has no prefix in common unless the mix says so, and nothing in it is private or licensed.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from whalefall.bench.openai import Ask, Endpoint
from whalefall.core.errors import not_among

_COMMON = (
    "the of and a to in is you that it he was for on are as with his they at be this have from or one had by word but not what all were we "
    "when your can said there use an each which she do how their if will up other about out many then them these so some her would make "
    "like him into time has look two more write go see number no way could people my than first water been call who oil its now find long "
    "down day did get come made may part over new sound take only little work know place year live me back give most very after thing our "
    "just name good sentence man think say great where help through much before line right too mean old any same tell boy follow came want"
)
WORDS = _COMMON.split()

FIRST_TOKEN_ID = 100
"""Random ids start here, above the usual control tokens."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """A log-normal length, cut to a range; `sigma` 0 is a fixed length."""

    median: int
    sigma: float = 0.0
    low: int = 1
    high: int = 1 << 20

    def draw(self, rng: random.Random) -> int:
        value = self.median if self.sigma == 0 else round(rng.lognormvariate(math.log(self.median), self.sigma))
        return max(self.low, min(self.high, value))


@dataclass(frozen=True, slots=True)
class Mix:
    name: str
    prompt: Lengths
    output: Lengths
    prefix: int = 0
    """Units at the start that all requests of this mix share, on top of `prompt`."""


MIXES: dict[str, Mix] = {
    mix.name: mix
    for mix in (
        Mix("chat", Lengths(180, 1.0, 8, 4_096), Lengths(220, 0.8, 8, 2_048)),
        Mix("code", Lengths(2_000, 0.7, 128, 16_384), Lengths(120, 0.8, 8, 1_024)),
        Mix("summary", Lengths(6_000, 0.6, 1_024, 32_768), Lengths(180, 0.4, 32, 512)),
        Mix("reasoning", Lengths(220, 0.8, 16, 2_048), Lengths(2_000, 0.6, 256, 8_192)),
        Mix("shared-prefix", Lengths(64), Lengths(64), prefix=2_048),
        Mix("long", Lengths(64_000, 0.4, 16_384, 131_072), Lengths(64)),
    )
}


def parse_mix(text: str, prompt_len: int | None = None, output_len: int | None = None) -> list[tuple[Mix, float]]:
    """ "chat=0.7,code=0.3" -> mixes with weights; "fixed" is prompt_len in and output_len out. Raises ValueError with the allowed names."""
    parts = []
    for item in text.split(","):
        name, _, weight = item.strip().partition("=")
        if name == "fixed":
            mix = Mix("fixed", Lengths(prompt_len or 1_024), Lengths(output_len or 128))
        elif name in MIXES:
            mix = MIXES[name]
            if output_len is not None:
                mix = Mix(mix.name, mix.prompt, Lengths(output_len), mix.prefix)
        else:
            raise ValueError(not_among("mix", name, ["fixed", *MIXES]))
        parts.append((mix, float(weight or 1)))
    return parts


class PromptMaker:
    """Makes prompts of a wanted length, the same ones for the same seed."""

    def __init__(self, rng: random.Random, form: Literal["ids", "text"], vocab_size: int, endpoint: Endpoint) -> None:
        if form == "ids" and endpoint == "chat":
            raise ValueError("token ids can only be sent to the completions endpoint; use --form text or --endpoint completions")
        if form == "ids" and vocab_size <= FIRST_TOKEN_ID:
            raise ValueError(f"vocab_size is {vocab_size}, must be above {FIRST_TOKEN_ID}")
        self._rng, self._form, self._vocab_size, self._endpoint = rng, form, vocab_size, endpoint

    def units(self, count: int) -> list[Any]:
        if self._form == "ids":
            return [self._rng.randrange(FIRST_TOKEN_ID, self._vocab_size) for _ in range(count)]
        return self._rng.choices(WORDS, k=count)

    def prompt(self, units: Sequence[Any]) -> str | list[int] | list[dict[str, Any]]:
        if self._form == "ids":
            return list(units)
        text = " ".join(units)
        return [{"role": "user", "content": text}] if self._endpoint == "chat" else text


def make_asks(mixes: Sequence[tuple[Mix, float]], count: int, maker: PromptMaker, rng: random.Random) -> list[Ask]:
    prefixes = {mix.name: maker.units(mix.prefix) for mix, _ in mixes}
    drawn = rng.choices([mix for mix, _ in mixes], weights=[weight for _, weight in mixes], k=count)
    return [
        Ask(
            prompt=maker.prompt(prefixes[mix.name] + maker.units(mix.prompt.draw(rng))),
            max_tokens=mix.output.draw(rng),
            label=mix.name,
        )
        for mix in drawn
    ]


def read_asks(path: Path, count: int, endpoint: Endpoint, default_tokens: int) -> list[Ask]:
    """Prompts from a JSON-lines file: {"prompt": text or ids} or {"messages": [...]}, with optional "max_tokens"; reused in a circle."""
    asks = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        item = json.loads(line)
        prompt = item.get("messages") if endpoint == "chat" else item.get("prompt")
        if endpoint == "chat" and prompt is None and isinstance(item.get("prompt"), str):
            prompt = [{"role": "user", "content": item["prompt"]}]
        if not prompt:
            wanted = "messages or a text prompt" if endpoint == "chat" else "a prompt"
            raise ValueError(f"{path}:{number}: needs {wanted} for the {endpoint} endpoint")
        asks.append(Ask(prompt=prompt, max_tokens=int(item.get("max_tokens", default_tokens)), label=path.stem))
    if not asks:
        raise ValueError(f"{path} holds no prompts")
    return [asks[i % len(asks)] for i in range(count)]
