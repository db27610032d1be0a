# SPDX-License-Identifier: Apache-2.0
"""Responses: two turns, the second by the id of the first. The first argument is the server's address."""

from __future__ import annotations

import sys

import openai

client = openai.OpenAI(base_url=(sys.argv[1:] or ["http://127.0.0.1:8000"])[0] + "/v1", api_key="none")
model = client.models.list().data[0].id
first = client.responses.create(model=model, input="Tell me a story.", max_output_tokens=24, reasoning={"effort": "none"})
print("first:", first.output_text)
second = client.responses.create(
    model=model, input="And then?", previous_response_id=first.id, max_output_tokens=24, reasoning={"effort": "none"}
)
print("second:", second.output_text)
print("stored:", client.responses.retrieve(second.id).status)
