# SPDX-License-Identifier: Apache-2.0
"""Which CUDA the environment is of, and everything in it that is of another one.

The environment's CUDA is the one torch was built with; a library or an extension of another major is a mixture. Mixtures are found twice,
by package metadata (names, versions, requirements) and by the files (library names, what they link to, who wrote them last), since each
alone misses cases: a wheel may link to a runtime it never declared, and two wheels may write one path.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from whalefall.cli.doctor.packages import Dist, Environment, SharedLibrary

# CUDA 12 wheels carry a -cu12 suffix; since CUDA 13 the toolkit's own wheels have none (nvidia-cublas 13.x, files under nvidia/cu13).
_BARE_NVIDIA = frozenset(
    f"nvidia-{part}"
    for part in (
        "cublas",
        "cuda-cccl",
        "cuda-crt",
        "cuda-cupti",
        "cuda-nvcc",
        "cuda-nvrtc",
        "cuda-runtime",
        "cufft",
        "cufile",
        "curand",
        "cusolver",
        "cusparse",
        "npp",
        "nvjitlink",
        "nvtx",
        "nvvm",
    )
)
_BY_VERSION = frozenset({"cuda-toolkit", "cuda-bindings", "cuda-python"})
_NAME_TAG = re.compile(r"[-_]cu(?:da)?(1[1-9])\d?x?$")
_LOCAL_TAG = re.compile(r"(?:^|[^a-z0-9])cu(?:da)?(1[1-9])\.?(\d)?(?=$|[^0-9])")
_LIBRARY = re.compile(r"^lib([A-Za-z]+(?:-builtins)?)(?:-[0-9a-f]{6,})?\.so\.(\d+)")
_MANGLED = re.compile(r"-[0-9a-f]{6,}\.so")
_SAME_NUMBER = frozenset({"cudart", "cublas", "cublasLt", "cupti", "nvrtc", "nvrtc-builtins", "nvJitLink", "nvblas"})
_OTHER_NUMBER = {("cufft", 10): 11, ("cufft", 11): 12, ("cufft", 12): 13, ("cusolver", 12): 13, ("cusparse", 11): 11}
"""Libraries whose own major is not CUDA's; pairs that mean two CUDA majors (cusparse 12, cusolver 11) are left out."""

FAMILIES = ("cudart", "cublas", "cudnn", "nccl", "nvrtc", "nvJitLink", "cufft", "cusparse", "cusolver")
"""Library families the doctor lists by name."""

Severity = Literal["fail", "warn", "note"]


@dataclass(frozen=True, slots=True)
class TorchBuild:
    version: str
    kind: Literal["cuda", "cpu", "rocm", "unknown"]
    cuda: tuple[int, int | None] | None
    evidence: str
    """Where the CUDA line was read."""
    disagreement: str | None = None
    """Set when torch's metadata and torch's files name different builds."""

    @property
    def label(self) -> str:
        return "none" if self.cuda is None else ".".join(str(part) for part in self.cuda if part is not None)


@dataclass(frozen=True, slots=True)
class Mixture:
    """One thing that is of another CUDA than the environment."""

    severity: Severity
    subject: str
    detail: str
    because: str
    """Who brought it, in words."""
    remove: tuple[str, ...] = ()
    reinstall: tuple[str, ...] = ()
    delete: tuple[str, ...] = ()
    """Files no package owns."""


def library_major(file_name: str) -> int | None:
    """CUDA major of a library by its file name or soname; None when the name does not tell."""
    match = _LIBRARY.match(file_name)
    if match is None:
        return None
    stem, number = match.group(1), int(match.group(2))
    if stem in _SAME_NUMBER or stem.startswith("npp"):
        return number
    return _OTHER_NUMBER.get((stem, number))


def library_family(file_name: str) -> str | None:
    """One of `FAMILIES`: libcublasLt counts as cublas, libcudnn_ops as cudnn."""
    stem = re.match(r"^lib([A-Za-z]+)", file_name)
    if stem is None:
        return None
    return next((f for f in FAMILIES if stem.group(1).startswith(f)), None)


def dist_major(dist: Dist) -> int | None:
    """CUDA major that a distribution declares by name, version or file layout; None for those that do not care."""
    tagged = _NAME_TAG.search(dist.name)
    if tagged:
        return int(tagged.group(1))
    if dist.name in _BY_VERSION:
        return int(dist.version.split(".")[0])
    if dist.name in _BARE_NVIDIA:
        layout = next((m for m in (re.match(r"nvidia/cu(1[1-9])/", path) for path in dist.files) if m), None)
        return int(layout.group(1)) if layout else 13
    local = _LOCAL_TAG.search(dist.version.partition("+")[2])
    return int(local.group(1)) if local else None


def is_cuda_library(dist: Dist) -> bool:
    """A wheel that carries CUDA's own libraries, in contrast to an extension built on them."""
    return dist.name in _BARE_NVIDIA or dist.name in _BY_VERSION or (dist.name.startswith("nvidia-") and bool(_NAME_TAG.search(dist.name)))


def torch_build(env: Environment) -> TorchBuild | None:
    """Torch's build as its files tell it, with its metadata and its links as second and third witness; None when torch is absent."""
    dist = env.dists.get("torch")
    text = env.read_text("torch/version.py")
    if dist is None and text is None:
        return None
    version = _assigned(text or "", "__version__") or (dist.version if dist else "unknown")
    by_metadata = _metadata_major(dist)
    if text is not None and re.search(r"^cuda\b", text, re.MULTILINE):
        if _assigned(text, "hip"):
            return TorchBuild(version, "rocm", None, "torch/version.py")
        cuda = _pair(_assigned(text, "cuda"))
        disagreement = None
        if cuda is not None and by_metadata is not None and by_metadata != cuda[0]:
            disagreement = f"its files are a CUDA {cuda[0]} build, its metadata names CUDA {by_metadata}"
        return TorchBuild(version, "cuda" if cuda else "cpu", cuda, "torch/version.py", disagreement)
    if by_metadata is not None:
        return TorchBuild(version, "cuda", (by_metadata, None), "torch's metadata")
    linked = _linked_majors(lib for lib in env.libraries if lib.relative.startswith("torch/lib/"))
    if linked:
        return TorchBuild(version, "cuda", (max(linked), None), "what torch/lib links to")
    return TorchBuild(version, "cpu" if version.endswith("+cpu") else "unknown", None, "torch's version")


def find_mixtures(env: Environment, torch: TorchBuild | None) -> list[Mixture]:
    """Everything of another CUDA major than torch's, the worst first."""
    if torch is not None and torch.kind in ("cpu", "rocm"):
        return _unused_libraries(env, torch)
    major = torch.cuda[0] if torch and torch.cuda else _only_major(env)
    if major is None:
        return _no_torch_to_decide(env)
    foreign = {d.name: d for d in env.dists.values() if is_cuda_library(d) and dist_major(d) not in (None, major)}
    found: list[Mixture] = []
    if torch and torch.disagreement:
        found.append(Mixture("fail", torch_spec(torch), torch.disagreement, "torch was replaced halfway", ("torch",), (torch_spec(torch),)))
    found += _pulled_libraries(env, major, foreign)
    found += _overwritten_files(env, major, foreign)
    found += _foreign_extensions(env, major, foreign)
    found += _loose_files(env, major)
    order = {"fail": 0, "warn": 1, "note": 2}
    return sorted(found, key=lambda m: order[m.severity])


def torch_spec(torch: TorchBuild) -> str:
    return f"torch=={torch.version}"


def mending_command(env: Environment, mixtures: Iterable[Mixture]) -> str | None:
    """One shell line that takes out what is foreign and writes back what it overwrote; None when there is nothing to do."""
    meant = [m for m in mixtures if m.severity != "note"]
    remove = dict.fromkeys(name for m in meant for name in m.remove)
    reinstall = dict.fromkeys(spec for m in meant for spec in m.reinstall)
    delete = dict.fromkeys(path for m in meant for path in m.delete)
    uninstall, install = "python -m pip uninstall -y", "python -m pip install --force-reinstall --no-deps"
    if "pip" not in env.dists:
        uninstall, install = ("uv pip uninstall", "uv pip install --reinstall --no-deps")
    steps = []
    if remove:
        steps.append(f"{uninstall} {' '.join(remove)}")
    if delete:
        steps.append(f"rm {' '.join(delete)}")
    if reinstall:
        steps.append(f"{install} {' '.join(reinstall)}")
    return " && ".join(steps) or None


def bringers(env: Environment, name: str, foreign: Iterable[str]) -> tuple[str, ...]:
    """Installed packages outside `foreign` through whose requirements `name` came in, found by walking requirements upwards."""
    inside, seen, queue, roots = set(foreign), {name}, [name], []
    while queue:
        for parent in env.required_by(queue.pop(0)):
            if parent in seen:
                continue
            seen.add(parent)
            if parent in inside:
                queue.append(parent)
            else:
                roots.append(parent)
    return tuple(roots)


def _pulled_libraries(env: Environment, major: int, foreign: dict[str, Dist]) -> list[Mixture]:
    """Foreign CUDA libraries, grouped by the packages that brought them."""
    groups: dict[tuple[str, ...], list[Dist]] = {}
    for dist in foreign.values():
        groups.setdefault(bringers(env, dist.name, foreign), []).append(dist)
    found = []
    for roots, dists in groups.items():
        names = ", ".join(d.spec for d in dists)
        detail = f"CUDA {'/'.join(sorted({str(dist_major(d)) for d in dists}))} libraries in a CUDA {major} environment: {names}"
        culprits = tuple(root for root in roots if root != "torch")
        if culprits:
            because = f"pulled in by {', '.join(env.dists[c].spec for c in culprits)}"
            found.append(Mixture("fail", culprits[0], detail, because, (*culprits, *(d.name for d in dists))))
            continue
        asked = any(d.is_requested for d in dists)
        because = "installed by name; no installed package requires it" if asked else "no installed package requires it: left over"
        # Unreferenced leftovers are found by name search only (dlopen of "either" cudart), so they warn rather than fail.
        found.append(Mixture("fail" if asked else "warn", dists[0].name, detail, because, tuple(d.name for d in dists)))
    return found


def _overwritten_files(env: Environment, major: int, foreign: dict[str, Dist]) -> list[Mixture]:
    """Paths that a native and a foreign wheel both wrote (cuDNN and NCCL use the same path for every CUDA)."""
    pairs: dict[tuple[str, str], SharedLibrary] = {}
    for lib in env.libraries:
        foreigners = [o for o in lib.owners if o in foreign]
        natives = [o for o in lib.owners if o not in foreign]
        if foreigners and natives:
            pairs.setdefault((natives[0], foreigners[0]), lib)
    found = []
    for (ours, theirs), lib in pairs.items():
        size = lib.path.stat().st_size
        claims = {name: env.dists[name].files[lib.relative] for name in (ours, theirs)}
        on_disk = next((name for name in (ours, theirs) if claims[name] == size and claims[ours] != claims[theirs]), None)
        who = f"the file on disk is {on_disk}'s, by its size" if on_disk else "whichever was installed last is there"
        detail = f"{lib.relative} was written by both {ours} (CUDA {major}) and {theirs}: {who}"
        roots = ", ".join(bringers(env, theirs, foreign)) or "nobody that is still installed"
        found.append(Mixture("fail", theirs, detail, f"{theirs} came with {roots}", (theirs,), (env.dists[ours].spec,)))
    return found


def _foreign_extensions(env: Environment, major: int, foreign: dict[str, Dist]) -> list[Mixture]:
    """Packages that are not CUDA itself but were built for another CUDA: by their tag, or by what their libraries link to."""
    links: dict[str, dict[str, str]] = {}
    carried: dict[str, str] = {}
    for lib in env.libraries:
        owners = [o for o in lib.owners if o not in foreign and o in env.dists and not is_cuda_library(env.dists[o])]
        for owner in owners:
            for needed in lib.linkage.needed if lib.linkage else ():
                if library_major(needed) not in (None, major):
                    links.setdefault(owner, {})[needed] = lib.relative
            # Triton ships CUPTI of an older CUDA for its own profiler: only the families that others open by name count.
            if library_family(lib.path.name) and library_major(lib.path.name) not in (None, major):
                carried.setdefault(owner, lib.relative)
    found = []
    for name in sorted({*links, *carried, *(d.name for d in env.dists.values() if dist_major(d) not in (None, major))} - set(foreign)):
        if name != "torch":
            found.append(_extension(env.dists[name], major, links.get(name, {}), carried.get(name)))
    return found


def _extension(dist: Dist, major: int, links: dict[str, str], carried: str | None) -> Mixture:
    open_links = {soname: path for soname, path in links.items() if not _MANGLED.search(soname)}
    if open_links:
        soname, path = next(iter(open_links.items()))
        because = f"{path} links to {soname}"
    elif links or carried:
        # A private copy, under a mangled name or opened by its owner alone, does not meet torch's; taking it out would cost more.
        detail = f"{dist.spec} carries its own CUDA {_majors([*links, carried or ''])} runtime in a CUDA {major} environment"
        return Mixture("note", dist.name, detail, f"{carried or next(iter(links))} is a private copy")
    else:
        because = f"its name or version says CUDA {dist_major(dist)}"
    other = _majors(open_links) or str(dist_major(dist))
    return Mixture("fail", dist.name, f"{dist.spec} is built for CUDA {other}, the environment is CUDA {major}", because, (dist.name,))


def _loose_files(env: Environment, major: int) -> list[Mixture]:
    found = []
    for lib in env.libraries:
        other = library_major(lib.path.name)
        if not lib.owners and other not in (None, major):
            detail = f"{lib.relative} is a CUDA {other} library in a CUDA {major} environment"
            found.append(Mixture("warn", lib.path.name, detail, "no installed package owns the file", delete=(str(lib.path),)))
    return found


def _unused_libraries(env: Environment, torch: TorchBuild) -> list[Mixture]:
    dists = [d for d in env.dists.values() if is_cuda_library(d) and d.files]
    if not dists:
        return []
    detail = f"CUDA libraries beside a {torch.kind} build of torch, which will not use them: {', '.join(d.spec for d in dists)}"
    roots = ", ".join(dict.fromkeys(r for d in dists for r in bringers(env, d.name, [x.name for x in dists]))) or "nobody still installed"
    return [Mixture("note", dists[0].name, detail, f"brought by {roots}", tuple(d.name for d in dists))]


def _no_torch_to_decide(env: Environment) -> list[Mixture]:
    majors = sorted({m for d in env.dists.values() if is_cuda_library(d) and (m := dist_major(d)) is not None})
    if len(majors) < 2:
        return []
    detail = f"CUDA {' and '.join(map(str, majors))} libraries side by side"
    return [Mixture("fail", "CUDA", detail, "there is no torch that would say which one is meant: install torch first, then ask again")]


def _only_major(env: Environment) -> int | None:
    majors = {m for d in env.dists.values() if is_cuda_library(d) and (m := dist_major(d)) is not None}
    return majors.pop() if len(majors) == 1 else None


def _metadata_major(dist: Dist | None) -> int | None:
    """CUDA major from torch's local version or from the CUDA wheels it requires."""
    if dist is None:
        return None
    local = _LOCAL_TAG.search(dist.version.partition("+")[2])
    if local:
        return int(local.group(1))
    for requirement in dist.requires:
        tag = _NAME_TAG.search(requirement.name)
        if requirement.name.startswith("nvidia-") and tag:
            return int(tag.group(1))
        pinned = re.match(r"==\s*(1[1-9])\.", requirement.specifier)
        if requirement.name in _BY_VERSION and pinned:
            return int(pinned.group(1))
    return None


def _linked_majors(libraries: Iterable[SharedLibrary]) -> set[int]:
    return {m for lib in libraries for needed in (lib.linkage.needed if lib.linkage else ()) if (m := library_major(needed)) is not None}


def _majors(names: Iterable[str]) -> str:
    return "/".join(sorted({str(m) for name in names if (m := library_major(name.rsplit("/", 1)[-1])) is not None}))


def _assigned(text: str, name: str) -> str | None:
    """The string assigned to `name` in a Python file, read as text: `cuda: Optional[str] = '12.9'`."""
    match = re.search(rf"^{name}\s*(?::[^=\n]+)?=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    return match.group(1) if match else None


def _pair(version: str | None) -> tuple[int, int | None] | None:
    if version is None:
        return None
    parts = version.split(".")
    return int(parts[0]), int(parts[1]) if len(parts) > 1 else None
