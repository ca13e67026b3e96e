"""Gradients of several stretches, perhaps of several versions, made into the one that a part hands
in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from shared.workloads.base import Result, Work
from volunteer.training.job import Report, Spent
from volunteer.training.local_task import LocalTask, Made, Place, TaskFiles

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """All of a part."""

    result: Result
    tensors: Mapping[str, torch.Tensor]
    spent: Spent
    base_version: int  # the oldest


class Summed:
    """Running sum of one part: the mean over the samples of its stretches, counters the newest."""

    def __init__(self) -> None:
        self._whole: Whole | None = None

    def add(
        self, result: Result, tensors: Mapping[str, torch.Tensor], spent: Spent, version: int
    ) -> None:
        """One stretch, computed on a version."""
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
        """Raises RuntimeError before the first stretch."""
        if self._whole is None:
            raise RuntimeError("nothing was trained yet")
        return self._whole


class StretchTask(LocalTask):
    """One stretch on the training thread; the last one of its part hands in."""

    def __init__(
        self,
        files: TaskFiles,
        place: Place,
        summed: Summed,
        *,
        ends_part: bool,
        tell: Callable[[Report], Report],
    ) -> None:
        """`tell` makes a report on the stretch one on its lease."""
        super().__init__(files)
        self._tell = tell
        self._place = place
        self._summed = summed
        self._ends_part = ends_part

    def told(self, report: Report) -> Report:
        return self._tell(report)

    def finish_stretch(self, work: Work, spent: Spent) -> Made | None:
        """Add what was trained; with the last stretch what is to be handed in."""
        result, tensors = work.result()
        self._summed.add(result, tensors, spent, self._files.manifest.version)
        if not self._ends_part:
            self._files.snapshot.unlink(missing_ok=True)
            return None
        whole = self._summed.whole
        return Made(
            result=whole.result,
            tensors=whole.tensors,
            spent=whole.spent,
            place=msgspec.structs.replace(self._place, base_version=whole.base_version),
        )
