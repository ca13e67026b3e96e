"""Exclusion of long-lived objects from Python's garbage collections."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

SERVER_THRESHOLDS = (50_000, 10, 5)  # a full collection after 2.5 million new objects that stayed


def spare() -> None:
    """Exclude all present objects from later collections.

    Excluded objects live as long as the process. A full collection with PyTorch loaded stopped
    every thread for 150 ms; such collections took 8 % of a busy coordinator's time.
    """
    gc.freeze()


def settle() -> None:
    """Collect once, exclude the remaining objects, and make later collections rare: for a server's
    start.

    Each waiting claim is some forty objects. A server with 7,000 idle volunteers and Python's own
    thresholds spent 1.3 s in each full collection, and a heartbeat's p95 was 1.3 s; with these
    thresholds it is 6 ms.
    """
    gc.collect()
    spare()
    gc.set_threshold(*SERVER_THRESHOLDS)


@contextmanager
def spared() -> Iterator[None]:
    """Import or build long-lived objects without a collection, and exclude them from later ones.

    Imports leave little garbage, and each collection during them walks every object imported so
    far: a seventh of the time of importing PyTorch.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
        spare()
    finally:
        if collecting:
            gc.enable()
