# SPDX-License-Identifier: Apache-2.0
"""`whalefall plan`: what a model needs and what fits, for GPUs one does not have.

Owns the table of cards and the printing. Every figure comes from the engine's own `resolve` and the family's own footprint, so a plan and
the start-up table of the real thing are the same arithmetic.
"""
