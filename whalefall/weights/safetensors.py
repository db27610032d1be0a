# SPDX-License-Identifier: Apache-2.0
"""Headers of a checkpoint's shards: which tensor lies where, read without touching any data.

`ShardSet.open` never stops at the first fault: it collects every problem of the files, and weights/check.py adds those of the tensors.
The data itself is mapped by weights/mapped.py. This reader needs no torch, so looking into a checkpoint is quick.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whalefall.weights.spec import DTYPE_BYTES

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""
LFS_MAGIC = b"version https://git-lfs"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    name: str
    """Without the optional "model." prefix."""
    dtype: str
    """As the header spells it, e.g. "F8_E4M3"."""
    shape: tuple[int, ...]
    shard: str
    """File name."""
    begin: int
    """First byte in the file."""
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Shard:
    path: Path
    tensors: tuple[StoredTensor, ...]
    """In file order."""


@dataclass(frozen=True, slots=True)
class ShardSet:
    """All shards of one model directory. Not usable for loading while `problems` is not empty."""

    model_dir: Path
    shards: tuple[Shard, ...]
    """Readable ones, by file name."""
    problems: tuple[str, ...]
    """One line per unusable file or header entry."""
    index: Mapping[str, str] | None
    """Tensor name -> shard file name as the index file says; None for a single-file checkpoint."""
    unreadable: frozenset[str]
    """Names of shards that the index names and that have no readable header."""

    @classmethod
    def open(cls, model_dir: str | Path) -> ShardSet:
        """Read the index, if any, and every shard header."""
        folder = Path(model_dir)
        problems: list[str] = []
        names, index = _shard_names(folder, problems)
        shards: list[Shard] = []
        for name in names:
            tensors = _read_header(folder / name, problems)
            if tensors is not None:
                shards.append(Shard(folder / name, tensors))
        readable = {shard.path.name for shard in shards}
        return cls(folder, tuple(shards), tuple(problems), index, frozenset(names) - readable)

    def all_tensors(self) -> Iterator[StoredTensor]:
        """Shard by shard, in file order."""
        for shard in self.shards:
            yield from shard.tensors

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.all_tensors())


def strip_prefix(name: str) -> str:
    return name.removeprefix("model.")


def _shard_names(folder: Path, problems: list[str]) -> tuple[list[str], dict[str, str] | None]:
    index_path = folder / INDEX_FILE
    if index_path.is_file():
        index = _read_index(index_path, problems)
        return sorted(set(index.values())), index
    if (folder / SINGLE_FILE).is_file():
        return [SINGLE_FILE], None
    found = sorted(path.name for path in folder.glob("*.safetensors")) if folder.is_dir() else []
    what = f"found {', '.join(found[:4])}" if found else ("found no weights" if folder.is_dir() else "found no such folder")
    problems.append(f"{folder}: {what}, expected {INDEX_FILE} with its shards, or {SINGLE_FILE}")
    return [], None


def _read_index(path: Path, problems: list[str]) -> dict[str, str]:
    try:
        content = json.loads(path.read_bytes())
        mapping = content["weight_map"]
        if not isinstance(mapping, dict) or not all(isinstance(shard, str) for shard in mapping.values()):
            raise TypeError
    except (ValueError, KeyError, TypeError):
        pointer = path.read_bytes()[: len(LFS_MAGIC)] == LFS_MAGIC
        found = "a Git LFS pointer" if pointer else "something else"
        problems.append(f'{path.name}: found {found}, expected a JSON object whose "weight_map" names a shard for each tensor')
        return {}
    outside = sorted({shard for shard in mapping.values() if Path(shard).name != shard})
    problems += [f"{path.name}: names shard {shard!r}, expected a file name in the same folder" for shard in outside]
    return {strip_prefix(name): shard for name, shard in mapping.items() if shard not in outside}


def _read_header(path: Path, problems: list[str]) -> tuple[StoredTensor, ...] | None:
    """Tensors of one shard, or None when its header cannot be used at all."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            lead = file.read(8)
            if (lead + file.read(len(LFS_MAGIC) - 8)).startswith(LFS_MAGIC):
                what = f"found a Git LFS pointer of {size} bytes, expected the weights themselves (git lfs pull fetches them)"
                problems.append(f"{path.name}: {what}")
                return None
            length = int.from_bytes(lead, "little")
            if len(lead) < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                what = f"found {size:,} bytes, too few for its header; expected a whole safetensors file"
                problems.append(f"{path.name}: {what}")
                return None
            file.seek(8)
            raw = file.read(length)
    except FileNotFoundError:
        problems.append(f"{path.name}: missing, although {INDEX_FILE} names it")
        return None
    except OSError as error:
        problems.append(f"{path.name}: cannot be read ({error.strerror})")
        return None
    return _parse_header(path.name, raw, size, problems)


def _parse_header(shard: str, raw: bytes, size: int, problems: list[str]) -> tuple[StoredTensor, ...] | None:
    repeated: list[str] = []

    def keep_first(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        kept: dict[str, Any] = {}
        for key, value in pairs:
            if key in kept:
                repeated.append(key)
            kept.setdefault(key, value)
        return kept

    try:
        header = json.loads(raw, object_pairs_hook=keep_first)
        if not isinstance(header, dict):
            raise ValueError
    except ValueError:
        problems.append(f"{shard}: found a header that is no JSON object, expected a safetensors file")
        return None
    problems += [f"{name}: shard {shard}: named twice in the header" for name in repeated]
    header.pop("__metadata__", None)
    data_start = 8 + len(raw)
    tensors = [made for name, entry in header.items() if (made := _parse_entry(shard, name, entry, data_start, problems))]
    tensors.sort(key=lambda tensor: (tensor.begin, tensor.end))
    _check_extent(shard, tensors, len(tensors) == len(header), data_start, size, problems)
    return tuple(tensors)


def _parse_entry(shard: str, name: str, entry: Any, data_start: int, problems: list[str]) -> StoredTensor | None:
    where = f"{name}: shard {shard}:"
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        whole = all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in (*shape, begin, end))
    except (KeyError, TypeError, ValueError):
        whole = False
    if not whole:
        problems.append(f"{where} found {json.dumps(entry)[:80]}, expected dtype, shape and data_offsets")
        return None
    if dtype not in DTYPE_BYTES:
        problems.append(f"{where} found dtype {dtype!r}, expected one of {', '.join(DTYPE_BYTES)}")
        return None
    num_bytes = DTYPE_BYTES[dtype]
    for length in shape:
        num_bytes *= length
    if end - begin != num_bytes:
        problems.append(f"{where} found {end - begin:,} bytes, expected {num_bytes:,} for {dtype} {list(shape)}")
        return None
    return StoredTensor(strip_prefix(name), dtype, tuple(shape), shard, data_start + begin, data_start + end)


def _check_extent(shard: str, tensors: list[StoredTensor], is_whole: bool, data_start: int, size: int, problems: list[str]) -> None:
    """The tensors must tile the rest of the file: no overlap, no hole, nothing missing at its end."""
    reached = data_start
    for tensor in tensors:
        if tensor.begin < reached:
            problems.append(f"{tensor.name}: shard {shard}: overlaps the tensor before it, expected it to begin at byte {reached:,}")
        elif tensor.begin > reached and is_whole:  # a hole where an entry was unusable has been reported already
            problems.append(f"{shard}: found {tensor.begin - reached:,} bytes of no tensor before {tensor.name}, expected none")
        reached = max(reached, tensor.end)
    if size < reached:
        problems.append(f"{shard}: truncated: found {size:,} bytes, expected {reached:,} by its header")
    elif size > reached and is_whole:
        problems.append(f"{shard}: found {size - reached:,} bytes of no tensor at its end, expected {reached:,} bytes by its header")
