# SPDX-License-Identifier: Apache-2.0
"""The model that runs when no model is named: Krill, a small trained V4.1 checkpoint that ships inside the package."""

from __future__ import annotations

from pathlib import Path

from whalefall.core.errors import ConfigError

NAME = "krill"
"""What the server calls it."""
NOTICE = "Krill has 15 million parameters: it shows that everything works, and its answers are often wrong"


def embedded_model_dir() -> Path:
    """The shipped checkpoint's folder; its MODEL_CARD.md says what Krill can do and what it was trained on.

    Raises:
        ConfigError: the package was installed without its data files.
    """
    folder = Path(__file__).parents[1] / "assets" / NAME
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{folder}: the embedded model is not there; install whalefall with its data files, or name a checkpoint directory"
        )
    return folder
