# SPDX-License-Identifier: Apache-2.0
"""ModelDefinition: what a model family offers to the engine. Wiring is the only reader that knows more than one of them.

Calls in order: `parse_config` (raises ConfigError naming every problem), `weight_map` (checked against shard headers before any data is
read), `cache_spec`, `build` + loading, then `Model.forward` once per step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from whalefall.core.batch import CacheTensors, ForwardBatch
from whalefall.core.cache_spec import CacheSpec
from whalefall.core.seams import Comm, Drafter
from whalefall.weights.spec import TensorSpec, WeightMap

if TYPE_CHECKING:  # a checkpoint is judged without torch: only building and running need it
    import torch
    from torch import Tensor

KVCacheDtype = Literal["auto", "model", "unrounded"]
"""auto: unrounded with float32 activations, else model; model: rounded to the family's own cache formats; unrounded: as computed."""

WeightStore = Literal["auto", "packed", "dense"]
"""packed: keep the checkpoint's quantised bytes and dequantise when used; dense: dequantise at load; auto: dense where it fits."""


class ModelConfig(Protocol):
    """The facts about any model that the runtime needs."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_position_embeddings(self) -> int: ...

    @property
    def bos_token_id(self) -> int | None: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    @property
    def history_tokens(self) -> int:
        """How many ids before a row the forward wants to see (Engram look-back); 0 for none."""
        ...

    @property
    def decoder_window(self) -> int | None:
        """Rows of prompt tail that decoder layers need in bounded replay; None when the family has no encoder/decoder split."""
        ...


@dataclass(frozen=True, kw_only=True)
class BuildContext:
    """How to build: decided once by wiring."""

    dtype: torch.dtype
    """Of activations and dense weights."""
    device: torch.device
    weights: Literal["packed", "dense"]
    kv_cache_dtype: Literal["model", "unrounded"]
    comm: Comm
    model_dir: Path
    """For tables that the family derives from the tokenizer."""
    max_draft_tokens: int = 0
    """Most drafts that one step verifies per request; rings have so many rows beyond their window. 0: no speculation."""
    uses_own_drafter: bool = False
    """Build the family's own drafter too, with its weights and rings (BuiltModel.drafter)."""


class Model(Protocol):
    def forward(self, batch: ForwardBatch, cache: CacheTensors) -> Tensor:
        """Write the caches and give float32 logits [L, V] of `batch.logit_rows_L`."""
        ...


@runtime_checkable
class Watched(Protocol):
    """A model may offer this too: counters that stay 0 unless something around it has a fault."""

    def health_counters(self) -> Mapping[str, Tensor]:
        """Name -> int64 scalar on the model's device, the same tensors every time; `forward` adds to them. Asked for once, at start."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightKind:
    """What a built model keeps of one kind of weights."""

    name: str
    """E.g. "routed experts"."""
    num_bytes: int
    place: Literal["device", "mapped"]
    """mapped: read in place from the checkpoint's files, so that it takes host memory as far as the host has any to spare."""
    is_split_over_experts: bool = False
    """Whether ranks of an expert-parallel group would share it out; the other kinds are copied to each."""


@dataclass(frozen=True, kw_only=True)
class ModelDefinition:
    name: str
    """Folder name, e.g. "deepseek_v41"."""
    architectures: tuple[str, ...]
    """Values of config.json "architectures" that mean this family."""
    parse_config: Callable[[Mapping[str, Any], str], ModelConfig]
    """(config.json as dict, file name for messages) -> config; raises ConfigError with every problem."""
    weight_map: Callable[[Any], WeightMap]
    """config -> every checkpoint tensor the model consumes, and the rules for those it ignores."""
    cache_spec: Callable[[Any, BuildContext, int], CacheSpec]
    """(config, context, block_tokens) -> what to allocate."""
    build: Callable[[Any, BuildContext], BuiltModel]
    """A model with empty parameters, and where each checkpoint tensor goes."""
    chat_format: Literal["deepseek_v4", "deepseek_v41", "none"]
    """Which protocol encoding the door uses."""
    own_drafter: Callable[[Any], tuple[str, int] | None] | None = None
    """config -> (name of the drafter that this checkpoint brings, most tokens it drafts), or None when it brings none."""
    weight_map_with_drafter: Callable[[Any], WeightMap] | None = None
    """As `weight_map`, with the tensors of the own drafter among those consumed; there when `own_drafter` is."""
    is_capturable: bool = False
    """Whether a decode step's forward, in bfloat16 with packed weights, neither reads the device nor depends on what is there, so that it
    can be captured in a CUDA graph."""
    draw: Callable[[str, TensorSpec, Any], Tensor] | None = None
    """(tensor name, what a checkpoint would hold, torch generator) -> a random tensor of realistic scale; see weights/random.py."""
    footprint: Callable[[Any, BuildContext], tuple[WeightKind, ...]] | None = None
    """(config, context) -> bytes of the weights once loaded, to the byte; without it they are estimated from the shard headers."""


class WeightSink(Protocol):
    """Receives each checkpoint tensor once."""

    def put(self, name: str, tensor: Tensor) -> None:
        """name: checkpoint name without the optional "model." prefix; tensor: the raw stored tensor, maybe a view of a mapped file."""
        ...

    def finish(self) -> None:
        """Called once after the last tensor; asserts that every parameter was filled exactly once."""
        ...


@dataclass(frozen=True, kw_only=True)
class BuiltModel:
    model: Model
    sink: WeightSink
    drafter: Drafter | None = None
    """The family's own, fed by the model's forward; made when BuildContext.uses_own_drafter."""
