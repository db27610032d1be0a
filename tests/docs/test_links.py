# SPDX-License-Identifier: Apache-2.0
"""What the pages point at is there: files behind links, names behind links to code, paths in the text.

A link whose text is a name in backticks and whose target is a Python file promises that the file defines the name:
[`Scheduler.plan`](../whalefall/runtime/scheduler/scheduler.py).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"\[([^\]\n]+)\]\(([^)\s]+)\)")
REFERENCE = re.compile(r"\[([^\]\n]+)\]\[(\w+)\]")
DEFINITION = re.compile(r"^\[(\w+)\]: (\S+)$", re.MULTILINE)
NAME = re.compile(r"`([A-Za-z_]\w*(?:\.\w+)*)`")
PYTHON_PATH = re.compile(r"(?<![\w/.])(?:\w+/)+\w+\.py\b")

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def links(page: Path) -> Iterator[tuple[str, str]]:
    """(text, target), also of links by reference."""
    text = prose(page)
    targets = dict(DEFINITION.findall(text))
    yield from INLINE.findall(text)
    yield from ((label, targets[key]) for label, key in REFERENCE.findall(text))


def local(page: Path, target: str) -> Path | None:
    """The file that a target means; None for another site."""
    path = target.partition("#")[0]
    return None if "://" in target else page if not path else page.parent / path


@cache
def names_in(file: Path) -> frozenset[str]:
    """What a module defines: functions, classes, constants; of its classes also methods, fields and attributes."""
    return frozenset(_names(ast.parse(file.read_text(encoding="utf-8")).body))


def _names(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.ClassDef):
            yield node.name
            yield from (f"{node.name}.{inner}" for inner in _names(node.body))
            own = (a for a in ast.walk(node) if isinstance(a, ast.Attribute) and isinstance(a.ctx, ast.Store))
            yield from (f"{node.name}.{a.attr}" for a in own if isinstance(a.value, ast.Name) and a.value.id == "self")


@each_page
def test_files_behind_relative_links_exist(page: Path) -> None:
    missing = [target for _, target in links(page) if (file := local(page, target)) is not None and not file.exists()]
    assert missing == []


@each_page
def test_references_are_defined_once_and_used(page: Path) -> None:
    text = prose(page)
    defined, used = [key for key, _ in DEFINITION.findall(text)], {key for _, key in REFERENCE.findall(text)}
    assert len(set(defined)) == len(defined)
    assert set(defined) == used


@each_page
def test_names_behind_links_to_code_are_defined_there(page: Path) -> None:
    wrong = []
    for text, target in links(page):
        file, name = local(page, target), NAME.fullmatch(text)
        if name is None or file is None or file.suffix != ".py":
            continue
        if name[1] not in names_in(file.resolve()):
            wrong.append(f"{name[1]} in {target}")
    assert wrong == []


@each_page
def test_python_files_named_in_the_text_exist(page: Path) -> None:
    """Diagrams and commands included; paths may begin at the repository or inside the package."""
    named = PYTHON_PATH.findall(DEFINITION.sub("", INLINE.sub("", page.read_text(encoding="utf-8"))))
    assert [path for path in named if not (ROOT / path).is_file() and not (ROOT / "whalefall" / path).is_file()] == []


@each_page
def test_pages_name_no_place_of_somebodys_machine(page: Path) -> None:
    assert re.findall(r"(?<![\w.])/(?:home|root|tmp|mnt|Users)/\S*", page.read_text(encoding="utf-8")) == []


def test_walk_points_at_code_all_the_way() -> None:
    """Sections of the story each name at least one thing in the code, so the checks above have something to hold."""
    story = prose(ROOT / "docs" / "walk.md").split("\n## ")
    numbered = [section for section in story if section[:1].isdigit()]
    assert [section.partition(".")[0] for section in numbered] == [str(n) for n in range(1, 12)]
    assert [section.partition("\n")[0] for section in numbered if not re.search(r"\[`\w", section)] == []


def test_glossary_defines_each_word_once() -> None:
    meanings = prose(ROOT / "docs" / "glossary.md").partition("## Words we leave")[0]
    cells = [row.split(" | ")[0].removeprefix("| ") for row in meanings.splitlines() if row.startswith("| ")]
    words = [word.casefold() for cell in cells if cell != "word" for word in re.sub(r" \(.*\)", "", cell).split(", ")]
    assert len(words) > 60
    assert sorted(set(words)) == sorted(words)
