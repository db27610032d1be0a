# SPDX-License-Identifier: Apache-2.0
"""`whalefall bench`: load against an OpenAI-compatible address, agent traces, and offline runs of the engine in this process.

`records` says what was seen, `metrics` what it means (vLLM's definitions), `http` and `openai` how it is asked, `load` when. Nothing here
imports torch; only `offline` runs the engine. The server under test may be any engine, so nothing here knows ours.
"""
