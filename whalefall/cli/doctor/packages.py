# SPDX-License-Identifier: Apache-2.0
"""What is installed, read from package metadata and from the files themselves, without importing any of it.

An `Environment` holds the distributions of some site folders, who requires whom, and every shared library with its linkage and owner.
Knows nothing of CUDA; `cuda.py` judges.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from whalefall.cli.doctor.elf import Linkage, read_linkage

_REQUIREMENT = re.compile(r"^\s*([A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:\[([^\]]*)\])?\s*\(?([^;)]*)\)?\s*(?:;(.*))?$")
_SHARED_LIBRARY = re.compile(r"\.so(\.[0-9][0-9.]*)?$")
_OTHER_PLATFORM = re.compile(r"""(platform_system|sys_platform)\s*==\s*['"](Windows|win32|Darwin|darwin)['"]""")


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def version_key(version: str) -> tuple[int, ...]:
    """The numbers of a version, for comparing releases; a local part ("+cu129") and a pre-release tag are left out."""
    match = re.match(r"v?(\d+(?:\.\d+)*)", version)
    return tuple(int(part) for part in match.group(1).split(".")) if match else ()


@dataclass(frozen=True, slots=True)
class Requirement:
    name: str
    extras: tuple[str, ...]
    """Extras of the *required* package, e.g. ("cublas",) in "cuda-toolkit[cublas]"."""
    specifier: str
    extra: str | None
    """The requirement holds only when this extra of the requiring package is asked for."""


def parse_requirement(text: str) -> Requirement | None:
    """None when the text is no requirement or is meant for another platform."""
    match = _REQUIREMENT.match(text)
    marker = (match.group(4) or "") if match else ""
    if match is None or _OTHER_PLATFORM.search(marker):
        return None
    extras = tuple(e.strip() for e in (match.group(2) or "").split(",") if e.strip())
    extra = re.search(r"""extra\s*==\s*['"]([^'"]+)['"]""", marker)
    return Requirement(canonical(match.group(1)), extras, match.group(3).strip(), extra.group(1) if extra else None)


@dataclass(frozen=True)
class Dist:
    """One installed distribution, as its metadata tells it."""

    name: str
    version: str
    requires: tuple[Requirement, ...]
    files: dict[str, int | None] = field(repr=False)
    """Path relative to the site folder -> size in bytes that RECORD claims."""
    is_requested: bool
    """The installer noted that somebody asked for it by name (a REQUESTED file)."""

    @property
    def spec(self) -> str:
        return f"{self.name}=={self.version}"


@dataclass(frozen=True, slots=True)
class SharedLibrary:
    path: Path
    relative: str
    linkage: Linkage | None
    owners: tuple[str, ...]
    """Distributions whose RECORD lists this path, in the order of `Environment.dists`; two owners overwrote each other."""


class Environment:
    """The distributions and shared libraries below some site folders."""

    def __init__(self, sites: Sequence[Path]) -> None:
        self.sites = tuple(sites)
        self.dists: dict[str, Dist] = {}
        self.duplicates: dict[str, list[str]] = {}
        """Name -> versions, where a site folder holds more than one record of the same distribution."""
        for site in self.sites:
            seen: dict[str, list[str]] = {}
            for dist in importlib.metadata.distributions(path=[str(site)]):
                found = _read_dist(dist)
                if found is None:
                    continue
                seen.setdefault(found.name, []).append(found.version)
                self.dists.setdefault(found.name, found)
            self.duplicates.update({name: versions for name, versions in seen.items() if len(versions) > 1})

    def version(self, name: str) -> str | None:
        dist = self.dists.get(name)
        return dist.version if dist else None

    def read_text(self, relative: str) -> str | None:
        """A file of the first site folder that has it."""
        for site in self.sites:
            try:
                return (site / relative).read_text(encoding="utf-8", errors="replace")
            except OSError:
                continue
        return None

    @cached_property
    def owners(self) -> dict[str, tuple[str, ...]]:
        table: dict[str, tuple[str, ...]] = {}
        for dist in self.dists.values():
            for path in dist.files:
                table[path] = (*table.get(path, ()), dist.name)
        return table

    @cached_property
    def libraries(self) -> tuple[SharedLibrary, ...]:
        """Every shared library below the site folders, by path."""
        found = []
        for site in self.sites:
            for path in _walk(site):
                relative = path.relative_to(site).as_posix()
                found.append(SharedLibrary(path, relative, read_linkage(path), self.owners.get(relative, ())))
        return tuple(sorted(found, key=lambda lib: lib.relative))

    def required_by(self, name: str) -> tuple[str, ...]:
        """Installed distributions that require `name`, honouring extras: an optional requirement counts when its extra is asked for."""
        return tuple(d.name for d in self.dists.values() if any(r.name == name and self._holds(d, r) for r in d.requires))

    def _holds(self, dist: Dist, requirement: Requirement) -> bool:
        return requirement.extra is None or requirement.extra in self._asked_extras.get(dist.name, frozenset())

    @cached_property
    def _asked_extras(self) -> dict[str, frozenset[str]]:
        asked: dict[str, frozenset[str]] = {}
        for dist in self.dists.values():
            for requirement in dist.requires:
                if requirement.extras:
                    asked[requirement.name] = asked.get(requirement.name, frozenset()) | frozenset(requirement.extras)
        return asked


def current_sites() -> list[Path]:
    """The site folders of this interpreter, in import order."""
    paths = [Path(entry) for entry in sys.path if entry.rstrip("/").endswith(("site-packages", "dist-packages"))]
    return [path for path in dict.fromkeys(paths) if path.is_dir()]


def _read_dist(dist: importlib.metadata.Distribution) -> Dist | None:
    metadata = dist.metadata
    name = metadata["Name"] if metadata is not None else None
    if not name:
        return None  # a half-removed package leaves a folder without METADATA
    requires = (parse_requirement(text) for text in dist.requires or ())
    files = {file.as_posix(): file.size for file in dist.files or ()}
    return Dist(canonical(name), dist.version, tuple(r for r in requires if r), files, dist.read_text("REQUESTED") is not None)


def _walk(site: Path) -> Iterable[Path]:
    for folder, subfolders, names in os.walk(site):
        subfolders[:] = [s for s in subfolders if s != "__pycache__"]
        for name in names:
            if _SHARED_LIBRARY.search(name):
                yield Path(folder, name)
