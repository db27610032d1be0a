# SPDX-License-Identifier: Apache-2.0
"""The table of cases: clean environments, mixtures in many ways, drivers. Each case asks for the row, the reason and the command."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from whalefall.cli.doctor.checks import examine
from whalefall.cli.doctor.cuda import Mixture, find_mixtures, library_major, torch_build
from whalefall.cli.doctor.machine import Driver, Gpu, Machine, Toolkit
from whalefall.cli.doctor.report import Report, Row, Status

MakeMachine = Callable[..., Machine]
NO_DRIVER = Driver(None, None, (), None)


def row(report: Report, subject: str) -> Row:
    return next(r for r in report.rows if r.subject == subject)


def mixtures(site) -> list[Mixture]:
    env = site.environment
    return find_mixtures(env, torch_build(env))


# Clean


def test_clean_cuda12_environment_is_all_right(site, machine: MakeMachine) -> None:
    report = examine(site.cuda12().environment, machine())
    assert report.exit_code(strict=True) == 0
    assert row(report, "torch").found.startswith("2.11.0+cu129, CUDA 12.9")
    assert row(report, "CUDA mixture").status is Status.OK
    assert row(report, "cudnn").found == "CUDA 12: nvidia-cudnn-cu12==9.17.1.4"
    assert report.mend is None


def test_clean_cuda13_environment_is_all_right(site, machine: MakeMachine) -> None:
    report = examine(site.cuda13().environment, machine())
    assert report.exit_code(strict=True) == 0
    assert row(report, "cublas").found == "CUDA 13: nvidia-cublas==13.1.0.3"
    # cuFFT of CUDA 13 is libcufft.so.12: its own number must not be read as CUDA 12.
    assert row(report, "cufft").status is Status.OK
    assert report.mend is None


def test_cpu_environment_is_all_right_without_a_gpu(site, machine: MakeMachine) -> None:
    report = examine(site.cpu().environment, machine(driver=NO_DRIVER, has_nvidia_hardware=False))
    assert report.exit_code(strict=True) == 0
    assert row(report, "torch").found.startswith("2.13.0+cpu, CPU build")
    assert row(report, "driver").status is Status.NOTE


# Mixtures


def test_audio_package_that_links_to_cuda13_is_named(site, machine: MakeMachine, make_elf) -> None:
    site.cuda12().wheel(
        "torchaudio",
        "2.11.0",
        requires=["torch==2.11.0"],
        files={"torchaudio/lib/_torchaudio.so": make_elf(["libtorch.so", "libcudart.so.13"])},
    )
    report = examine(site.environment, machine())
    found = row(report, "CUDA mixture: torchaudio")
    assert found.status is Status.FAIL
    assert "built for CUDA 13" in found.found
    assert "torchaudio/lib/_torchaudio.so links to libcudart.so.13" in found.found
    assert report.mend == found.fix == "python -m pip uninstall -y torchaudio"
    assert report.exit_code(strict=False) == 1


def test_audio_package_that_pulls_cuda13_libraries_is_named_through_the_toolkit(site, machine: MakeMachine, make_elf) -> None:
    site.cuda12()
    site.wheel("nvidia-cuda-runtime", "13.0.96", files={"nvidia/cu13/lib/libcudart.so.13": make_elf(soname="libcudart.so.13")})
    site.wheel("nvidia-npp", "13.0.1.2", files={"nvidia/cu13/lib/libnppc.so.13": make_elf(soname="libnppc.so.13")})
    site.wheel(
        "cuda-toolkit", "13.0.2", requires=["nvidia-cuda-runtime==13.0.96; extra == 'cudart'", "nvidia-npp==13.0.1.2; extra == 'npp'"]
    )
    site.wheel("torchcodec", "0.11.0", requires=["cuda-toolkit[cudart,npp]==13.*"])
    report = examine(site.environment, machine())
    found = row(report, "CUDA mixture: torchcodec")
    assert found.status is Status.FAIL
    assert "pulled in by torchcodec==0.11.0" in found.found
    assert "nvidia-cuda-runtime==13.0.96" in found.found
    removed = (report.mend or "").removeprefix("python -m pip uninstall -y ").split()
    assert removed[0] == "torchcodec"
    assert set(removed) == {"torchcodec", "cuda-toolkit", "nvidia-cuda-runtime", "nvidia-npp"}


def test_cudnn_and_nccl_written_over_by_the_other_cuda_are_written_back(site, machine: MakeMachine, make_elf) -> None:
    site.cuda12()
    site.wheel("nvidia-cudnn-cu13", "9.19.0.56", files={"nvidia/cudnn/lib/libcudnn.so.9": make_elf(soname="libcudnn.so.9", padding=99)})
    site.wheel("nvidia-nccl-cu13", "2.29.1", files={"nvidia/nccl/lib/libnccl.so.2": make_elf(soname="libnccl.so.2", padding=99)})
    site.wheel("speech-kit", "1.0", requires=["nvidia-cudnn-cu13>=9", "nvidia-nccl-cu13"])
    report = examine(site.environment, machine())
    found = row(report, "CUDA mixture: nvidia-cudnn-cu13")
    assert "written by both nvidia-cudnn-cu12 (CUDA 12) and nvidia-cudnn-cu13" in found.found
    assert "the file on disk is nvidia-cudnn-cu13's" in found.found
    assert "came with speech-kit" in found.found
    uninstall, reinstall = (report.mend or "").split(" && ")
    assert set(uninstall.removeprefix("python -m pip uninstall -y ").split()) == {"speech-kit", "nvidia-cudnn-cu13", "nvidia-nccl-cu13"}
    assert reinstall == "python -m pip install --force-reinstall --no-deps nvidia-cudnn-cu12==9.17.1.4 nvidia-nccl-cu12==2.28.9"


def test_extension_built_for_cuda12_in_a_cuda13_environment_is_named(site, make_elf) -> None:
    site.cuda13().wheel("deep-ep", "1.2.1+cu128", files={"deep_ep_cpp.cpython-312.so": make_elf(["libcudart.so.12", "libc10.so"])})
    (only,) = mixtures(site)
    assert only.severity == "fail"
    assert only.subject == "deep-ep"
    assert "built for CUDA 12, the environment is CUDA 13" in only.detail


def test_extension_is_named_by_its_tag_when_its_libraries_link_to_nothing(site) -> None:
    site.cuda12().wheel("kv-transfer-cu13", "1.5.1").wheel("flash-kernels", "3.0.0+cu130torch2.11")
    assert [(m.subject, m.severity) for m in mixtures(site)] == [("flash-kernels", "fail"), ("kv-transfer-cu13", "fail")]


def test_libraries_left_over_after_an_upgrade_warn(site, machine: MakeMachine, make_elf) -> None:
    site.cuda13().wheel("nvidia-cublas-cu12", "12.8.4.1", files={"nvidia/cublas/lib/libcublas.so.12": make_elf(soname="libcublas.so.12")})
    report = examine(site.environment, machine())
    found = row(report, "CUDA mixture: nvidia-cublas-cu12")
    assert found.status is Status.WARN
    assert "left over" in found.found
    assert report.mend == "python -m pip uninstall -y nvidia-cublas-cu12"
    assert (report.exit_code(strict=False), report.exit_code(strict=True)) == (0, 1)


def test_libraries_installed_by_hand_fail(site, make_elf) -> None:
    site.cuda12().wheel("nvidia-cublas", "13.1.0.3", requested=True, files={"nvidia/cu13/lib/libcublas.so.13": make_elf()})
    (only,) = mixtures(site)
    assert (only.severity, only.because) == ("fail", "installed by name; no installed package requires it")


def test_a_library_file_that_nobody_owns_is_named_with_its_path(site, make_elf) -> None:
    stray = site.cuda12().root / "nvidia" / "cu13" / "lib" / "libcudart.so.13"
    stray.parent.mkdir(parents=True)
    stray.write_bytes(make_elf(soname="libcudart.so.13"))
    (only,) = mixtures(site)
    assert only.severity == "warn"
    assert only.delete == (str(stray),)


def test_the_profiler_library_that_triton_ships_is_no_mixture(site, make_elf) -> None:
    site.cuda13().wheel("triton-kernels", "3.6", files={"triton/backends/nvidia/lib/cupti/libcupti.so.12": make_elf()})
    assert mixtures(site) == []


def test_a_private_renamed_runtime_is_only_noted(site, make_elf) -> None:
    files = {"sound/core.so": make_elf(["libcudart-9335f6a2.so.13.0.96"]), "sound.libs/libcudart-9335f6a2.so.13.0.96": make_elf()}
    site.cuda12().wheel("sound", "0.1", files=files)
    (only,) = mixtures(site)
    assert only.severity == "note"
    assert "private copy" in only.because


def test_torch_replaced_halfway_is_named(site, machine: MakeMachine) -> None:
    site.cuda12()
    (site.root / "torch" / "version.py").write_text("__version__ = '2.11.0+cu130'\ncuda = '13.0'\nhip = None\n")
    report = examine(site.environment, machine())
    assert any("its files are a CUDA 13 build, its metadata names CUDA 12" in r.found for r in report.rows if r.status is Status.FAIL)
    assert "torch==2.11.0+cu130" in (report.mend or "")


def test_every_mixture_is_mended_by_one_command(site, machine: MakeMachine, make_elf) -> None:
    site.cuda12()
    site.wheel("nvidia-cudnn-cu13", "9.19", files={"nvidia/cudnn/lib/libcudnn.so.9": make_elf(padding=5)})
    site.wheel("torchaudio", "2.11.0", files={"torchaudio/lib/a.so": make_elf(["libcudart.so.13"])})
    report = examine(site.environment, machine())
    assert {r.fix for r in report.rows if r.subject.startswith("CUDA mixture")} == {report.mend}
    assert (report.mend or "").count("uninstall") == 1


def test_mending_uses_uv_where_there_is_no_pip(site, machine: MakeMachine) -> None:
    site.torch("2.11.0+cu129", "12.9").wheel("nvidia-cublas", "13.1.0.3")
    assert examine(site.environment, machine()).mend == "uv pip uninstall nvidia-cublas"


def test_cuda_libraries_beside_a_cpu_torch_are_only_noted(site, machine: MakeMachine, make_elf) -> None:
    site.cpu().wheel("nvidia-cublas-cu12", "12.8.4.1", files={"nvidia/cublas/lib/libcublas.so.12": make_elf()})
    report = examine(site.environment, machine(driver=NO_DRIVER, has_nvidia_hardware=False))
    assert report.exit_code(strict=True) == 0
    assert report.mend is None


def test_two_cuda_majors_without_torch_fail(site, machine: MakeMachine) -> None:
    site.engine_packages().wheel("nvidia-cublas-cu12", "12.9").wheel("nvidia-cublas", "13.1")
    report = examine(site.environment, machine())
    assert row(report, "torch").status is Status.FAIL
    assert "CUDA 12 and 13 libraries side by side" in row(report, "CUDA mixture: CUDA").found


@pytest.mark.parametrize(
    ("name", "major"),
    [
        ("libcudart.so.12", 12),
        ("libcublasLt.so.13", 13),
        ("libcufft.so.11", 12),
        ("libcufft.so.12", 13),
        ("libcusparse.so.12", None),
        ("libcusolver.so.12", 13),
        ("libcudnn.so.9", None),
        ("libnccl.so.2", None),
        ("libnvrtc-builtins.so.12.9", 12),
        ("libc.so.6", None),
    ],
)
def test_library_names_tell_their_cuda_only_where_they_are_unambiguous(name: str, major: int | None) -> None:
    assert library_major(name) == major


# Drivers and GPUs


def test_driver_too_old_for_the_wheels_fails_with_both_ways_out(site, machine: MakeMachine) -> None:
    old = Driver("575.57.08", (12, 9), (Gpu("NVIDIA H100", 81_559, 0, (9, 0)),), None)
    found = row(examine(site.cuda13().environment, machine(driver=old)), "driver")
    assert found.status is Status.FAIL
    assert found.needed == ">= 580 for CUDA 13.0"
    assert "580" in found.fix and "CUDA 12 build of torch" in found.fix


def test_older_driver_of_the_same_major_is_noted_and_runs(site, machine: MakeMachine) -> None:
    older = Driver("550.54.15", (12, 4), (Gpu("NVIDIA H100", 81_559, 0, (9, 0)),), None)
    report = examine(site.cuda12().environment, machine(driver=older))
    assert row(report, "driver").status is Status.NOTE
    assert report.exit_code(strict=True) == 0


def test_no_driver_warns_unless_no_gpu_is_expected(site, machine: MakeMachine) -> None:
    env, bare = site.cuda12().environment, machine(driver=NO_DRIVER, has_nvidia_hardware=False)
    assert row(examine(env, bare), "driver").status is Status.WARN
    report = examine(env, bare, expect_gpu=False)
    assert row(report, "driver").status is Status.NOTE
    assert report.exit_code(strict=True) == 0


def test_gpu_without_a_driver_fails(site, machine: MakeMachine) -> None:
    report = examine(site.cuda12().environment, machine(driver=NO_DRIVER, has_nvidia_hardware=True))
    assert row(report, "driver").status is Status.FAIL


def test_driver_and_library_mismatch_asks_for_a_restart(site, machine: MakeMachine) -> None:
    broken = Driver(None, None, (), "Failed to initialize NVML: Driver/library version mismatch")
    assert "restart" in row(examine(site.cuda12().environment, machine(driver=broken)), "driver").fix


@pytest.mark.parametrize(
    ("capability", "status"),
    [((7, 0), Status.FAIL), ((8, 0), Status.WARN), ((8, 9), Status.WARN), ((9, 0), Status.OK), ((10, 0), Status.OK), ((12, 0), Status.OK)],
)
def test_gpu_generation_is_judged_before_anything_is_loaded(site, machine: MakeMachine, capability, status: Status) -> None:
    driver = replace(machine().driver, gpus=(Gpu("GPU", 81_559, 0, capability),))
    assert row(examine(site.cuda12().environment, machine(driver=driver)), "GPU 0").status is status


def test_cpu_torch_on_a_gpu_machine_warns(site, machine: MakeMachine) -> None:
    assert row(examine(site.cpu().environment, machine()), "GPU 0").status is Status.WARN


# Toolkit, loader path, triton, packages, machine


@pytest.mark.parametrize(("version", "status"), [((12, 4), Status.WARN), ((12, 9), Status.OK), ((13, 0), Status.WARN)])
def test_toolkit_is_compared_with_torch(site, machine: MakeMachine, version, status: Status) -> None:
    report = examine(site.cuda12().environment, machine(toolkit=Toolkit(version, "/usr/local/cuda/bin/nvcc")))
    assert row(report, "toolkit").status is status


def test_loader_path_that_hides_the_wheels_libraries_warns(site, machine: MakeMachine) -> None:
    paths = ("/usr/lib/cuda/libcudart.so.12", "/usr/lib/cuda/libnccl.so.2")
    found = row(examine(site.cuda12().environment, machine(library_path=paths)), "LD_LIBRARY_PATH")
    assert found.status is Status.WARN
    assert "libnccl.so.2" in found.found and "libcudart.so.12" not in found.found


def test_triton_of_another_torch_fails(site, machine: MakeMachine) -> None:
    site.torch("2.11.0+cu129", "12.9", ["triton==3.6.0; platform_system == 'Linux'"]).wheel("triton", "3.8.0")
    found = row(examine(site.environment, machine()), "triton")
    assert found.status is Status.FAIL
    assert found.fix == 'pip install --no-deps "triton==3.6.0"'


def test_missing_engine_package_fails_and_missing_server_package_warns(site, machine: MakeMachine) -> None:
    report = examine(site.torch("2.13.0+cpu", None).wheel("numpy", "1.26.4").environment, machine())
    assert row(report, "engine packages").status is Status.FAIL
    assert "numpy 1.26.4" in row(report, "engine packages").found
    assert row(report, "server packages").status is Status.WARN
    assert '"deepseek-recipe==0.2.0"' in row(report, "server packages").fix


def test_old_torch_and_untried_python_fail(site, machine: MakeMachine) -> None:
    report = examine(site.torch("2.9.1+cpu", None).environment, machine(python=(3, 13, 0)))
    assert row(report, "torch").status is Status.FAIL
    assert row(report, "python").status is Status.FAIL


def test_same_package_recorded_twice_warns(site, machine: MakeMachine) -> None:
    site.cpu().wheel("numpy", "2.1.0")
    assert "2.1.0" in row(examine(site.environment, machine()), "numpy").found


def test_scarce_machine_warns_by_name(site, machine: MakeMachine) -> None:
    scarce = machine(
        memory_available=1 << 30, memlock_bytes=8 << 20, disk_free=1 << 30, cache_problem="/x is not writable", port_problem="taken"
    )
    report = examine(site.cuda12().environment, scarce)
    warned = {r.subject for r in report.rows if r.status is Status.WARN}
    assert warned == {"host memory", "lockable memory", "disk", "kernel cache", "port"}
    assert all(r.fix for r in report.rows if r.status is Status.WARN)


@pytest.mark.parametrize(
    ("facts", "words"),
    [({"c_compiler": None}, "no C compiler"), ({"has_python_headers": False}, "no Python.h")],
    ids=["compiler", "headers"],
)
def test_what_triton_compiles_with_is_asked_for_only_in_a_cuda_environment(site, machine: MakeMachine, facts, words: str) -> None:
    found = row(examine(site.cuda13().environment, machine(**facts)), "C compiler")
    assert (found.status, found.found) == (Status.WARN, words)


def test_cpu_environment_needs_no_compiler(site, machine: MakeMachine) -> None:
    report = examine(site.cpu().environment, machine(c_compiler=None, driver=NO_DRIVER, has_nvidia_hardware=False))
    assert "C compiler" not in {r.subject for r in report.rows}


def test_image_is_judged_by_what_is_installed_and_not_by_the_builder(site, machine: MakeMachine, make_elf) -> None:
    builder = machine(driver=NO_DRIVER, memory_available=1, disk_free=1, port_problem="taken", toolkit=Toolkit((11, 8), "nvcc"))
    site.cuda12()
    assert examine(site.environment, builder, installed_only=True).exit_code(strict=True) == 0
    site.wheel("torchaudio", "2.11.0", files={"torchaudio/lib/a.so": make_elf(["libcudart.so.13"])})
    assert examine(site.environment, builder, installed_only=True).exit_code(strict=True) == 1


def test_packages_that_nothing_here_uses_are_said_to_be_idle(site, machine: MakeMachine) -> None:
    made = site.cuda13().wheel("xgrammar", "0.1.25").wheel("opentelemetry-sdk", "1.45.2")
    found = row(examine(made.environment, machine()), "optional packages")
    expected = "triton 3.6.0 (GPU kernels), opentelemetry-sdk 1.45.2 (traces of requests); not used by this version: xgrammar 0.1.25"
    assert found.found == expected
