# SPDX-License-Identifier: Apache-2.0
"""A name for the weights of a checkpoint, so that nothing computed with others is ever taken for theirs.

Inside one process a name only has to tell what it loaded from nothing else: `fingerprint` reads headers, sizes and samples. Records that
outlive the process, or are shared, need more: a byte changed between two samples would meet the records of the old weights and hit.
`content_fingerprint` reads every byte, several pieces at a time, when the loader has just brought them into the page cache; a memo spares
the next start the reading. It does not trust the modification time, which copies and tools set at will, but the change time beside it.
Copies of a checkpoint on other machines get the same name.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b, sha256
from pathlib import Path

from whalefall.observe.log import get_logger
from whalefall.weights.safetensors import Shard, ShardSet

log = get_logger(__name__)
SAMPLES_PER_SHARD = 64
SAMPLE_BYTES = 512
PIECE_BYTES = 256 * 2**20
"""Hashed by one thread; a file may be shorter or many of these long."""
CHUNK_BYTES = 8 * 2**20
MAX_THREADS = 16
SETTLED_S = 2.0
"""A file changed more recently is not remembered: another change could fall into the same tick of the file system's clock."""


def fingerprint(model_dir: str | Path) -> str:
    """32 hex digits over config.json and headers, sizes and samples of the shards."""
    folder = Path(model_dir)
    digest = blake2b(digest_size=16, person=b"whalefall.wts")
    digest.update((folder / "config.json").read_bytes())
    for shard in ShardSet.open(folder).shards:
        tensors = [(t.name, t.dtype, t.shape, t.begin, t.end) for t in shard.tensors]
        size = shard.path.stat().st_size
        digest.update(repr((shard.path.name, size, tensors)).encode())
        with shard.path.open("rb") as file:
            for sample in range(SAMPLES_PER_SHARD):
                file.seek(max(0, size - SAMPLE_BYTES) * sample // (SAMPLES_PER_SHARD - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def content_fingerprint(model_dir: str | Path, memo_dir: Path | None = None) -> str:
    """32 hex digits over config.json and every byte of the shards.

    Args:
        memo_dir: where digests are kept from start to start, a small file for each shard; whoever writes there is believed. None, or a
            directory that cannot be written to: everything is read each time.
    """
    folder = Path(model_dir)
    shards = ShardSet.open(folder).shards
    stamps = [_stamp(shard.path) for shard in shards]
    digests = [None if memo_dir is None else _remembered(memo_dir, stamp) for stamp in stamps]
    missing = [at for at, digest in enumerate(digests) if digest is None]
    if missing:
        started_s = time.monotonic()
        num_bytes = sum(shards[at].path.stat().st_size for at in missing)
        for at, digest in zip(missing, _hash_all([shards[at] for at in missing]), strict=True):
            digests[at] = digest
            if memo_dir is not None:
                _remember(memo_dir, stamps[at], digest, shards[at].path)
        log.info("weights named by their content: %.1f GB read in %.1f s", num_bytes / 1e9, time.monotonic() - started_s)
    named = [(shard.path.name, digest) for shard, digest in zip(shards, digests, strict=True)]
    config = sha256((folder / "config.json").read_bytes()).hexdigest()
    return sha256(repr(("whalefall.wts.content", config, named)).encode()).hexdigest()[:32]


def _hash_all(shards: Sequence[Shard]) -> list[str]:
    """Of each file the digest of its pieces' digests: so one large file occupies every thread too."""
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), thread_name_prefix="whalefall-hash") as pool:
        sizes = [shard.path.stat().st_size for shard in shards]
        pieces = [
            [pool.submit(_hash_piece, shard.path, begin) for begin in range(0, size, PIECE_BYTES)]
            for shard, size in zip(shards, sizes, strict=True)
        ]
        return [sha256(b"".join(piece.result() for piece in of_shard)).hexdigest() for of_shard in pieces]


def _hash_piece(path: Path, begin: int) -> bytes:
    digest = sha256()
    with path.open("rb") as file:
        file.seek(begin)
        left = PIECE_BYTES
        while left and (chunk := file.read(min(CHUNK_BYTES, left))):
            digest.update(chunk)
            left -= len(chunk)
    return digest.digest()


def _stamp(path: Path) -> str:
    """Changes whenever the content may have: nobody can set the change time, short of the system's clock."""
    status = path.stat()
    place = os.path.realpath(path)
    return sha256(repr((place, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)).encode()).hexdigest()


def _remembered(memo_dir: Path, stamp: str) -> str | None:
    try:
        digest = (memo_dir / stamp).read_text(encoding="ascii")
    except (OSError, ValueError):
        return None
    return digest if len(digest) == 64 and set(digest) <= set("0123456789abcdef") else None


def _remember(memo_dir: Path, stamp: str, digest: str, path: Path) -> None:
    if _stamp(path) != stamp or time.time() - path.stat().st_ctime < SETTLED_S:
        return
    try:
        memo_dir.mkdir(parents=True, exist_ok=True)
        scratch = memo_dir / f"{stamp}.{os.getpid()}"
        scratch.write_text(digest, encoding="ascii")
        scratch.replace(memo_dir / stamp)
    except OSError as error:
        log.info("digests of the weights cannot be kept in %s (%s): the next start reads them again", memo_dir, error)
