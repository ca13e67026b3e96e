"""Sum of the results of one part, which may be trained in stretches on several versions."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from shared.workloads.base import Result, Weights
from volunteer.training.job import Spent


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """Sum of the stretches of a part so far."""

    result: Result
    tensors: Weights
    spent: Spent
    base_version: int  # oldest of the stretches


class Summed:
    """Running sum of one part: tensors are averaged by samples, counters take the maximum."""

    def __init__(self) -> None:
        self._whole: Whole | None = None

    def add(self, result: Result, tensors: Weights, spent: Spent, version: int) -> None:
        """Add one stretch, computed on this version."""
        before = self._whole
        if before is None:
            self._whole = Whole(result=result, tensors=tensors, spent=spent, base_version=version)
            return
        samples = before.result.samples + result.samples
        share = result.samples / samples
        mixed = {
            name: value.lerp(tensors[name], share)
            if value.is_floating_point()
            else value.maximum(tensors[name])
            for name, value in before.tensors.items()
        }
        self._whole = Whole(
            result=msgspec.structs.replace(
                result,
                steps=before.result.steps + result.steps,
                samples=samples,
                loss_first=before.result.loss_first,
                loss_last=before.result.loss_last * (1 - share) + result.loss_last * share,
            ),
            tensors=mixed,
            spent=Spent(
                train_s=before.spent.train_s + spent.train_s,
                paused_s=before.spent.paused_s + spent.paused_s,
            ),
            base_version=min(before.base_version, version),
        )

    @property
    def whole(self) -> Whole:
        """Return the sum. Raises RuntimeError before the first stretch."""
        if self._whole is None:
            raise RuntimeError("nothing was trained yet")
        return self._whole
