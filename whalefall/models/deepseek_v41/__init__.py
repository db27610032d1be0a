# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4.1: the complete text model.

Reading a config and naming the tensors needs no torch; what does is imported when it is first called, so that a faulty checkpoint is
refused in a moment.
"""

from whalefall.core.cache_spec import CacheSpec
from whalefall.models.deepseek_v41.config import ARCHITECTURE, DeepseekV41Config
from whalefall.models.deepseek_v41.weights import weight_map
from whalefall.models.definition import BuildContext, BuiltModel, ModelDefinition, WeightKind


def _cache_spec(config: DeepseekV41Config, context: BuildContext, block_tokens: int) -> CacheSpec:
    from whalefall.models.deepseek_v41.cache import cache_spec

    return cache_spec(config, context, block_tokens)


def _build(config: DeepseekV41Config, context: BuildContext) -> BuiltModel:
    from whalefall.layers.parametric import ModuleSink
    from whalefall.models.deepseek_v41.model import DeepseekV41

    model = DeepseekV41(config, context)
    return BuiltModel(model=model, sink=ModuleSink(model))


def _footprint(config: DeepseekV41Config, context: BuildContext) -> tuple[WeightKind, ...]:
    from whalefall.models.deepseek_v41.footprint import footprint

    return footprint(config, context)


DEFINITION = ModelDefinition(
    name="deepseek_v41",
    architectures=(ARCHITECTURE,),
    parse_config=DeepseekV41Config.from_hf,
    weight_map=weight_map,
    cache_spec=_cache_spec,
    build=_build,
    chat_format="deepseek_v41",
    footprint=_footprint,
)
