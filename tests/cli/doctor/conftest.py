# SPDX-License-Identifier: Apache-2.0
"""Made-up machines and site folders: wheels with metadata, RECORD and ELF files that say what they link to."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from whalefall.cli.doctor.machine import GIB, Driver, Gpu, Machine
from whalefall.cli.doctor.packages import Environment


def elf_bytes(needed: Sequence[str] = (), soname: str | None = None, padding: int = 0) -> bytes:
    """The smallest shared object a loader would read names from: one mapped segment, one dynamic section, one string table."""
    strings, offsets = b"\0", {}
    for name in [*needed, *([soname] if soname else [])]:
        offsets[name] = len(strings)
        strings += name.encode() + b"\0"
    entries = [(1, offsets[n]) for n in needed] + ([(14, offsets[soname])] if soname else [])
    header_bytes, address = 64 + 2 * 56, 0x1000
    dynamic_bytes = (len(entries) + 2) * 16
    strings_at = header_bytes + dynamic_bytes
    dynamic = b"".join(struct.pack("<qQ", *e) for e in [*entries, (5, address + strings_at), (0, 0)])
    total = strings_at + len(strings)
    header = struct.pack("<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01\x01", 3, 62, 1, 0, 64, 0, 0, 64, 56, 2, 0, 0, 0)
    load = struct.pack("<IIQQQQQQ", 1, 5, 0, address, address, total, total, 4096)
    dyn = struct.pack("<IIQQQQQQ", 2, 6, header_bytes, address + header_bytes, 0, dynamic_bytes, dynamic_bytes, 8)
    return header + load + dyn + dynamic + strings + b"\0" * padding


class Site:
    """A site folder to which wheels are added as an installer would write them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True)

    def wheel(
        self, name: str, version: str, *, requires: Sequence[str] = (), files: dict[str, bytes] | None = None, requested: bool = False
    ) -> Site:
        info = self.root / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {r}" for r in requires)]
        (info / "METADATA").write_text("\n".join(lines) + "\n")
        record = []
        for path, content in (files or {}).items():
            target = self.root / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
            record.append(f"{path},sha256=made-up,{len(content)}")
        (info / "RECORD").write_text("\n".join([*record, f"{info.name}/METADATA,,"]) + "\n")
        if requested:
            (info / "REQUESTED").write_text("")
        return self

    def torch(self, version: str, cuda: str | None, requires: Sequence[str] = ()) -> Site:
        text = f"__version__ = '{version}'\ncuda: Optional[str] = {cuda!r}\nhip: Optional[str] = None\n"
        major = (cuda or "").split(".")[0]
        needed = [f"libcudart.so.{major}", f"libcublas.so.{major}"] if cuda else []
        files = {"torch/version.py": text.encode(), "torch/lib/libtorch_cuda.so": elf_bytes(needed, "libtorch_cuda.so")}
        return self.wheel("torch", version, requires=requires, files=files)

    def engine_packages(self) -> Site:
        for name, version in {"numpy": "2.4.6", "safetensors": "0.8.0", "tokenizers": "0.23.3"}.items():
            self.wheel(name, version)
        base = "deepseek-recipe==0.2.0 llguidance==1.9.1 fastapi==0.165.0 uvicorn==0.54.0 uvloop==0.23.0 httptools==0.9.0 orjson==3.13.0"
        more = "jinja2==3.1.6 msgspec==0.23.0 pyzmq==27.3.0 prometheus-client==0.26.0 typer==0.29.2 rich==15.0.0 pip==26.0"
        for pair in f"{base} {more}".split():
            self.wheel(*pair.split("=="))
        return self

    def cuda12(self) -> Site:
        """torch 2.11 for CUDA 12.9 with the libraries its metadata asks for."""
        libraries = {
            "nvidia-cuda-runtime-cu12": ("12.9.79", "nvidia/cuda_runtime/lib/libcudart.so.12"),
            "nvidia-cublas-cu12": ("12.9.1.4", "nvidia/cublas/lib/libcublas.so.12"),
            "nvidia-cuda-nvrtc-cu12": ("12.9.86", "nvidia/cuda_nvrtc/lib/libnvrtc.so.12"),
            "nvidia-cudnn-cu12": ("9.17.1.4", "nvidia/cudnn/lib/libcudnn.so.9"),
            "nvidia-nccl-cu12": ("2.28.9", "nvidia/nccl/lib/libnccl.so.2"),
        }
        for name, (version, path) in libraries.items():
            self.wheel(name, version, files={path: elf_bytes(soname=path.rsplit("/", 1)[-1])})
        requires = [f"{name}=={version}; platform_system == 'Linux'" for name, (version, _) in libraries.items()]
        self.torch("2.11.0+cu129", "12.9", [*requires, "triton==3.6.0"])
        return self.wheel("triton", "3.6.0").engine_packages()

    def cuda13(self) -> Site:
        """torch 2.11 for CUDA 13.0: the toolkit's wheels carry no suffix and share one folder."""
        parts = {
            "cuda-runtime": ("13.0.96", "libcudart.so.13"),
            "cublas": ("13.1.0.3", "libcublas.so.13"),
            "cufft": ("12.0.0.61", "libcufft.so.12"),
        }
        for part, (version, file) in parts.items():
            self.wheel(f"nvidia-{part}", version, files={f"nvidia/cu13/lib/{file}": elf_bytes(soname=file)})
        self.wheel("nvidia-cudnn-cu13", "9.19.0.56", files={"nvidia/cudnn/lib/libcudnn.so.9": elf_bytes(soname="libcudnn.so.9", padding=9)})
        self.wheel("nvidia-nccl-cu13", "2.28.9", files={"nvidia/nccl/lib/libnccl.so.2": elf_bytes(soname="libnccl.so.2", padding=9)})
        pins = [f"nvidia-{part}=={version}; extra == '{part}'" for part, (version, _) in parts.items()]
        self.wheel("cuda-toolkit", "13.0.2", requires=pins)
        requires = ["cuda-toolkit[cuda-runtime,cublas,cufft]==13.0.2; platform_system == 'Linux'", "nvidia-cudnn-cu13==9.19.0.56"]
        self.torch("2.11.0", "13.0", [*requires, "nvidia-nccl-cu13==2.28.9", "triton==3.6.0"])
        return self.wheel("triton", "3.6.0").engine_packages()

    def cpu(self) -> Site:
        return self.torch("2.13.0+cpu", None).engine_packages()

    @property
    def environment(self) -> Environment:
        return Environment([self.root])


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path / "lib" / "site-packages")


@pytest.fixture
def make_elf() -> Callable[..., bytes]:
    return elf_bytes


@pytest.fixture
def machine() -> Callable[..., Machine]:
    """A healthy machine with one H200 whose driver speaks CUDA 13.0; keyword arguments replace facts."""
    h200 = Gpu("NVIDIA H200", 143_771, 0, (9, 0))
    healthy = Machine(
        python=(3, 12, 3),
        driver=Driver("580.159.04", (13, 0), (h200,), None),
        has_nvidia_hardware=True,
        toolkit=None,
        memory_total=128 * GIB,
        memory_available=100 * GIB,
        memlock_bytes=None,
        shm_bytes=16 * GIB,
        disk_free=500 * GIB,
        disk_path="/data",
        cache_problem=None,
        cache_path="/data/cache",
        port=8000,
        port_problem=None,
        c_compiler="gcc",
        has_python_headers=True,
    )
    return lambda **facts: replace(healthy, **facts)
