# SPDX-License-Identifier: Apache-2.0
"""From config.json to the model family that understands it. Families are imported only when a checkpoint asks for them.

A family of this package has a line in `_BUILT_IN`. Another package adds one by an entry point in the group `whalefall.models`, named as
the architecture and pointing at its ModelDefinition; it may also replace a built-in one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from whalefall.core.errors import ConfigError
from whalefall.models.definition import ModelDefinition

ENTRY_POINT_GROUP = "whalefall.models"
CONFIG_FILE = "config.json"

_BUILT_IN = {
    "DeepseekV41ForCausalLM": "whalefall.models.deepseek_v41",
    "WhalefallToyForCausalLM": "whalefall.models.toy",
}
_ARCHITECTURE_OF_TYPE = {"deepseek_v41": "DeepseekV41ForCausalLM", "whalefall_toy": "WhalefallToyForCausalLM"}
"""For config files that lack "architectures"."""


def read_config(model_dir: str | Path) -> dict[str, Any]:
    """The object in a model directory's config.json.

    Raises:
        ConfigError: no such folder or file, or it holds something else.
    """
    path = Path(model_dir) / CONFIG_FILE
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: found bytes that are no UTF-8 text, allowed: a JSON object") from error
    except OSError as error:
        where = "no such folder" if not path.parent.is_dir() else (error.strerror or "unreadable").lower()
        raise ConfigError(f"{path}: {where}, allowed: a model folder with {CONFIG_FILE}, safetensors shards and tokenizer.json") from error
    if text.startswith("version https://git-lfs"):
        raise ConfigError(f"{path}: found a Git LFS pointer, allowed: a JSON object (git lfs pull fetches it)")
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{path}: found text that is no JSON ({error}), allowed: a JSON object") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: found a JSON {type(values).__name__}, allowed: a JSON object")
    return values


def find_definition(values: Mapping[str, Any], file: str = CONFIG_FILE) -> ModelDefinition:
    """The family of a config.

    Raises:
        ConfigError: the architecture (or, without one, the model_type) is unknown; the known ones are listed.
    """
    architecture = _architecture(values, file)
    plugins = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
    if architecture in plugins:
        found = plugins[architecture].load()
    elif architecture in _BUILT_IN:
        found = import_module(_BUILT_IN[architecture]).DEFINITION
    else:
        known = ", ".join(known_architectures())
        raise ConfigError(f'{file}: architectures: found "{architecture}", allowed: {known}')
    if not isinstance(found, ModelDefinition):
        raise ConfigError(f"entry point {architecture!r} of {ENTRY_POINT_GROUP}: found {found!r}, allowed: a ModelDefinition")
    return found


def known_architectures() -> tuple[str, ...]:
    """What this installation can run, plug-ins included."""
    return tuple(sorted({*_BUILT_IN, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))}))


def _architecture(values: Mapping[str, Any], file: str) -> str:
    known = ", ".join(known_architectures())
    if "architectures" in values:
        names = values["architectures"]
        if isinstance(names, list) and len(names) == 1 and isinstance(names[0], str):
            return names[0]
        raise ConfigError(f"{file}: architectures: found {json.dumps(names)}, allowed: a list with one of {known}")
    model_type = values.get("model_type")
    if isinstance(model_type, str) and model_type in _ARCHITECTURE_OF_TYPE:
        return _ARCHITECTURE_OF_TYPE[model_type]
    found = "missing" if model_type is None else f"missing, and model_type is {json.dumps(model_type)}"
    raise ConfigError(f"{file}: architectures: {found}, allowed: a list with one of {known}")
