"""Memory of a device: telling that it ran out, and giving it back.

Torch is only touched if somebody has loaded it.
"""

from __future__ import annotations

import contextlib
import sys


def out_of_memory(error: BaseException) -> bool:
    """Return True if an error means that the device has too little memory; every backend says it in
    its own way.
    """
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    text = str(error).lower()
    phrases = ("out of memory", "can't allocate memory", "not enough memory")
    return isinstance(error, RuntimeError) and any(phrase in text for phrase in phrases)


def device_lost(error: BaseException) -> bool:
    """Return True if an error means that the device itself is gone, as when its cable is: no task
    will ever work on it.
    """
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


def release_device() -> None:
    """Give cached memory back to the system, on whatever torch has in use."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    for name, ready in (
        ("cuda", torch.cuda.is_initialized),
        ("xpu", torch.xpu.is_initialized),
        ("mps", torch.backends.mps.is_available),
    ):
        if ready():
            with contextlib.suppress(RuntimeError):
                getattr(torch, name).empty_cache()
