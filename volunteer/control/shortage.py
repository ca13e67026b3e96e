"""Shortages of memory: models that ran out of a device's memory even with one sample at a time.
Such tasks are not claimed there until the run or the lent memory changes, or the shortage is too
old.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from shared.protocol.accounts import RunInfo
from shared.sentences import Sentence, figure
from shared.text import printable, size
from shared.units import HOUR_S
from volunteer.control.model_step import AGE_MAX_S, KEPT_MAX


class Shortage(msgspec.Struct, frozen=True, kw_only=True):
    """Task that ran out of the memory of a device."""

    run: str
    device: str
    model: str  # properties of the run's model, see `memory_properties`
    torch: str
    needed_bytes: int  # memory in use plus the failed allocation; 0: not known
    had_bytes: int  # memory available to a task; 0: not known
    fitted: bool  # tasks of this model ran there before, so other programs may be the cause
    at: float

    def stands(self, runs: Iterable[RunInfo], lent: Mapping[str, int], now: float) -> bool:
        """Return True while the run's model and the lent memory are unchanged and the failure is
        recent.
        """
        info = next((info for info in runs if info.name == self.run), None)
        changed = info is not None and memory_properties(info) != self.model
        more = lent.get(self.device, 0) > self.had_bytes > 0
        return not changed and not more and now - self.at < (HOUR_S if self.fitted else AGE_MAX_S)


def memory_properties(info: RunInfo | None) -> str:
    """Return as one text the properties of a run on which its need of memory depends; "" for
    None.
    """
    if info is None:
        return ""
    sizes = (info.parameters, info.memory_bytes, int(info.step_flops))
    return " ".join((info.workload, str(info.workload_version), *map(str, sizes)))


def with_shortage(shortages: Iterable[Shortage], new: Shortage) -> tuple[Shortage, ...]:
    """Return the shortages with `new`, which replaces the shortage of the same run and device."""
    rest = [
        shortage
        for shortage in shortages
        if (shortage.run, shortage.device) != (new.run, new.device)
    ]
    return (*rest, new)[-KEPT_MAX:]


def shortage_words(short: Shortage) -> Sentence:
    """Return the sentence about a model's need, the device's memory, and the next try."""
    run, capacity = printable(short.run, 64), figure(size(short.had_bytes))
    if short.needed_bytes > short.had_bytes:
        sentence = Sentence(
            'the run "{run}" needs more than {needed} of memory, and {device} has {had} for it',
            run=run,
            needed=figure(size(short.needed_bytes)),
            device=short.device,
            had=capacity,
        )
    else:
        sentence = Sentence(
            'the run "{run}" did not fit into the memory of {device}, {had}',
            run=run,
            device=short.device,
            had=capacity,
        )
    if short.fitted:
        return Sentence("{said}; it did fit before, so it is tried again in an hour", said=sentence)
    return Sentence(
        "{said}; it is tried again when its model, the setting memory_gb or torch has changed",
        said=sentence,
    )
