# SPDX-License-Identifier: Apache-2.0
"""The package's own promises: a light import, the public names, one version."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version

import pytest

import whalefall


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, whalefall; whalefall.__version__; whalefall.SamplingParams; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_public_name_is_there() -> None:
    assert all(getattr(whalefall, name) is not None for name in whalefall.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        whalefall.Nothing  # noqa: B018


def test_the_version_is_that_of_the_package() -> None:
    assert whalefall.__version__ == version("whalefall")
