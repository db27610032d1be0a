# SPDX-License-Identifier: Apache-2.0
"""Completions: continue two prompts, then score a text without generating. The first argument is the server's address."""

from __future__ import annotations

import sys

import openai

client = openai.OpenAI(base_url=(sys.argv[1:] or ["http://127.0.0.1:8000"])[0] + "/v1", api_key="none")
model = client.models.list().data[0].id
two = client.completions.create(model=model, prompt=["Once upon a time", "The whale"], max_tokens=12, temperature=0)
for choice in two.choices:
    print(f"{choice.index}: {choice.text!r}")
scored = client.completions.create(model=model, prompt="Once upon a time", max_tokens=0, echo=True, logprobs=1)
logprobs = scored.choices[0].logprobs
if logprobs is not None and logprobs.token_logprobs is not None:
    print(f"scored {len(logprobs.token_logprobs)} tokens")
