"""Memory of a device: bytes for a task, exhaustion, peak; a lost device. No torch is imported."""

from __future__ import annotations

import contextlib
import ctypes
import re
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import psutil

from shared.errors import TooLarge
from shared.protocol.accounts import Device
from shared.units import GIB

LOOK_S = 0.004
_REFUSED = re.compile(r"allocate ([\d.]+) (bytes|[KMGT]iB)", re.IGNORECASE)
_UNITS = {"bytes": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}


class OutOfMemory(TooLarge, MemoryError):
    """Raised when a task does not fit its device's memory even at the smallest micro-batch.

    `needed_bytes` is the memory in use plus the failed allocation, as far as that is known.
    """

    def __init__(self, message: str, needed_bytes: int = 0) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes


def out_of_memory(error: BaseException) -> bool:
    """Return True if the device's memory was exhausted; every backend has an error of its own."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    text = str(error).lower()
    phrases = ("out of memory", "can't allocate memory", "not enough memory")
    return isinstance(error, RuntimeError) and any(phrase in text for phrase in phrases)


def refused_bytes(error: BaseException) -> int:
    """Return the bytes of a failed allocation; 0 if the error does not say."""
    match = _REFUSED.search(str(error))
    return int(float(match[1]) * _UNITS[match[2].lower()]) if match else 0


def device_lost(error: BaseException) -> bool:
    """Return True if the device was lost, for example unplugged."""
    text = str(error).lower()
    phrases = (
        "no cuda-capable device",
        "no hip gpus",
        "device is lost",
        "device lost",
        "gpu is lost",
        "fell off the bus",
        "device has been removed",
        "driver shutting down",
    )
    return isinstance(error, RuntimeError) and any(phrase in text for phrase in phrases)


def synchronize(device: str) -> float:
    """Wait until a device has finished its queue; return the seconds waited."""
    torch = sys.modules.get("torch")
    kind = device.partition(":")[0]
    began = time.perf_counter()
    if torch is None or kind == "cpu":
        return 0.0
    if kind == "mps":
        torch.mps.synchronize()
    else:
        getattr(torch, kind).synchronize(device)
    return time.perf_counter() - began


class PeakMemory:
    """Peak memory of a device from now until `close`, above its present use.

    Torch records the peak of a GPU. A thread samples the processor's memory every few milliseconds,
    because a confined process may not reset the kernel's own peak.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._counter = _allocator(device)
        self._closed = threading.Event()
        self._before = self._high = 0
        if self._counter is not None:
            self._counter.init()
            self._counter.reset_peak_memory_stats(device)
            self._before = self._counter.memory_allocated(device)
        elif device == "cpu":
            _trim()
            self._process = psutil.Process()
            self._before = self._high = self._process.memory_info().rss
            threading.Thread(target=self._sample, name="peak memory", daemon=True).start()

    def peak_bytes(self) -> int:
        """Return the peak in bytes; 0 if the device has no counter."""
        if self._counter is not None:
            self._high = int(self._counter.max_memory_allocated(self._device))
        return max(0, self._high - self._before)

    def close(self) -> None:
        """Stop the measurement."""
        self._closed.set()

    def _sample(self) -> None:
        while not self._closed.wait(LOOK_S):
            self._high = max(self._high, self._process.memory_info().rss)


def _trim() -> None:
    """Return freed memory to the system, if its C library can, so that a peak counts its next
    use.
    """
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError, OSError):
            ctypes.CDLL(None).malloc_trim(0)


def _allocator(device: str) -> Any:
    """Return the module of torch that counts a device's memory, such as `torch.cuda`; None without
    such a module.
    """
    kind, torch = device.partition(":")[0], sys.modules.get("torch")
    return getattr(torch, kind) if torch is not None and kind in ("cuda", "xpu") else None


def usable_bytes(device: Device, memory_gb: float) -> int:
    """Return the memory of a device that a task may use, in bytes; 0 is unknown.

    The default is half where the owner's programs share the memory, else nine tenths.
    """
    allowed = int(memory_gb * GIB)
    if allowed:
        return min(allowed, device.memory_bytes)
    return device.memory_bytes * (5 if device.kind in ("cpu", "mps") else 9) // 10


def usable_host_bytes(devices: Sequence[Device], lent: int, memory_gb: float) -> int:
    """Return the bytes of host memory that a task may use beside the memory of its device; 0 for an
    unknown host. `lent` is the number of processes that share the memory of the host.
    """
    host = next((device for device in devices if device.kind == "cpu"), None)
    return usable_bytes(host, memory_gb) // max(1, lent) if host is not None else 0
