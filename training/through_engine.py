# SPDX-License-Identifier: Apache-2.0
"""The shipped checkpoint through Whalefall's own engine: bits per byte from prompt log-probabilities, chat checks, unedited samples.

Usage: python -m training.through_engine [--model whalefall/assets/krill] [--windows 16] [--questions 40]
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
from pathlib import Path

from training.chat import ASSISTANT, BOS, USER
from training.prepare import SPECIAL_TOKENS, load_tokens
from whalefall import LLM, SamplingParams

QUESTIONS = ("What is a whale?", "Write a Python function that reverses a string.", "Who are you?")
CONTINUATIONS = ("This function returns", "def main():\n", "And the king said")
WINDOW = 1024


def bits_per_byte(llm: LLM, data_dir: Path, count: int) -> float:
    """Held-out windows of 1,024 tokens, spread evenly; the first token of each is given."""
    tokens = load_tokens(data_dir / "text-held-out.xz")
    step = (len(tokens) - WINDOW) // count
    windows = [tokens[i * step : i * step + WINDOW].tolist() for i in range(count)]
    outputs = llm.generate(
        [{"prompt_token_ids": window} for window in windows], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False
    )
    nats = num_bytes = 0.0
    for window, output in zip(windows, outputs, strict=True):
        for token, choices in zip(window[1:], output.prompt_logprobs[1:], strict=True):
            nats -= choices[token].logprob
            if token >= len(SPECIAL_TOKENS):
                piece = llm.tokenizer.token_bytes(token)
                num_bytes += len(piece) if piece else 0
    return nats / math.log(2) / num_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("whalefall/assets/krill"))
    parser.add_argument("--data", type=Path, default=Path("training/.work/data"))
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--questions", type=int, default=40)
    args = parser.parse_args()
    begun = time.monotonic()
    llm = LLM(args.model, dtype="float32", use_tqdm=False)

    def chat(questions: list[str], **sampling: float) -> list:
        return llm.chat(
            [[{"role": "user", "content": q}] for q in questions], SamplingParams(**sampling), thinking={"type": "disabled"}, use_tqdm=False
        )

    print(f"[{time.monotonic() - begun:.1f} s] loaded", flush=True)
    for question, output in zip(QUESTIONS, chat(list(QUESTIONS), temperature=0.0, max_tokens=80), strict=True):
        print(json.dumps({"asked": question, "answer": output.outputs[0].text, "finish": str(output.outputs[0].finish_reason)}), flush=True)
    for temperature in (0.0, 0.7):
        outputs = llm.generate(list(CONTINUATIONS), SamplingParams(temperature=temperature, max_tokens=60, seed=0), use_tqdm=False)
        for text, output in zip(CONTINUATIONS, outputs, strict=True):
            print(json.dumps({"prompt": text, "temperature": temperature, "continuation": output.outputs[0].text}), flush=True)
    chats = json.loads((args.data / "chat-held-out.json").read_text())
    questions = [match[1] for chat_text in chats if (match := re.match(f"{BOS}{USER}(.*?){re.escape(ASSISTANT)}", chat_text))][
        : args.questions
    ]
    ended = [output.outputs[0].finish_reason == "stop" for output in chat(questions, temperature=0.0, max_tokens=96)]
    print(f"held-out questions whose answer ends by itself within 96 tokens: {sum(ended)} of {len(ended)}", flush=True)
    sums = [(a, b) for a in range(1, 31, 4) for b in range(2, 31, 5)][: args.questions]
    answers = chat([f"What is {a} + {b}?" for a, b in sums], temperature=0.0, max_tokens=16)
    right = sum(output.outputs[0].text == f"{a} + {b} = {a + b}" for (a, b), output in zip(sums, answers, strict=True))
    print(f"sums of numbers up to 30 that are right: {right} of {len(sums)}", flush=True)
    print(
        f"bits per byte through the engine, {args.windows} windows of {WINDOW} tokens: {bits_per_byte(llm, args.data, args.windows):.4f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
