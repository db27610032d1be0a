# SPDX-License-Identifier: Apache-2.0
"""Ops between logits and a token id: argmax, penalties, filters, counter-based draws, ranks and alternatives."""
