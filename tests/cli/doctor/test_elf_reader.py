# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from whalefall.cli.doctor.elf import read_linkage


def test_names_come_back_in_file_order(tmp_path: Path, make_elf: Callable[..., bytes]) -> None:
    path = tmp_path / "lib.so"
    path.write_bytes(make_elf(["libcudart.so.13", "libc.so.6"], "libmine.so.1"))
    linkage = read_linkage(path)
    assert linkage is not None
    assert linkage.needed == ("libcudart.so.13", "libc.so.6")
    assert linkage.soname == "libmine.so.1"


def test_real_library_is_read() -> None:
    numpy = next(Path(p) for p in sys.path if (Path(p) / "numpy").is_dir())
    linkage = read_linkage(next((numpy / "numpy" / "_core").glob("_multiarray_umath*.so")))
    assert linkage is not None
    assert "libc.so.6" in linkage.needed


@pytest.mark.parametrize("cut", [0, 3, 63, 100, 200, 230])
def test_truncated_file_is_no_library(tmp_path: Path, make_elf: Callable[..., bytes], cut: int) -> None:
    path = tmp_path / "lib.so"
    path.write_bytes(make_elf(["libcudart.so.13"])[:cut])
    linkage = read_linkage(path)
    assert linkage is None or linkage.needed == ()


def test_linker_script_and_missing_file_are_no_libraries(tmp_path: Path) -> None:
    (tmp_path / "lib.so").write_text("INPUT(libc.so.6)")
    assert read_linkage(tmp_path / "lib.so") is None
    assert read_linkage(tmp_path / "absent.so") is None
