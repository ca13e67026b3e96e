"""Looks up from a micro-batch, so that a pause need not wait for its end.

Autograd calls a function whenever it keeps a tensor for the way back, and again when it takes it
out: that is before and after each large product, in any model. The rest of a micro-batch is as it
was; a thousand looks a second take less than a hundredth of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

_EVERY_S = 0.02


class Lookout:
    """Context of a micro-batch on the CPU."""

    def __init__(self, look: Callable[[], None], parameters: Iterable[nn.Parameter]) -> None:
        self._look = look
        self._parameters = {_place(value) for value in parameters}
        self._kept: set[int] = set()
        self._at = self._looked_at = 0.0
        self.longest_s = 0.0  # between two looks of the last micro-batch
        self.kept_bytes = 0  # for the way back

    def __enter__(self) -> None:
        self._kept = set(self._parameters)
        self.longest_s, self.kept_bytes = 0.0, 0
        self._at = self._looked_at = perf_counter()
        self._hooks = saved_tensors_hooks(self._keep, self._up)
        self._hooks.__enter__()

    def __exit__(self, *raised: object) -> None:
        self._hooks.__exit__(*raised)
        self._kept.clear()
        self.longest_s = max(self.longest_s, perf_counter() - self._at)

    def _keep(self, value: Tensor) -> Tensor:
        place = _place(value)
        if place not in self._kept:
            self._kept.add(place)
            self.kept_bytes += value.untyped_storage().nbytes()
        return self._up(value)

    def _up(self, value: Tensor) -> Tensor:
        now = perf_counter()
        self.longest_s = max(self.longest_s, now - self._at)
        self._at = now
        if now - self._looked_at >= _EVERY_S:
            with torch.autocast("cpu", enabled=False):
                self._look()
            self._at = self._looked_at = perf_counter()
        return value


def _place(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()
