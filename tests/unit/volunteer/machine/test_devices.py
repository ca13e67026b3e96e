"""Devices: what torch sees held against what the drivers show, and speeds that mean something."""

from __future__ import annotations

import sys

import pytest

from shared.errors import Configuration
from shared.programs.machine_limits import cores
from shared.protocol.accounts import Device
from volunteer.machine.benchmark import BenchmarkCancelled, benchmark
from volunteer.machine.devices import (
    DriverGpu,
    TorchView,
    choose,
    default_threads,
    detect,
    hardware,
    match_devices,
)

NVIDIA = DriverGpu(vendor="nvidia", name="RTX 4090", memory_bytes=24 << 30, cuda=(12, 8))
AMD = DriverGpu(vendor="amd", name="AMD GPU", memory_bytes=16 << 30)
CUDA = Device(id="cuda:0", kind="cuda", name="RTX 4090", memory_bytes=24 << 30)
SMALL = Device(id="cuda:1", kind="cuda", name="GTX 1650", memory_bytes=4 << 30)


def view(build: str = "cpu", *devices: Device, problem: str = "") -> TorchView:
    return TorchView(version="2.13.0", build=build, devices=devices, problem=problem)


def problem(seen: TorchView, gpu: DriverGpu) -> str:
    broken = [device for device in match_devices(seen, (gpu,)) if not device.usable]
    assert len(broken) == 1
    assert broken[0].name == gpu.name
    return broken[0].problem


def test_a_machine_without_gpu_has_its_processor() -> None:
    found = match_devices(view(), ())
    assert [device.id for device in found] == ["cpu"]
    assert found[0].memory_bytes > 0


def test_a_working_gpu_comes_first_and_has_no_problem() -> None:
    seen = view("cuda 12.8", SMALL, CUDA)
    found = match_devices(seen, (NVIDIA, NVIDIA))
    assert [device.id for device in found] == ["cuda:0", "cuda:1", "cpu"]
    assert all(device.usable for device in found)


def test_a_gpu_that_torch_was_not_built_for_comes_with_the_command_that_mends_it() -> None:
    said = problem(view("cpu"), NVIDIA)
    command = f"{sys.executable} -m pip install --force-reinstall torch==2.13.0+cu126 --find-links "
    assert said.endswith(f": {command}https://download.pytorch.org/whl/cu126/torch/")


@pytest.mark.parametrize(
    ("cuda", "build"), [((13, 1), "/cu130/"), ((12, 9), "/cu126/"), ((12, 6), "/cu126/")]
)
def test_the_build_fits_the_driver(cuda: tuple[int, int], build: str) -> None:
    gpu = DriverGpu(vendor="nvidia", name="RTX 4090", memory_bytes=1, cuda=cuda)
    assert build in problem(view("cpu"), gpu)


def test_an_old_driver_is_named_instead_of_a_build_that_cannot_work() -> None:
    gpu = DriverGpu(vendor="nvidia", name="GTX 970", memory_bytes=1, cuda=(11, 4))
    said = problem(view("cpu"), gpu)
    assert "11.4" in said
    assert "update the NVIDIA driver" in said


def test_a_gpu_that_the_right_torch_does_not_see_says_why() -> None:
    assert "no CUDA-capable device" in problem(
        view("cuda 12.8", problem="no CUDA-capable device is detected"), NVIDIA
    )
    assert "CUDA_VISIBLE_DEVICES" in problem(view("cuda 12.8"), NVIDIA)


def test_only_the_missing_one_of_two_is_broken() -> None:
    found = match_devices(view("cuda 12.8", CUDA), (NVIDIA, NVIDIA))
    assert [(device.id, device.usable) for device in found] == [
        ("cuda:0", True),
        ("cpu", True),
        ("nvidia:1", False),
    ]


def test_an_amd_gpu_gets_the_rocm_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    assert "/rocm" in problem(view("cpu"), AMD)
    monkeypatch.setattr("sys.platform", "win32")
    assert "Linux only" in problem(view("cpu"), AMD)


def test_the_setting_chooses() -> None:
    devices = match_devices(view("cuda 12.8", CUDA, SMALL), (NVIDIA, NVIDIA, NVIDIA))

    def ids(setting: str) -> list[str]:
        return [device.id for device in choose(setting, devices)]

    assert ids("auto") == ["cuda:0"]
    assert ids("all") == ["cuda:0", "cuda:1"]
    assert ids("cpu") == ["cpu"]
    assert ids("cuda") == ["cuda:0"]
    assert ids("cuda:1, cpu, cuda:1") == ["cuda:1", "cpu"]
    with pytest.raises(Configuration, match="usable: cuda:0, cuda:1, cpu"):
        ids("cuda:7")
    with pytest.raises(Configuration, match="cannot be used"):
        ids("nvidia:2")
    with pytest.raises(Configuration, match="names no device"):
        ids(" , ")
    assert [device.id for device in choose("all", match_devices(view(), ()))] == ["cpu"]


def test_this_machine_can_be_described() -> None:
    assert "cpu" in {device.id for device in detect() if device.usable}
    machine = hardware()
    assert machine.cores == cores() >= 1
    assert 1 <= default_threads() <= machine.cores
    assert machine.memory_bytes > 0
    assert len(machine.hostname) <= 64


def test_a_benchmark_measures_and_tells() -> None:
    told: list[tuple[str, float]] = []
    measured = benchmark(
        "cpu", quick=True, report=lambda *said: told.append(said), stop=lambda: False, now=5.0
    )
    assert min(measured.fp32_flops, measured.bf16_flops, measured.step_flops) > 1e6
    assert (measured.device, measured.at) == ("cpu", 5.0)
    shares = [process for _, process in told]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_a_benchmark_can_be_cancelled() -> None:
    with pytest.raises(BenchmarkCancelled):
        benchmark("cpu", quick=True, report=lambda *said: None, stop=lambda: True)
