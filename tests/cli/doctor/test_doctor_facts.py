# SPDX-License-Identifier: Apache-2.0
"""Reading facts: driver answers, memory, hardware, requirements; and the command from outside."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from whalefall.cli.doctor.checks import BASE_PACKAGES, CORE_PACKAGES, satisfies
from whalefall.cli.doctor.machine import Driver, has_nvidia_hardware, read_driver, read_library_path, read_memory, read_toolkit
from whalefall.cli.doctor.packages import Environment, parse_requirement
from whalefall.cli.doctor.report import Report, Row, Status, print_report, to_json

ROOT = Path(__file__).parents[3]
BANNER = "| NVIDIA-SMI 580.159.04   Driver Version: 580.159.04   CUDA Version: 13.0 |"


def answers(query: str | None, banner: str | None = BANNER):
    return lambda command: query if len(command) > 1 else banner


def test_driver_answer_is_read_with_its_gpus() -> None:
    driver = read_driver(answers("580.159.04, NVIDIA H200, 143771, 12, 9.0\n580.159.04, NVIDIA GH200, [N/A], [N/A], 9.0"))
    assert (driver.version, driver.cuda, driver.problem) == ("580.159.04", (13, 0), None)
    assert [(g.name, g.memory_mib, g.capability) for g in driver.gpus] == [("NVIDIA H200", 143_771, (9, 0)), ("NVIDIA GH200", None, (9, 0))]


def test_failing_driver_tool_keeps_its_own_words() -> None:
    words = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
    driver = read_driver(answers(words))
    assert (driver.version, driver.problem) == (None, words)


def test_nvml_is_asked_when_the_tool_is_missing() -> None:
    known = Driver("580.1", (13, 0), (), None)
    assert read_driver(answers(None), nvml=lambda: known) is known
    assert read_driver(answers(None), nvml=lambda: None) == Driver(None, None, (), None)


def test_toolkit_version_is_read_from_the_compiler_named_first() -> None:
    seen: list[str] = []

    def run(command: list[str]) -> str | None:
        seen.append(command[0])
        return "Cuda compilation tools, release 12.4, V12.4.131" if command[0].startswith("/opt") else None

    toolkit = read_toolkit(run, {"CUDA_HOME": "/opt/cuda"})
    assert toolkit is not None
    assert (toolkit.version, seen) == ((12, 4), ["/opt/cuda/bin/nvcc"])


def test_container_limit_counts_as_memory(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal:  1000000 kB\nMemAvailable:  900000 kB\n")
    assert read_memory(tmp_path) == (1_024_000_000, 921_600_000)
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("500000000\n")
    (tmp_path / "sys/fs/cgroup/memory.current").write_text("100000000\n")
    assert read_memory(tmp_path) == (500_000_000, 400_000_000)


def test_only_display_class_devices_of_the_vendor_count_as_a_gpu(tmp_path: Path) -> None:
    for device, vendor, kind in (("a", "0x10de", "0x0c0330"), ("b", "0x8086", "0x030000")):
        folder = tmp_path / "sys/bus/pci/devices" / device
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(vendor + "\n")
        (folder / "class").write_text(kind + "\n")
    assert not has_nvidia_hardware(tmp_path)
    (tmp_path / "sys/bus/pci/devices/a/class").write_text("0x030200\n")
    assert has_nvidia_hardware(tmp_path)


def test_loader_path_lists_only_cuda_libraries(tmp_path: Path) -> None:
    for name in ("libcudart.so.12", "libcudnn_ops.so.9", "libfoo.so.1", "libnccl.so"):
        (tmp_path / name).touch()
    found = read_library_path(f"{tmp_path}:/does/not/exist::{tmp_path}")
    assert [Path(p).name for p in found] == ["libcudart.so.12", "libcudnn_ops.so.9"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("nvidia-cublas-cu12==12.9.1.4; platform_system == 'Linux'", ("nvidia-cublas-cu12", (), "==12.9.1.4", None)),
        ("Cuda_Toolkit[cublas,cudart]==13.0.2", ("cuda-toolkit", ("cublas", "cudart"), "==13.0.2", None)),
        ("numpy (>=1.2,<3) ; extra == 'all'", ("numpy", (), ">=1.2,<3", "all")),
        ("pip", ("pip", (), "", None)),
    ],
)
def test_requirements_are_taken_apart(text: str, expected: tuple) -> None:
    parsed = parse_requirement(text)
    assert parsed is not None
    assert (parsed.name, parsed.extras, parsed.specifier, parsed.extra) == expected


def test_requirement_of_another_platform_is_left_out() -> None:
    assert parse_requirement("colorama; sys_platform == 'win32'") is None


@pytest.mark.parametrize(
    ("version", "specifier", "holds"),
    [
        ("2.11.0+cu129", ">=2.11", True),
        ("2.9", ">=2.11", False),
        ("0.23.3", ">=0.23,<0.24", True),
        ("3.6.0", "==3.6", True),
        ("1.0rc1", "<1", False),
    ],
)
def test_version_ranges(version: str, specifier: str, holds: bool) -> None:
    assert satisfies(version, specifier) is holds


def test_package_tables_equal_the_metadata() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    parsed = [r for text in declared if (r := parse_requirement(text))]
    assert {r.name: r.specifier for r in parsed} == CORE_PACKAGES | BASE_PACKAGES


def test_folder_of_a_half_removed_package_is_skipped(site) -> None:
    (site.root / "torch-2.11.0.dist-info").mkdir()
    assert Environment([site.root]).dists == {}


def test_json_holds_every_row_and_the_verdict() -> None:
    report = Report((Row(Status.WARN, "disk", "1 GiB", ">= 10 GiB", "free some"),), mend=None)
    body = json.loads(to_json(report, strict=True))
    assert body["ok"] is False
    assert body["rows"] == [{"status": "WARN", "subject": "disk", "found": "1 GiB", "needed": ">= 10 GiB", "fix": "free some"}]
    assert json.loads(to_json(report, strict=False))["ok"] is True


def test_rows_are_printed_where_rich_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for module in ("rich.console", "rich.table", "rich.text"):
        monkeypatch.setitem(sys.modules, module, None)
    print_report(
        Report((Row(Status.FAIL, "torch", "2.9", ">=2.11", "pip install torch"),), mend="python -m pip uninstall -y x"), strict=False
    )
    out = capsys.readouterr().out
    assert "FAIL  torch  2.9  (needs >=2.11)" in out
    assert "-> pip install torch" in out
    assert "\n  python -m pip uninstall -y x\n" in out


@pytest.mark.parametrize("command", [["whalefall.cli.doctor"], ["whalefall.cli.main", "doctor"]], ids=["module", "command"])
def test_doctor_runs_where_torch_cannot_be_imported(tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.13: cannot open shared object file')")
    done = subprocess.run(
        [sys.executable, "-m", *command, "--json", "--no-gpu"], capture_output=True, text=True, env={"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    )
    assert done.stderr == ""
    body = json.loads(done.stdout)
    assert done.returncode == (0 if body["ok"] else 1)
    assert "torch" in {r["subject"] for r in body["rows"]}
