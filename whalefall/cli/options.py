# SPDX-License-Identifier: Apache-2.0
"""Engine flags, made from the fields of `EngineConfig` and their docstrings: one flag per field, the name with dashes.

A flag that is not given is left to the config, so that its default and the reason for it stand in one place.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING
from pathlib import Path
from typing import Annotated, Any, Optional, get_type_hints

import typer

from whalefall.core.errors import ConfigError
from whalefall.engine.config import EngineConfig, OptionDoc, check_options, describe_options

_OWN_ARGUMENTS = ("model", "served_model_name")
"""Commands have their own words for these."""

ModelArgument = Annotated[
    Optional[Path],  # noqa: UP045  # typer reads annotations at run time
    typer.Argument(help="Directory of the checkpoint; left out: the small embedded model, whose weights are random.", show_default=False),
]


def with_engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the command's `**engine_options` by one flag per field of EngineConfig."""
    signature = inspect.signature(command)
    hints = get_type_hints(command, include_extras=True)
    own = [p.replace(annotation=hints[p.name]) for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    flags = [_flag(option) for option in describe_options(EngineConfig) if option.name not in _OWN_ARGUMENTS]
    command.__signature__ = signature.replace(parameters=[*own, *flags])  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in [*own, *flags]} | {"return": None}
    return command


def engine_config(model: Path | None, options: Mapping[str, Any], **chosen: Any) -> EngineConfig:
    """The config for what was typed.

    Raises:
        ConfigError: single values that are wrong whatever the model, before any process is started; or the directory.
    """
    given = {name: value for name, value in options.items() if value is not None}
    config = EngineConfig.from_options({"model": model_dir(model, given.get("load_format")), **given, **chosen})
    if problems := check_options(config):
        raise ConfigError(problems)
    return config


def model_dir(model: Path | None, load_format: str | None = None) -> Path:
    """
    Raises:
        ConfigError: there is no such directory, or what it holds cannot be loaded.
    """
    if model is None:
        from whalefall.engine.embedded import embedded_model_dir

        return embedded_model_dir()
    if not model.is_dir():
        raise ConfigError(f"{model}: no such directory; a model is a directory with config.json, *.safetensors and tokenizer.json")
    from whalefall.models.precheck import precheck

    precheck(model, has_shards=load_format != "random")  # answers within a second; the engine asks again, seconds of importing torch later
    return model


def _flag(option: OptionDoc) -> inspect.Parameter:
    name = "--" + option.name.replace("_", "-")
    names = f"{name}/--no-{name[2:]}" if option.kind is bool else name
    default = "" if option.default in (None, MISSING) else f" [default: {option.default}]"
    metavar = "|".join(option.choices) if option.choices else None
    info = typer.Option(names, help=option.doc.replace("\n", " ") + default, metavar=metavar, show_default=False, rich_help_panel="Engine")
    kind: Any = Optional[option.kind]  # noqa: UP045
    return inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, info])
