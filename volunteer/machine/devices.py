"""Devices of this machine as torch sees them, matched with the GPUs that the drivers report.

An unusable GPU is listed with its problem and, where one exists, the command that repairs it.
`torch_view` imports torch, so it runs on a training thread; everything else is quick.
"""

from __future__ import annotations

import importlib.metadata
import platform
import socket
import sys
from pathlib import Path
from typing import Literal

import msgspec

from shared.errors import Configuration
from shared.programs.installation import torch_line
from shared.programs.machine_limits import cores, memory_bytes, threads
from shared.protocol.accounts import Device, Hardware
from shared.sentences import Sentence

CPUINFO = Path("/proc/cpuinfo")
KFD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")
# Builds of torch for CUDA, newest first: (lowest CUDA version that the driver must support, name).
CUDA_BUILDS = (((13, 0), "cuda"), ((12, 6), "cuda126"))


class DriverGpu(msgspec.Struct, frozen=True, kw_only=True):
    """GPU as its driver reports it, without torch."""

    vendor: Literal["nvidia", "amd"]
    name: str
    memory_bytes: int
    cuda: tuple[int, int] = (0, 0)  # newest CUDA version that the driver supports


class TorchView(msgspec.Struct, frozen=True, kw_only=True):
    """Capabilities of the installed torch."""

    version: str
    build: str  # "cpu", "cuda 12.8", "rocm 6.4", "mps", "xpu"
    devices: tuple[Device, ...]  # accelerators only
    problem: str = ""


def default_threads() -> int:
    """Return the physical cores minus one: torch on all cores is slowed a lot by other programs."""
    return max(1, cores() - 1)


def hardware(devices: tuple[Device, ...] = ()) -> Hardware:
    """Return the hardware report for the coordinator."""
    try:
        torch_version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch_version = ""
    return Hardware(
        hostname=socket.gethostname()[:64],
        system=f"{platform.system()} {platform.release()} {platform.machine()}"[:64],
        cores=cores(),
        threads=threads(),
        memory_bytes=memory_bytes(),
        devices=devices,
        torch=torch_version[:32],
        python=platform.python_version(),
    )


def _nvidia() -> list[DriverGpu]:
    """Return the GPUs known to NVIDIA's library, which may be missing."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        newest = int(pynvml.nvmlSystemGetCudaDriverVersion_v2())
        gpus = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            name = pynvml.nvmlDeviceGetName(handle)
            gpus.append(
                DriverGpu(
                    vendor="nvidia",
                    name=name if isinstance(name, str) else name.decode(errors="replace"),
                    memory_bytes=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
                    cuda=(newest // 1000, newest % 1000 // 10),
                )
            )
        return gpus
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()


def _amd() -> list[DriverGpu]:
    gpus = []
    for node in sorted(KFD_NODES.glob("*")) if KFD_NODES.is_dir() else []:
        try:
            lines = (node / "properties").read_text(encoding="ascii").splitlines()
            properties = dict(line.split(maxsplit=1) for line in lines if " " in line)
            banks = [
                path.read_text(encoding="ascii") for path in node.glob("mem_banks/*/properties")
            ]
        except (OSError, ValueError):
            continue
        if int(properties.get("simd_count", "0")) == 0:
            continue  # a processor
        sizes = [
            int(line.split()[1])
            for bank in banks
            for line in bank.splitlines()
            if line.startswith("size_in_bytes")
        ]
        gpus.append(DriverGpu(vendor="amd", name="AMD GPU", memory_bytes=max(sizes, default=0)))
    return gpus


def torch_view() -> TorchView:
    """Return the accelerators that torch can use. Call it on a training thread: importing torch
    takes seconds.
    """
    import torch

    version = torch.__version__
    if torch.version.hip:
        build = f"rocm {torch.version.hip}"
    elif torch.version.cuda:
        build = f"cuda {torch.version.cuda}"
    else:
        build = "cpu"
    devices: list[Device] = []
    problem = ""
    try:
        if torch.cuda.is_available():
            kind: Literal["cuda", "rocm"] = "rocm" if torch.version.hip else "cuda"
            for index in range(torch.cuda.device_count()):
                properties = torch.cuda.get_device_properties(index)
                if kind == "cuda" and (properties.major, properties.minor) < _lowest_capability(
                    torch.cuda.get_arch_list()
                ):
                    problem = Sentence(
                        "it has no kernels for this card (sm_{major}{minor}): {command}",
                        major=properties.major,
                        minor=properties.minor,
                        command=torch_line("cuda126"),
                    )
                    continue
                devices.append(
                    Device(
                        id=f"cuda:{index}",
                        kind=kind,
                        name=properties.name,
                        memory_bytes=properties.total_memory,
                    )
                )
    except RuntimeError as error:  # outdated driver, or a GPU that was lost
        problem = str(error).splitlines()[0][:300]
    if torch.backends.mps.is_available():
        memory = memory_bytes()
        devices.append(Device(id="mps", kind="mps", name="Apple GPU", memory_bytes=memory))
    if torch.xpu.is_available():
        for index in range(torch.xpu.device_count()):
            intel = torch.xpu.get_device_properties(index)
            devices.append(
                Device(
                    id=f"xpu:{index}",
                    kind="xpu",
                    name=intel.name,
                    memory_bytes=intel.total_memory,
                )
            )
    return TorchView(version=version, build=build, devices=tuple(devices), problem=problem)


def _lowest_capability(architectures: list[str]) -> tuple[int, int]:
    """Return the lowest compute capability of kernels such as "sm_75" or "sm_120"."""
    numbers = [name.partition("_")[2].rstrip("abcdefgh") for name in architectures]
    return min(((int(n[:-1]), int(n[-1])) for n in numbers if n[1:].isdigit()), default=(0, 0))


def match_devices(view: TorchView, gpus: tuple[DriverGpu, ...]) -> tuple[Device, ...]:
    """Return the usable accelerators, those with most memory first, then the processor, then the
    unusable devices.
    """
    memory = memory_bytes()
    cpu = Device(id="cpu", kind="cpu", name=_processor(), memory_bytes=memory)
    usable = sorted(view.devices, key=lambda device: -device.memory_bytes)
    broken = []
    for vendor in ("nvidia", "amd"):
        vendor_gpus = [gpu for gpu in gpus if gpu.vendor == vendor]
        kind: Literal["cuda", "rocm"] = "cuda" if vendor == "nvidia" else "rocm"
        working = [device for device in usable if device.kind == kind]
        for index, gpu in enumerate(vendor_gpus[len(working) :]):
            broken.append(
                Device(
                    id=f"{vendor}:{len(working) + index}",
                    kind=kind,
                    name=gpu.name,
                    memory_bytes=gpu.memory_bytes,
                    usable=False,
                    problem=_remedy(view, gpu),
                )
            )
    return (*usable, cpu, *broken)


def _processor() -> str:
    try:
        for line in CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()[:80]
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine() or "processor"


def _remedy(view: TorchView, gpu: DriverGpu) -> str:
    if gpu.vendor == "amd":
        if sys.platform != "linux":
            return Sentence("torch supports AMD GPUs on Linux only")
        return _reinstall(view, "rocm")
    build = next((name for least, name in CUDA_BUILDS if gpu.cuda >= least), "")
    if not build:
        version = ".".join(map(str, gpu.cuda))
        return Sentence(
            "its driver supports CUDA {had}, torch needs 12.6: update the NVIDIA driver",
            had=version,
        )
    if view.build.startswith("cuda"):
        why = view.problem or Sentence(
            "it may be hidden by CUDA_VISIBLE_DEVICES or held by another program"
        )
        return Sentence("torch ({build}) does not see it: {why}", build=view.build, why=why)
    return _reinstall(view, build)


def _reinstall(view: TorchView, build: str) -> str:
    return Sentence(
        "the installed torch {version} is built for {build}: {command}",
        version=view.version,
        build=view.build,
        command=torch_line(build),
    )


def detect() -> tuple[Device, ...]:
    """Return all devices of this machine; call it on a training thread."""
    return match_devices(torch_view(), (*_nvidia(), *_amd()))


def rank_groups(devices: tuple[Device, ...]) -> tuple[tuple[Device, tuple[str, ...]], ...]:
    """Return the devices that take tasks, each with the ids of its further ranks. NVIDIA cards of
    the same name train together, as the ranks of the first card.
    """
    groups: dict[tuple[str, str], list[Device]] = {}
    for device in devices:
        key = ("cuda", device.name) if device.kind == "cuda" else ("", device.id)
        groups.setdefault(key, []).append(device)
    return tuple(
        (
            msgspec.structs.replace(
                first,
                name=f"{1 + len(more)} x {first.name}" if more else first.name,
                memory_bytes=min(twin.memory_bytes for twin in (first, *more)),
            ),
            tuple(twin.id for twin in more),
        )
        for first, *more in groups.values()
    )


def choose(setting: str, devices: tuple[Device, ...]) -> tuple[Device, ...]:
    """Return the devices that the setting `device` names. Raises Configuration."""
    usable = [device for device in devices if device.usable]
    if setting == "auto":
        return tuple(usable[:1])
    if setting == "all":
        gpus = tuple(device for device in usable if device.kind != "cpu")
        return gpus or tuple(usable[:1])
    by_id = {device.id: device for device in devices}
    selection = []
    for name in dict.fromkeys(part.strip() for part in setting.split(",") if part.strip()):
        device = by_id.get(name) or by_id.get(f"{name}:0")
        if device is None:
            have = ", ".join(device.id for device in usable)
            raise Configuration(
                Sentence('there is no device "{name}" here; usable: {have}', name=name, have=have)
            )
        if not device.usable:
            raise Configuration(
                Sentence(
                    "{name} cannot be used: {problem}", name=device.name, problem=device.problem
                )
            )
        selection.append(device)
    if not selection:
        raise Configuration(Sentence('the setting "device" names no device'))
    return tuple(selection)
