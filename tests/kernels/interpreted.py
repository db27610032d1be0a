# SPDX-License-Identifier: Apache-2.0
"""Runs Triton twins in the interpreter, on CPU tensors, against their families' cases: `python -m tests.kernels.interpreted OP...`.

A process of its own, because Triton reads TRITON_INTERPRET when it is imported. Prints one line per twin; exits with 1 if one is wrong.
"""

from __future__ import annotations

import os
import sys
import warnings

os.environ["TRITON_INTERPRET"] = "1"

import torch

from tests.kernels.test_twins import check_twin
from whalefall.kernels.registry import load_all


def main(names: list[str]) -> int:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", RuntimeWarning)  # numpy speaks up where a device silently gives infinity
    num_wrong = 0
    for op in load_all().values():
        for impl in op.impls:
            if impl.needs.type != "cuda" or not impl.name.startswith("triton") or (names and op.name not in names):
                continue
            try:
                num_cases = check_twin(op, impl, torch.device("cpu"))
                print(f"{op.name} {impl.name}: {num_cases} cases" if num_cases else f"{op.name} {impl.name}: WRONG: no case fits")
                num_wrong += not num_cases
            except Exception as error:
                num_wrong += 1
                print(f"{op.name} {impl.name}: WRONG: {type(error).__name__}: {error}")
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
