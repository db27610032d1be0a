# SPDX-License-Identifier: Apache-2.0
"""Judgement: from the facts of an environment and a machine to the doctor's rows. Pure; the rules that a release must keep up to date
stand at the top.
"""

from __future__ import annotations

from collections.abc import Iterator

from whalefall.cli.doctor.cuda import (
    FAMILIES,
    Mixture,
    TorchBuild,
    dist_major,
    find_mixtures,
    is_cuda_library,
    library_family,
    library_major,
    mending_command,
    torch_build,
)
from whalefall.cli.doctor.machine import GIB, Machine
from whalefall.cli.doctor.packages import Environment, version_key
from whalefall.cli.doctor.report import Report, Row, Status

PYTHON_RANGE = ((3, 11), (3, 13))
"""Tried versions, the upper bound excluded."""

DRIVER_FLOOR = {11: 450, 12: 525, 13: 580}
"""Lowest driver branch that runs any toolkit of a CUDA major (NVIDIA's minor-version compatibility table)."""

MEASURED_CAPABILITY = (9, 0)
LOWEST_CAPABILITY = (7, 5)
"""torch's CUDA 13 builds hold no code for older GPUs."""

CORE_PACKAGES = {"torch": ">=2.11", "numpy": ">=2.1", "safetensors": ">=0.8", "tokenizers": ">=0.23,<0.24"}
"""The engine imports with these alone."""

BASE_PACKAGES = {
    "jinja2": ">=3.1",
    "deepseek-recipe": "==0.2.0",
    "llguidance": ">=1.6,<2",
    "fastapi": ">=0.115",
    "uvicorn": ">=0.34",
    "uvloop": ">=0.21",
    "httptools": ">=0.6",
    "orjson": ">=3.10",
    "msgspec": ">=0.19",
    "pyzmq": ">=26",
    "prometheus-client": ">=0.21",
    "typer": ">=0.15",
    "rich": ">=13.9",
}
"""What the server and the command line need on top; the same ranges as in the package's metadata (a test compares them)."""

OPTIONAL_PACKAGES = {
    "triton": "GPU kernels",
    "opentelemetry-sdk": "traces of requests",
    "fsspec": "disk tier on object stores",
}
"""What this version uses when it is there."""

KNOWN_PACKAGES = (
    "xgrammar",
    "granian",
    "nixl",
    "nixl-cu12",
    "nixl-cu13",
    "deep-ep",
    "ray",
    "matplotlib",
    "nvidia-ml-py",
)
"""Common in serving environments and not used by this version: listed when found, so that nobody wonders which of them is at work."""

MIN_MEMORY, MIN_SHM, MIN_DISK, MIN_MEMLOCK = 4 * GIB, GIB, 10 * GIB, 64 * GIB


def examine(env: Environment, machine: Machine, *, expect_gpu: bool = True, installed_only: bool = False) -> Report:
    """Every row of `whalefall doctor`.

    Args:
        expect_gpu: False on a CPU host: a missing driver is then a note.
        installed_only: leave the machine out (driver, GPUs, memory, disk, port): an image is judged where it is built, not where it runs.
    """
    torch = torch_build(env)
    mixtures = find_mixtures(env, torch)
    mend = mending_command(env, mixtures)
    rows = [*_python_rows(env, machine, torch), *_cuda_rows(env, torch, mixtures, mend), *_compiler_rows(machine, torch)]
    if not installed_only:
        rows += [
            *_driver_rows(machine, torch, expect_gpu),
            *_gpu_rows(machine, torch),
            *_toolkit_rows(machine, torch),
            *_machine_rows(machine),
        ]
    rows += _package_rows(env)
    return Report(tuple(rows), mend)


def satisfies(version: str, specifier: str) -> bool:
    """Whether a release meets comma-separated >=, <, == and != clauses."""
    have = version_key(version)
    for clause in specifier.split(","):
        operator, want = clause[: 2 if clause[1:2] == "=" else 1], version_key(clause.lstrip("<>=! "))
        width = max(len(have), len(want))
        left, right = have + (0,) * (width - len(have)), want + (0,) * (width - len(want))
        holds = {">=": left >= right, "<": left < right, "==": left == right, "!=": left != right, "<=": left <= right, ">": left > right}
        if not holds[operator]:
            return False
    return True


def _python_rows(env: Environment, machine: Machine, torch: TorchBuild | None) -> Iterator[Row]:
    low, high = PYTHON_RANGE
    version = ".".join(map(str, machine.python))
    tried = low <= machine.python[:2] < high
    yield Row(
        Status.OK if tried else Status.FAIL,
        "python",
        version,
        "3.11 or 3.12",
        "" if tried else "make the environment with python 3.11 or 3.12",
    )
    if torch is None:
        yield Row(Status.FAIL, "torch", "not installed", CORE_PACKAGES["torch"], 'pip install "torch>=2.11" (docs/install.md: CPU or CUDA)')
        return
    good = satisfies(torch.version, CORE_PACKAGES["torch"])
    build = {"cuda": f"CUDA {torch.label}", "cpu": "CPU build", "rocm": "ROCm build", "unknown": "build not recognised"}[torch.kind]
    status = Status.FAIL if not good else Status.WARN if torch.kind in ("rocm", "unknown") else Status.OK
    yield Row(
        status,
        "torch",
        f"{torch.version}, {build} (from {torch.evidence})",
        CORE_PACKAGES["torch"],
        "" if good else 'pip install "torch>=2.11"',
    )
    yield _triton_row(env, torch)


def _triton_row(env: Environment, torch: TorchBuild) -> Row:
    have = env.version("triton")
    dist = env.dists.get("torch")
    pinned = next((r.specifier for r in (dist.requires if dist else ()) if r.name == "triton" and r.extra is None), "")
    if have is None:
        if torch.kind == "cuda":
            return Row(
                Status.WARN, "triton", "not installed", "on a GPU, for every fast kernel", f'pip install "triton{pinned or ">=3.6"}"'
            )
        return Row(Status.NOTE, "triton", "not installed", "not needed on a CPU")
    if pinned and not satisfies(have, pinned):
        return Row(Status.FAIL, "triton", have, f"{pinned}, as torch {torch.version} asks", f'pip install --no-deps "triton{pinned}"')
    return Row(Status.OK, "triton", have, pinned or ">=3.6")


def _cuda_rows(env: Environment, torch: TorchBuild | None, mixtures: list[Mixture], mend: str | None) -> Iterator[Row]:
    """One row per library family, then one per mixture. A mixture's fix is the whole command: half of it would leave the rest broken."""
    expected = torch.cuda[0] if torch and torch.cuda else None
    yield from _library_rows(env, expected)
    for mixture in mixtures:
        yield Row(
            Status(mixture.severity.upper()),
            f"CUDA mixture: {mixture.subject}",
            f"{mixture.detail}; {mixture.because}",
            f"CUDA {expected} only" if expected else "one CUDA major",
            (mend or "") if mixture.severity != "note" else "",
        )
    if expected and not mixtures:
        yield Row(Status.OK, "CUDA mixture", f"none: everything found is CUDA {expected}")


def _library_rows(env: Environment, expected: int | None) -> Iterator[Row]:
    seen: dict[str, dict[str, set[str]]] = {}
    for dist in env.dists.values():
        family = next((f for f in FAMILIES if is_cuda_library(dist) and f.lower() in dist.name.replace("cuda-runtime", "cudart")), None)
        if family is None and dist.name.startswith("nvidia-cuda-nvrtc"):
            family = "nvrtc"
        if family:
            seen.setdefault(family, {}).setdefault(f"CUDA {dist_major(dist)}", set()).add(dist.spec)
    for lib in env.libraries:
        family, major = library_family(lib.path.name), library_major(lib.path.name)
        owned = any(o in env.dists and is_cuda_library(env.dists[o]) for o in lib.owners)
        if family and not owned and (major is not None or family in ("cudnn", "nccl")):
            label = f"CUDA {major}" if major else "CUDA ?"
            seen.setdefault(family, {}).setdefault(label, set()).add(f"file {lib.relative}")
    for family in FAMILIES:
        if family in seen:
            found = "; ".join(f"{label}: {', '.join(sorted(names))}" for label, names in sorted(seen[family].items()))
            majors = {label for label in seen[family] if label != "CUDA ?"}
            clean = len(majors) <= 1 and (expected is None or majors <= {f"CUDA {expected}"})
            yield Row(Status.OK if clean else Status.NOTE, family, found, "" if clean else "see the mixture rows")


def _driver_rows(machine: Machine, torch: TorchBuild | None, expect_gpu: bool) -> Iterator[Row]:
    driver, cuda = machine.driver, torch.cuda if torch else None
    floor = DRIVER_FLOOR.get(cuda[0]) if cuda else None
    need = f">= {floor} for CUDA {torch.label}" if floor and torch else ""
    if driver.version is None:
        yield _no_driver_row(machine, torch, need, expect_gpu)
        return
    speaks = f", speaks CUDA {driver.cuda[0]}.{driver.cuda[1]}" if driver.cuda else ""
    found = f"{driver.version}{speaks}"
    if floor is None or cuda is None or torch is None:
        yield Row(Status.OK, "driver", found, need)
    elif int(driver.version.split(".")[0]) < floor:
        older = max((m for m, low in DRIVER_FLOOR.items() if low <= int(driver.version.split(".")[0])), default=None)
        other = f", or install a CUDA {older} build of torch" if older else ""
        yield Row(Status.FAIL, "driver", f"{found}: too old", need, f"raise the driver to {floor} or newer{other}")
    elif driver.cuda and cuda[0] == driver.cuda[0] and cuda[1] is not None and driver.cuda[1] < cuda[1]:
        yield Row(
            Status.NOTE,
            "driver",
            f"{found}: runs CUDA {torch.label} by minor-version compatibility; it cannot compile PTX of that release",
            need,
        )
    else:
        yield Row(Status.OK, "driver", found, need)


def _no_driver_row(machine: Machine, torch: TorchBuild | None, need: str, expect_gpu: bool) -> Row:
    problem = machine.driver.problem
    found = f"does not work: {problem}" if problem else "none found"
    if problem and "mismatch" in problem.lower():
        return Row(Status.FAIL, "driver", found, need, "restart the machine: the loaded kernel module is older than the installed driver")
    if not expect_gpu:
        return Row(Status.NOTE, "driver", found, "no GPU is expected here (--no-gpu)")
    if problem or machine.has_nvidia_hardware:
        seen = "" if problem else ", though an NVIDIA GPU is in the machine"
        return Row(Status.FAIL, "driver", found + seen, need, "install the NVIDIA driver; in a container, start it with all GPUs handed in")
    if torch is not None and torch.kind == "cuda":
        fix = "run on a machine with an NVIDIA GPU, or say --no-gpu if the CPU is meant"
        return Row(Status.WARN, "driver", f"{found}; this torch is a CUDA build", need, fix)
    return Row(Status.NOTE, "driver", f"{found}: the CPU path will run")


def _gpu_rows(machine: Machine, torch: TorchBuild | None) -> Iterator[Row]:
    for index, gpu in enumerate(machine.driver.gpus):
        memory = "memory unknown" if gpu.memory_mib is None else f"{gpu.memory_mib / 1024:.1f} GiB"
        used = f", {gpu.used_mib / 1024:.1f} in use" if gpu.used_mib else ""
        capability = f", compute capability {gpu.capability[0]}.{gpu.capability[1]}" if gpu.capability else ""
        subject, found = f"GPU {index}", f"{gpu.name}, {memory}{used}{capability}"
        if torch is not None and torch.kind == "cpu":
            yield Row(Status.WARN, subject, f"{found}; unused, torch is a CPU build", "a CUDA build of torch", "docs/install.md, GPU")
        elif gpu.capability and gpu.capability < LOWEST_CAPABILITY:
            yield Row(Status.FAIL, subject, f"{found}: too old", ">= 7.5", "use a newer GPU, or --device cpu")
        elif gpu.capability and gpu.capability < MEASURED_CAPABILITY:
            yield Row(
                Status.WARN,
                subject,
                f"{found}: kernels made for 9.0 are passed over",
                ">= 9.0 for every kernel",
                "--device cpu, or a Hopper GPU",
            )
        else:
            yield Row(Status.OK, subject, found, ">= 9.0")


def _compiler_rows(machine: Machine, torch: TorchBuild | None) -> Iterator[Row]:
    """Triton compiles a small C stub per kernel on the machine that runs it: without a compiler and Python.h the first kernel fails."""
    if torch is None or torch.kind != "cuda":
        return
    missing = [
        what for what, is_there in (("no C compiler", machine.c_compiler), ("no Python.h", machine.has_python_headers)) if not is_there
    ]
    found = " and ".join(missing) or f"{machine.c_compiler}, Python.h"
    fix = "install gcc and the Python headers (Debian: apt-get install gcc libc6-dev python3-dev)" if missing else ""
    yield Row(Status.WARN if missing else Status.OK, "C compiler", found, "both, for Triton's launch stubs", fix)


def _toolkit_rows(machine: Machine, torch: TorchBuild | None) -> Iterator[Row]:
    toolkit, cuda = machine.toolkit, torch.cuda if torch else None
    if toolkit is None:
        yield Row(Status.OK, "toolkit", "no nvcc found", "not needed: Triton brings its own assembler")
    elif cuda is not None and (toolkit.version[0] != cuda[0] or (cuda[1] is not None and toolkit.version[1] < cuda[1])):
        version = ".".join(map(str, toolkit.version))
        fix = "only CUDA C++ compiled at run time uses it; point CUDA_HOME at a matching toolkit or unset it"
        yield Row(Status.WARN, "toolkit", f"{version} at {toolkit.path}", f"CUDA {torch.label if torch else ''} or newer minor", fix)
    else:
        yield Row(Status.OK, "toolkit", f"{'.'.join(map(str, toolkit.version))} at {toolkit.path}")
    hidden = [path for path in machine.library_path if _hides(path, cuda[0] if cuda else None)]
    if hidden and cuda is not None:
        shown = ", ".join(hidden[:3]) + (f" and {len(hidden) - 3} more" if len(hidden) > 3 else "")
        yield Row(Status.WARN, "LD_LIBRARY_PATH", f"put before the wheels' own libraries: {shown}", "none of them", "unset LD_LIBRARY_PATH")


def _hides(path: str, expected: int | None) -> bool:
    """A library on the loader path of the very name that torch asks for, or of another CUDA."""
    name = path.rsplit("/", 1)[-1]
    major = library_major(name)
    return major is None or major != expected or library_family(name) in ("cublas", "nvJitLink")


def _machine_rows(machine: Machine) -> Iterator[Row]:
    has_gpu = bool(machine.driver.gpus)
    low = machine.memory_available < MIN_MEMORY
    found = f"{machine.memory_available / GIB:.1f} GiB available of {machine.memory_total / GIB:.1f}"
    yield Row(
        Status.WARN if low else Status.OK,
        "host memory",
        found,
        f">= {MIN_MEMORY // GIB} GiB",
        "free memory, or serve a smaller model" if low else "",
    )
    limit = machine.memlock_bytes
    small = limit is not None and limit < MIN_MEMLOCK
    found = "no limit" if limit is None else f"{limit / GIB:.2f} GiB"
    # Only transfers that register memory with a network card lock it; a CPU host never does.
    status = Status.WARN if small and has_gpu else Status.NOTE if small else Status.OK
    fix = "ulimit -l unlimited (in a container: --ulimit memlock=-1), for Engram tables and KV transfer" if small and has_gpu else ""
    yield Row(status, "lockable memory", found, "no limit, on GPU machines", fix)
    if machine.shm_bytes is not None:
        small = machine.shm_bytes < MIN_SHM
        status = Status.WARN if small and len(machine.driver.gpus) > 1 else Status.NOTE if small else Status.OK
        fix = "in a container: --shm-size 16g or --ipc host" if status is Status.WARN else ""
        yield Row(status, "/dev/shm", f"{machine.shm_bytes / GIB:.2f} GiB", ">= 1 GiB with several GPUs", fix)
    low = machine.disk_free < MIN_DISK
    yield Row(
        Status.WARN if low else Status.OK,
        "disk",
        f"{machine.disk_free / GIB:.1f} GiB free at {machine.disk_path}",
        f">= {MIN_DISK // GIB} GiB",
        "free some, or keep models elsewhere" if low else "",
    )
    bad = machine.cache_problem
    fix = "set TRITON_CACHE_DIR to a writable folder, or kernels are compiled again at every start" if bad else ""
    yield Row(
        Status.WARN if bad else Status.OK, "kernel cache", bad or machine.cache_path, "a writable folder that outlives the process", fix
    )
    taken = machine.port_problem
    yield Row(
        Status.WARN if taken else Status.OK,
        "port",
        f"{machine.port}: {taken}" if taken else f"{machine.port} is free",
        "",
        "whalefall serve --port N with another N" if taken else "",
    )


def _package_rows(env: Environment) -> Iterator[Row]:
    for wanted, status, subject in ((CORE_PACKAGES, Status.FAIL, "engine packages"), (BASE_PACKAGES, Status.WARN, "server packages")):
        wrong = {n: (env.version(n), spec) for n, spec in wanted.items() if n != "torch" and not _is_met(env.version(n), spec)}
        if not wrong:
            yield Row(Status.OK, subject, "all there")
            continue
        found = ", ".join(f"{name} {have or 'missing'}" for name, (have, _) in wrong.items())
        needed = ", ".join(f"{name}{spec}" for name, (_, spec) in wrong.items())
        yield Row(status, subject, found, needed, "pip install " + " ".join(f'"{name}{spec}"' for name, (_, spec) in wrong.items()))
    for name, versions in env.duplicates.items():
        fix = f"pip install --force-reinstall --no-deps {name}"
        yield Row(Status.WARN, name, f"recorded more than once: {', '.join(versions)}", "one version", fix)
    used = [f"{name} {env.version(name)} ({use})" for name, use in OPTIONAL_PACKAGES.items() if env.version(name)]
    idle = [f"{name} {env.version(name)}" for name in KNOWN_PACKAGES if env.version(name)]
    unused = f"; not used by this version: {', '.join(idle)}" if idle else ""
    yield Row(Status.NOTE, "optional packages", (", ".join(used) or "none") + unused)


def _is_met(have: str | None, specifier: str) -> bool:
    return have is not None and satisfies(have, specifier)
