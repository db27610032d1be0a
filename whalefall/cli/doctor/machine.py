# SPDX-License-Identifier: Apache-2.0
"""Facts about the machine: driver, GPUs, toolkit, memory, limits, disk, port. Every source is a parameter, so tests can make them up.

The driver is asked through `nvidia-smi`, else through NVML's own library by ctypes; neither needs torch or a Python package.
"""

from __future__ import annotations

import ctypes
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

GIB = 1 << 30
Run = Callable[[list[str]], "str | None"]
"""Runs a command and gives its output (stdout, else stderr); None when the program does not exist."""


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    memory_mib: int | None
    used_mib: int | None
    capability: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class Driver:
    version: str | None
    """Kernel driver version, e.g. "580.159.04"; None when there is no working driver."""
    cuda: tuple[int, int] | None
    """Newest CUDA the driver itself speaks."""
    gpus: tuple[Gpu, ...]
    problem: str | None
    """What the driver's tools said when they failed."""


@dataclass(frozen=True, slots=True)
class Toolkit:
    version: tuple[int, int]
    path: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    python: tuple[int, int, int]
    driver: Driver
    has_nvidia_hardware: bool
    """The PCI bus or /dev shows an NVIDIA GPU, whether or not a driver works."""
    toolkit: Toolkit | None
    memory_total: int
    """Bytes this process may use: the machine's, or the container's limit where that is lower."""
    memory_available: int
    memlock_bytes: int | None
    """How much memory a process may lock; None for no limit."""
    shm_bytes: int | None
    disk_free: int
    disk_path: str
    cache_problem: str | None
    cache_path: str
    """Where kernels compiled at run time are kept."""
    port: int
    port_problem: str | None
    c_compiler: str | None = None
    """What Triton would compile its launch stubs with."""
    has_python_headers: bool = False
    """Whether Python.h is there for those stubs."""
    library_path: tuple[str, ...] = ()
    """CUDA-family libraries that LD_LIBRARY_PATH puts before those of the wheels."""


def read_machine(*, port: int, disk: Path, environ: Mapping[str, str] = os.environ, run: Run | None = None) -> Machine:
    run = run or run_command
    cache = Path(environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton")
    total, available = read_memory()
    return Machine(
        python=(sys.version_info[0], sys.version_info[1], sys.version_info[2]),
        driver=read_driver(run),
        has_nvidia_hardware=has_nvidia_hardware(),
        toolkit=read_toolkit(run, environ),
        memory_total=total,
        memory_available=available,
        memlock_bytes=read_memlock(),
        shm_bytes=_disk_total(Path("/dev/shm")),
        disk_free=shutil.disk_usage(nearest_existing(disk)).free,
        disk_path=str(nearest_existing(disk)),
        cache_problem=write_problem(cache),
        cache_path=str(cache),
        port=port,
        port_problem=port_problem(port),
        c_compiler=next((c for c in (environ.get("CC"), "gcc", "clang", "cc") if c and shutil.which(c)), None),
        has_python_headers=Path(sysconfig.get_paths()["include"], "Python.h").is_file(),
        library_path=read_library_path(environ.get("LD_LIBRARY_PATH", "")),
    )


def run_command(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except FileNotFoundError:
        return None
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]}: {error}"
    return done.stdout.strip() or done.stderr.strip()


def read_driver(run: Run, nvml: Callable[[], Driver | None] | None = None) -> Driver:
    """The driver by `nvidia-smi`, else by NVML; a failure keeps the tool's own words."""
    query = "driver_version,name,memory.total,memory.used,compute_cap"
    text = run(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"])
    if text is None:
        return (nvml or read_nvml)() or Driver(None, None, (), None)
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    rows = [row for row in rows if len(row) == 5 and re.fullmatch(r"\d+(\.\d+)+", row[0])]
    if not rows:
        return Driver(None, None, (), " ".join(text.split())[:200] or "nvidia-smi printed nothing")
    gpus = tuple(Gpu(row[1], _int(row[2]), _int(row[3]), _capability(row[4])) for row in rows)
    banner = re.search(r"CUDA(?: UMD)? Version:\s*(\d+)\.(\d+)", run(["nvidia-smi"]) or "")
    return Driver(rows[0][0], (int(banner.group(1)), int(banner.group(2))) if banner else None, gpus, None)


def read_nvml() -> Driver | None:
    """The same facts from libnvidia-ml, for containers that carry the library and not the program; None when it is not there."""
    try:
        lib = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    code = lib.nvmlInit_v2()
    if code != 0:
        return Driver(None, None, (), f"NVML does not start (code {code})")
    text, number, count = ctypes.create_string_buffer(96), ctypes.c_int(), ctypes.c_uint()
    lib.nvmlSystemGetDriverVersion(text, ctypes.c_uint(96))
    version = text.value.decode()
    lib.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(number))
    lib.nvmlDeviceGetCount_v2(ctypes.byref(count))
    gpus = tuple(gpu for i in range(count.value) if (gpu := _nvml_gpu(lib, i)))
    lib.nvmlShutdown()
    return Driver(version, (number.value // 1000, number.value % 1000 // 10) if number.value else None, gpus, None)


def _nvml_gpu(lib: ctypes.CDLL, index: int) -> Gpu | None:
    handle, name = ctypes.c_void_p(), ctypes.create_string_buffer(96)
    if lib.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)) != 0:
        return None
    lib.nvmlDeviceGetName(handle, name, ctypes.c_uint(96))
    memory, major, minor = (ctypes.c_ulonglong * 3)(), ctypes.c_int(), ctypes.c_int()
    has_memory = lib.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0
    lib.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor))
    total, used = (int(memory[0]) >> 20, int(memory[2]) >> 20) if has_memory else (None, None)
    return Gpu(name.value.decode(), total, used, (major.value, minor.value))


def has_nvidia_hardware(root: Path = Path("/")) -> bool:
    if any((root / node).exists() for node in ("dev/nvidia0", "dev/dxg")):
        return True
    for vendor in (root / "sys/bus/pci/devices").glob("*/vendor"):
        kind = _text(vendor.parent / "class")
        if _text(vendor) == "0x10de" and kind[:4] == "0x03":
            return True
    return False


def read_toolkit(run: Run, environ: Mapping[str, str]) -> Toolkit | None:
    homes = [environ.get("CUDA_HOME"), environ.get("CUDA_PATH")]
    for program in [*(f"{home}/bin/nvcc" for home in homes if home), "nvcc", "/usr/local/cuda/bin/nvcc"]:
        match = re.search(r"release (\d+)\.(\d+)", run([program, "--version"]) or "")
        if match:
            return Toolkit((int(match.group(1)), int(match.group(2))), program)
    return None


def read_memory(root: Path = Path("/")) -> tuple[int, int]:
    """(total, available) bytes, the control group's limit included."""
    fields = dict(re.findall(r"^(\w+):\s+(\d+) kB", _text(root / "proc/meminfo"), re.MULTILINE))
    total, available = int(fields.get("MemTotal", 0)) * 1024, int(fields.get("MemAvailable", 0)) * 1024
    limit, used = _text(root / "sys/fs/cgroup/memory.max"), _text(root / "sys/fs/cgroup/memory.current")
    if limit.isdigit() and int(limit) < total:
        total = int(limit)
        available = min(available, total - (int(used) if used.isdigit() else 0))
    return total, available


def read_memlock() -> int | None:
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def read_library_path(value: str) -> tuple[str, ...]:
    names = re.compile(r"^lib(cudart|cublas|cublasLt|cudnn\w*|nccl|nvrtc|nvJitLink)\.so(\.\d+)")
    found = []
    for folder in dict.fromkeys(part for part in value.split(":") if part):
        try:
            found += [f"{folder}/{name}" for name in sorted(os.listdir(folder)) if names.match(name)]
        except OSError:
            continue  # a path that does not exist cannot hide anything
    return tuple(found)


def port_problem(port: int) -> str | None:
    """Why nobody could listen on the port now; None when it is free."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))
        except OSError as error:
            return error.strerror or str(error)
    return None


def write_problem(folder: Path) -> str | None:
    existing = nearest_existing(folder)
    return None if os.access(existing, os.W_OK) else f"{existing} is not writable"


def nearest_existing(path: Path) -> Path:
    path = path.absolute()
    return next(p for p in (path, *path.parents) if p.exists())


def _disk_total(path: Path) -> int | None:
    try:
        return shutil.disk_usage(path).total
    except OSError:
        return None


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _int(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def _capability(text: str) -> tuple[int, int] | None:
    match = re.fullmatch(r"(\d+)\.(\d+)", text)
    return (int(match.group(1)), int(match.group(2))) if match else None
