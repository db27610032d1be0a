# SPDX-License-Identifier: Apache-2.0
"""How large the lower tiers are and where the bottom one lies: decided once at start."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class TierSizes:
    num_rows: int
    """Records in host memory."""
    record_bytes: int
    store_dir: str | None = None
    """Directory, or URL, of the bottom tier; None for none."""
    store_bytes: int = 0
    """Most that a directory may hold."""
    write_bytes_per_s: int | None = None

    @property
    def host_bytes(self) -> int:
        return self.num_rows * self.record_bytes

    @property
    def is_url(self) -> bool:
        return self.store_dir is not None and "://" in self.store_dir
