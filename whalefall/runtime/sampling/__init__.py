# SPDX-License-Identifier: Apache-2.0
"""From logits to tokens and log-probabilities, for all rows of a step at once: params.py -> penalties.py -> sampler.py, logprobs.py.

What an answer must look like comes from beside: grammar.py (compile), slot_grammars.py (masks for the rows of a step)."""
