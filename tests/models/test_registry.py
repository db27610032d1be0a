# SPDX-License-Identifier: Apache-2.0
"""Claims about finding a model's family: by architecture, lazily, and with the known ones listed when there is none."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from whalefall.core.errors import ConfigError
from whalefall.models import registry
from whalefall.models.registry import find_definition, known_architectures, read_config


def test_architecture_finds_its_family() -> None:
    assert find_definition({"architectures": ["DeepseekV41ForCausalLM"]}).name == "deepseek_v41"
    assert find_definition({"architectures": ["WhalefallToyForCausalLM"]}).name == "toy"


def test_each_built_in_line_agrees_with_its_definition() -> None:
    for architecture in registry._BUILT_IN:
        assert architecture in find_definition({"architectures": [architecture]}).architectures


def test_model_type_stands_in_for_missing_architectures() -> None:
    assert find_definition({"model_type": "deepseek_v41"}).name == "deepseek_v41"


@pytest.mark.parametrize(
    "values",
    [
        {"architectures": ["LlamaForCausalLM"]},
        {"architectures": "x"},
        {"architectures": []},
        {"model_type": "llama"},
        {"model_type": 3},
        {},
    ],
    ids=str,
)
def test_unknown_family_lists_the_known_ones(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        find_definition(values, "some/config.json")
    (line,) = caught.value.problems
    assert line.startswith("some/config.json: architectures: ")
    assert "DeepseekV41ForCausalLM, WhalefallToyForCausalLM" in line


def test_another_package_can_add_a_family(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("NewForCausalLM", "whalefall.models.toy:DEFINITION", registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [point] if group == registry.ENTRY_POINT_GROUP else [])
    assert find_definition({"architectures": ["NewForCausalLM"]}).name == "toy"
    assert "NewForCausalLM" in known_architectures()


def test_finding_one_family_imports_no_other() -> None:
    code = """
import sys
from whalefall.models.registry import find_definition
assert "whalefall.models.toy" not in sys.modules
find_definition({"architectures": ["WhalefallToyForCausalLM"]})
assert "whalefall.models.toy" in sys.modules and "whalefall.models.deepseek_v41" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "no JSON"),
        (b"[1]", "a JSON list"),
        (b"\xff\xfe", "no UTF-8"),
        (b"version https://git-lfs.github.com/spec/v1", "Git LFS pointer"),
    ],
)
def test_unusable_config_file_is_named(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=words) as caught:
        read_config(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)


def test_missing_config_and_folder_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: no such file"):
        read_config(tmp_path)
    with pytest.raises(ConfigError, match="no such folder"):
        read_config(tmp_path / "nowhere")
