"""What a worker carries from one task of a run to the next: inner optimiser state, and what its codec could not say.

Error feedback adds the residual of one update to the next. It belongs to its contribution: kept when that was accepted,
zeroed when its content was rejected, the one before it restored when it never counted (stale, gone, superseded).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from shared.errors import Configuration, InvalidFrame
from shared.protocol import Reason, Verdict
from shared.signing import digest
from shared.tensors.frame import open_frame
from shared.tensors.spec import Schema
from volunteer.files import private_directory, read_record, write_record

if TYPE_CHECKING:
    from shared.tensors.quantize import Residual

NOT_THE_CONTENT = {Reason.STALE, Reason.CANCELLED, Reason.MERGE_FAILED}


class Residue(msgspec.Struct, frozen=True, kw_only=True):
    """Which task the stored residual came from, and how far training had come at its base."""

    run: str
    task: int
    global_step: int = 0


class Carried:
    """The files of one (run, device)."""

    def __init__(self, root: Path, run: str, device: str) -> None:
        readable = re.sub(r"[^A-Za-z0-9]", "_", f"{run}-{device}")[:48]
        self._stem = root / f"{readable}-{digest(f'{run} {device}'.encode())[:8]}"
        self.run = run
        self.optimizer = self._file("optimizer")
        self.current = self._file("residual")
        self.previous = self._file("previous")
        self.next = self._file("next")
        self.record = self._stem.with_name(f"{self._stem.name}.json")

    def residual(self, schema: Schema) -> Residual:
        """The residual to add to the next update; empty when there is none that fits."""
        try:
            return open_frame(self.current, schema)
        except (FileNotFoundError, InvalidFrame):
            return {}

    def drop_if_behind(self, global_step: int) -> None:
        """A base with fewer steps than the last one was set back, also while nobody was here: nothing fits it any more."""
        try:
            residue = read_record(self.record, Residue)
        except Configuration:  # damaged: nobody knows what the residual is of
            self.zero()
            return
        if residue is not None and global_step < residue.global_step:
            self.forget()

    def forget(self) -> None:
        """The base was set back: nothing from before fits it."""
        self.zero()
        self.optimizer.unlink(missing_ok=True)

    def advance(self, task: int, global_step: int = 0) -> None:
        """The update of `task` was encoded, and `next` written with it; `global_step` is of its base."""
        if self.current.exists():
            self.current.replace(self.previous)
        else:
            self.previous.unlink(missing_ok=True)
        self.next.replace(self.current)
        write_record(self.record, Residue(run=self.run, task=task, global_step=global_step))

    def keep(self) -> None:
        self.previous.unlink(missing_ok=True)

    def zero(self) -> None:
        for path in (self.current, self.previous, self.record):
            path.unlink(missing_ok=True)

    def restore(self) -> None:
        """As if the last update had never been made."""
        if self.previous.exists():
            self.previous.replace(self.current)
        else:
            self.current.unlink(missing_ok=True)
        self.record.unlink(missing_ok=True)

    def _file(self, what: str) -> Path:
        return self._stem.with_name(f"{self._stem.name}.{what}.safetensors")


class Residuals:
    """All that is carried over, of every run and device of this worker."""

    def __init__(self, root: Path) -> None:
        self.root = private_directory(root)

    def of(self, run: str, device: str) -> Carried:
        return Carried(self.root, run, device)

    def judged(self, verdict: Verdict, devices: tuple[str, ...]) -> None:
        """Settle the residual of a contribution once its verdict is known."""
        if verdict.state in ("received", "checking"):
            return
        for carried, residue in self._stored(verdict.run, devices):
            if verdict.state in ("accepted", "merged"):
                if residue.task == verdict.task:
                    carried.keep()
            elif verdict.state == "rejected" and verdict.reason not in NOT_THE_CONTENT:
                carried.zero()  # whichever update it is in by now
            elif residue.task == verdict.task:
                carried.restore()

    def lost(self, run: str, task: int, devices: tuple[str, ...]) -> None:
        """A result that somebody else's overtook."""
        for carried, residue in self._stored(run, devices):
            if residue.task == task:
                carried.restore()

    def forget(self, run: str, devices: tuple[str, ...]) -> None:
        """The base was set back."""
        for device in devices:
            self.of(run, device).forget()

    def _stored(self, run: str, devices: tuple[str, ...]) -> list[tuple[Carried, Residue]]:
        found = []
        for device in devices:
            carried = self.of(run, device)
            try:
                residue = read_record(carried.record, Residue)
            except Configuration:
                carried.zero()
                continue
            if residue is not None:
                found.append((carried, residue))
        return found
