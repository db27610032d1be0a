# SPDX-License-Identifier: Apache-2.0
"""fill_randomly: a model without its checkpoint. Every tensor of a weight map is drawn where it will live, from a seed of its own.

For measuring real shapes on a machine that does not hold the weights. What a tensor of some name looks like is the family's business.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from whalefall.weights.loader import LoadReport, Progress, Sink, peak_rss_bytes
from whalefall.weights.spec import TensorSpec, WeightMap

Draw = Callable[[str, TensorSpec, torch.Generator], Tensor]
"""(checkpoint name, what would be in the file, generator on the device) -> the stored tensor on the generator's device."""


def fill_randomly(
    model_dir: Path, weight_map: WeightMap, draw: Draw, sink: Sink, device: torch.device, *, seed: int = 0, progress: Progress | None = None
) -> LoadReport:
    """Fill a model with drawn tensors, in the order of the map.

    A tensor depends on its name and on `seed` alone: neither on the order nor on which others are drawn.
    """
    started_s = time.monotonic()
    total_bytes = sum(spec.num_bytes for spec in weight_map.tensors.values())
    generator = torch.Generator(device)
    done_bytes = 0
    for name, spec in weight_map.tensors.items():
        generator.manual_seed(zlib.crc32(name.encode()) * 2**16 + seed)
        sink.put(name, draw(name, spec, generator))
        done_bytes += spec.num_bytes
        if progress is not None:
            progress(done_bytes, total_bytes)
    sink.finish()
    return LoadReport(
        model_dir=model_dir,
        num_shards=0,
        num_tensors=len(weight_map.tensors),
        num_bytes=total_bytes,
        ignored=(),
        duration_s=time.monotonic() - started_s,
        peak_rss_bytes=peak_rss_bytes(),
    )
