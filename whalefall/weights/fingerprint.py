# SPDX-License-Identifier: Apache-2.0
"""A name for the weights of a checkpoint, so that nothing computed with others is ever taken for theirs.

Reading hundreds of gigabytes for a name is out of the question. Headers, sizes and samples spread over every file are read instead: a
fine-tune, another quantisation or a half-copied file changes them. Copies of a checkpoint on other machines get the same name.
"""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

from whalefall.weights.safetensors import ShardSet

SAMPLES_PER_SHARD = 64
SAMPLE_BYTES = 512


def fingerprint(model_dir: str | Path) -> str:
    """32 hex digits over config.json and the shards."""
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
