# SPDX-License-Identifier: Apache-2.0
"""Messages, streamed, with the anthropic client. The first argument is the server's address."""

from __future__ import annotations

import sys

import anthropic

client = anthropic.Anthropic(base_url=(sys.argv[1:] or ["http://127.0.0.1:8000"])[0], api_key="none")
question = [{"role": "user", "content": "Tell me a story about a whale."}]
model = "krill"
print("prompt tokens:", client.messages.count_tokens(model=model, messages=question).input_tokens)
with client.messages.stream(model=model, max_tokens=48, messages=question) as stream:
    for event in stream:
        if event.type in ("text", "thinking"):
            print(getattr(event, event.type), end="", flush=True)
    print("\nended by", stream.get_final_message().stop_reason)
