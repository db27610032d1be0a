# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4.1: the complete text model."""

from whalefall.layers.parametric import ModuleSink
from whalefall.models.deepseek_v41.cache import cache_spec
from whalefall.models.deepseek_v41.config import ARCHITECTURE, DeepseekV41Config
from whalefall.models.deepseek_v41.footprint import footprint
from whalefall.models.deepseek_v41.model import DeepseekV41
from whalefall.models.deepseek_v41.weights import weight_map
from whalefall.models.definition import BuildContext, BuiltModel, ModelDefinition


def build(config: DeepseekV41Config, context: BuildContext) -> BuiltModel:
    model = DeepseekV41(config, context)
    return BuiltModel(model=model, sink=ModuleSink(model))


DEFINITION = ModelDefinition(
    name="deepseek_v41",
    architectures=(ARCHITECTURE,),
    parse_config=DeepseekV41Config.from_hf,
    weight_map=weight_map,
    cache_spec=cache_spec,
    build=build,
    chat_format="deepseek_v41",
    footprint=footprint,
)
