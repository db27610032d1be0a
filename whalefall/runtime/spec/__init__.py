# SPDX-License-Identifier: Apache-2.0
"""Speculation: drafts of the next tokens, judged by the target model in the step they would have been drawn in.

ngram.py drafts without weights; table.py keeps the drafts between steps; verify.py says which of them stay; rounds.py puts the three into
the worker's step. What a request gets does not depend on any of this; docs/sampling.md says why."""
