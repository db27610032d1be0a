# SPDX-License-Identifier: Apache-2.0
"""Chat Completions, streamed, with the openai client. Start a server first (`whalefall serve`); the first argument is its address."""

from __future__ import annotations

import sys

import openai

client = openai.OpenAI(base_url=(sys.argv[1:] or ["http://127.0.0.1:8000"])[0] + "/v1", api_key="none")
model = client.models.list().data[0].id
stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Tell me a story about a whale."}],
    max_tokens=48,
    stream=True,
    stream_options={"include_usage": True},
)
for chunk in stream:
    for choice in chunk.choices:
        print(getattr(choice.delta, "reasoning_content", None) or choice.delta.content or "", end="", flush=True)
    if chunk.usage is not None:
        print(f"\n{chunk.usage.prompt_tokens} prompt tokens, {chunk.usage.completion_tokens} answer tokens")
