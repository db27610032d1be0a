# SPDX-License-Identifier: Apache-2.0
"""What all tests share: one OpenMP thread, also where make does not set it, and repeatable hypothesis runs."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; small ops lose minutes to a second, contended thread

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")
