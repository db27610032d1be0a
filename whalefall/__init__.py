# SPDX-License-Identifier: Apache-2.0
"""Whalefall: a complete, readable, fast inference engine for DeepSeek-class models.

The public names load on first use, so that `import whalefall` (and `whalefall --help`) stays light: no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from whalefall.core.sampling import SamplingParams
    from whalefall.core.structure import StructuredOutputsParams
    from whalefall.engine.async_llm import AsyncLLM
    from whalefall.engine.config import EngineConfig
    from whalefall.engine.llm import LLM
    from whalefall.engine.outputs import CompletionOutput, Logprob, RequestOutput

__version__ = "0.1.0"
"""The same as in the package metadata; a test compares them."""

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "EngineConfig",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]

_HOMES = {
    "LLM": "whalefall.engine.llm",
    "AsyncLLM": "whalefall.engine.async_llm",
    "EngineConfig": "whalefall.engine.config",
    "SamplingParams": "whalefall.core.sampling",
    "StructuredOutputsParams": "whalefall.core.structure",
    "RequestOutput": "whalefall.engine.outputs",
    "CompletionOutput": "whalefall.engine.outputs",
    "Logprob": "whalefall.engine.outputs",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'whalefall' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
