# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4.1: the complete text model, with its DSpark draft.

Reading a config and naming the tensors needs no torch; what does is imported when it is first called, so that a faulty checkpoint is
refused in a moment.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from whalefall.core.cache_spec import CacheSpec
from whalefall.models.deepseek_v41.config import ARCHITECTURE, DeepseekV41Config
from whalefall.models.deepseek_v41.weights import weight_map
from whalefall.models.definition import BuildContext, BuiltModel, ModelDefinition, WeightKind
from whalefall.weights.spec import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor


def _cache_spec(config: DeepseekV41Config, context: BuildContext, block_tokens: int) -> CacheSpec:
    from whalefall.models.deepseek_v41.cache import cache_spec

    return cache_spec(config, context, block_tokens)


def _build(config: DeepseekV41Config, context: BuildContext) -> BuiltModel:
    from whalefall.layers.parametric import ModuleSink
    from whalefall.models.deepseek_v41.model import DeepseekV41

    model = DeepseekV41(config, context)
    if not context.uses_own_drafter:
        return BuiltModel(model=model, sink=ModuleSink(model))
    from whalefall.models.deepseek_v41.dspark import DSparkDrafter

    return BuiltModel(model=model, sink=ModuleSink(model), drafter=DSparkDrafter(model))


def _own_drafter(config: DeepseekV41Config) -> tuple[str, int] | None:
    return ("dspark", config.dspark_block_size) if config.num_nextn_predict_layers else None


def _footprint(config: DeepseekV41Config, context: BuildContext) -> tuple[WeightKind, ...]:
    from whalefall.models.deepseek_v41.footprint import footprint

    return footprint(config, context)


def _draw(name: str, spec: TensorSpec, generator: Any) -> Tensor:
    from whalefall.models.deepseek_v41.random_weights import draw

    return draw(name, spec, generator)


DEFINITION = ModelDefinition(
    name="deepseek_v41",
    architectures=(ARCHITECTURE,),
    parse_config=DeepseekV41Config.from_hf,
    weight_map=weight_map,
    cache_spec=_cache_spec,
    build=_build,
    chat_format="deepseek_v41",
    own_drafter=_own_drafter,
    weight_map_with_drafter=partial(weight_map, with_draft=True),
    is_capturable=True,
    draw=_draw,
    footprint=_footprint,
)
