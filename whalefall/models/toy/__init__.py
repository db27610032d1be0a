# SPDX-License-Identifier: Apache-2.0
"""A complete small model: the template to copy for a new family, and the model of fast tests.

config.py reads config.json, weights.py names the checkpoint's tensors, cache.py says what to keep per token, model.py computes.
"""

from whalefall.layers.parametric import ModuleSink
from whalefall.models.definition import BuildContext, BuiltModel, ModelDefinition
from whalefall.models.toy.cache import cache_spec
from whalefall.models.toy.config import ARCHITECTURE, ToyConfig
from whalefall.models.toy.model import Toy
from whalefall.models.toy.weights import weight_map


def build(config: ToyConfig, context: BuildContext) -> BuiltModel:
    model = Toy(config, context)
    return BuiltModel(model=model, sink=ModuleSink(model))


DEFINITION = ModelDefinition(
    name="toy",
    architectures=(ARCHITECTURE,),
    parse_config=ToyConfig.from_hf,
    weight_map=weight_map,
    cache_spec=cache_spec,
    build=build,
    chat_format="none",
)
