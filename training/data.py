# SPDX-License-Identifier: Apache-2.0
"""Batches: windows of the token streams, drawn so that step n of a run always sees the same tokens, wherever it resumed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from training.prepare import BOS_ID, load_tokens


class Stream:
    """One token stream on the device; half of the windows begin at a document's BOS, the others anywhere."""

    def __init__(self, path: Path, device: str) -> None:
        tokens = load_tokens(path)
        self.tokens = torch.from_numpy(tokens.astype(np.int16)).to(device)
        self.starts = torch.from_numpy(np.flatnonzero(tokens == BOS_ID)).to(device)

    def windows(self, count: int, length: int, generator: torch.Generator) -> Tensor:
        at = torch.randint(0, len(self.tokens) - length, (count,), generator=generator).to(self.tokens.device)
        snapped = self.starts[torch.searchsorted(self.starts, at[: count // 2]).clamp_max(len(self.starts) - 1)]
        at = torch.cat((snapped.clamp_max(len(self.tokens) - length), at[count // 2 :]))
        return self.tokens[at.unsqueeze(-1) + torch.arange(length, device=at.device)].long()


class Mixture:
    def __init__(self, data_dir: Path, device: str) -> None:
        self.text, self.chat = Stream(data_dir / "text.xz", device), Stream(data_dir / "chat.xz", device)

    def batch(self, step: int, rows: int, length: int, chat_share: float) -> Tensor:
        """[rows, length + 1] ids."""
        generator = torch.Generator().manual_seed(1_000_003 * (step + 1))
        num_chat = int(rows * chat_share + torch.rand((), generator=generator).item())
        parts = [self.text.windows(rows - num_chat, length + 1, generator)]
        if num_chat:
            parts.append(self.chat.windows(num_chat, length + 1, generator))
        return torch.cat(parts)
