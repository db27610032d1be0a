# SPDX-License-Identifier: Apache-2.0
"""From logits to tokens and log-probabilities, for all rows of a step at once: params.py -> penalties.py -> sampler.py, logprobs.py."""
