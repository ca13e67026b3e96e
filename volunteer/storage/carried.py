"""State carried from one task of a run to the next: inner optimiser state, and the codec's error
feedback.

Error feedback adds the residual of one update to the next. A residual belongs to its contribution:
kept if that was accepted, zeroed if its content was rejected, the previous one restored if it never
counted (stale, gone, superseded). Only one previous residual exists; if its contribution never
counted either, the residual is zeroed and the loss reported.
"""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import msgspec

from shared.errors import Configuration, InvalidFrame, StorageFull
from shared.proofs.signing import digest
from shared.protocol.base import Reason
from shared.protocol.contributions import Verdict
from shared.sentences import Sentence
from shared.tensors.frame import open_frame
from shared.tensors.spec import Schema
from volunteer.files import private_directory, read_record, write_record
from volunteer.storage.outbox import task_of
from volunteer.storage.tensor_files import load, store

if TYPE_CHECKING:
    import torch

    from shared.tensors.quantize import Residual

NOT_THE_CONTENT = {Reason.STALE, Reason.CANCELLED, Reason.MERGE_FAILED}


class InnerState:
    """State of an inner optimiser, with its file and the file's SHA-256 ("" until it is needed)."""

    __slots__ = ("path", "sha256", "tensors")

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], path: Path | None = None, sha256: str = ""
    ) -> None:
        self.tensors = tensors
        self.path = path
        self.sha256 = sha256


class Residue(msgspec.Struct, frozen=True, kw_only=True):
    """Results that the stored residuals belong to, and the steps at the base of the last one."""

    run: str
    name: str = ""  # result whose residual is `current`
    # Result before that; `previous` is its residual while it can be restored.
    before: str = ""
    global_step: int = 0


class Carried:
    """Carried state of one (run, device), on disk and partly in memory. Any thread may call it."""

    def __init__(self, root: Path, run: str, device: str) -> None:
        readable = re.sub(r"[^A-Za-z0-9]", "_", f"{run}-{device}")[:48]
        self._stem = root / f"{readable}-{digest(f'{run} {device}'.encode())[:8]}"
        self.run = run
        self.owner = self._stem.name  # owner of its files among the evidence
        self.optimizer = self._file("optimizer")
        self.current = self._file("residual")
        self.previous = self._file("previous")
        self.next = self._file("next")
        self.record = self._stem.with_name(f"{self._stem.name}.json")
        self._guard = threading.RLock()
        self._changed = False  # True if the residual changed after it was read for the next update
        self._lent: InnerState | None = None
        self._lent_step = 0
        self._stored_sha256 = ""  # of `optimizer`, if known

    @classmethod
    def borrowed(cls, folder: Path, run: str, device: str, state: Path | None) -> Carried:
        """Return another machine's state for an audit: a copy in a folder of its own."""
        made = cls(private_directory(folder), run, device)
        made.optimizer.unlink(missing_ok=True)
        if state is not None:
            shutil.copyfile(state, made.optimizer)
        return made

    # The inner optimiser's state.

    def lend(self, state: InnerState, global_step: int) -> None:
        """Lend the optimiser state to the next task before it is written."""
        with self._guard:
            self._lent, self._lent_step = state, global_step

    def inner(self) -> InnerState | None:
        """Return the optimiser state for the next task: the lent one, else the stored."""
        with self._guard:
            if self._lent is not None:
                return self._lent
            sha256 = self._stored_sha256
        tensors = load(self.optimizer)
        return None if tensors is None else InnerState(tensors, self.optimizer, sha256)

    def write_inner(self, state: InnerState) -> Path | None:
        """Write a state next to the stored one; return its file, None if the disk is full."""
        coming = self._file("coming")
        try:
            store(coming, state.tensors)
        except StorageFull:
            coming.unlink(missing_ok=True)
            return None
        return coming

    def keep_inner(self, state: InnerState | None) -> None:
        """Store a lent state, unless it was dropped or replaced; a failure keeps the stored one."""
        coming = self._file("coming")
        if state is None or self._lent is not state:
            coming.unlink(missing_ok=True)
            return
        if not coming.exists():
            self.write_inner(state)
        with self._guard:
            if self._lent is not state:  # the base was rolled back during the write
                coming.unlink(missing_ok=True)
            elif coming.exists():
                coming.replace(self.optimizer)
                self._stored_sha256 = state.sha256

    def end_lending(self, state: InnerState | None) -> None:
        """End the lending of a state that is stored, or never will be."""
        with self._guard:
            if self._lent is state:
                self._lent = None

    # The residual.

    def residual(self, schema: Schema, global_step: int) -> Residual:
        """Return the residual to add to the next update, on a base of `global_step` steps."""
        with self._guard:
            residue = self._residue()
            if residue is not None and global_step < residue.global_step:
                self.zero()
            self._changed = False
        try:
            return open_frame(self.current, schema)
        except (FileNotFoundError, InvalidFrame):
            return {}

    def advance(self, name: str, global_step: int = 0) -> None:
        """Record an encoded update and make its residual `next` the current one; `global_step` is
        its base's.
        """
        with self._guard:
            if self._changed:  # `next` was computed from a residual that is not current any more
                self.next.unlink(missing_ok=True)
                self.zero()
                return
            before = self._residue()
            if self.current.exists():
                self.current.replace(self.previous)
            else:
                self.previous.unlink(missing_ok=True)
            self.next.replace(self.current)
            self._note(name, before.name if before else "", global_step)

    @property
    def changed(self) -> bool:
        """Return True if the residual has changed since it was last read."""
        return self._changed

    def drop_if_behind(self, global_step: int) -> None:
        """Drop all state if the base has fewer steps than the last one: it was rolled back."""
        with self._guard:
            residue = self._residue()
            steps = max(
                residue.global_step if residue else 0,
                self._lent_step if self._lent is not None else 0,
            )
            if global_step < steps:
                self.forget()

    def forget(self) -> None:
        """Drop all state after a rollback of the base."""
        with self._guard:
            self.zero()
            self._lent, self._stored_sha256 = None, ""
            self.optimizer.unlink(missing_ok=True)

    def counted(self, task: int, name: str = "") -> None:
        """Drop the previous residual after an accepted result: no verdict restores it any more."""
        with self._guard:
            residue = self._residue()
            if residue is not None and self._named(residue, task, name) == [residue.name]:
                self.previous.unlink(missing_ok=True)

    def lost(self, task: int, name: str = "") -> bool:
        """Take back the residual of a result that never counted; without a name, of any result of
        the task.

        The previous residual is restored, or zeroed if it is missing. Return False if an earlier
        residual was lost that way. A result that a later update already builds on cannot be taken
        back.
        """
        with self._guard:
            residue = self._residue()
            mine = self._named(residue, task, name) if residue is not None else []
            if residue is None or not mine:
                return True
            if residue.before in mine:
                self.previous.unlink(missing_ok=True)
            if residue.name not in mine:
                return True
            self._changed = True
            if self.previous.exists():
                self.previous.replace(self.current)
                self._note(residue.before, "", residue.global_step)
                return True
            self.zero()
            return not residue.before

    def zero(self) -> None:
        with self._guard:
            self._changed = True
            for path in (self.current, self.previous, self.record):
                path.unlink(missing_ok=True)

    def _named(self, residue: Residue, task: int, name: str) -> list[str]:
        """Return the results of `task` (only `name`, if given) that have a stored residual."""
        known = [found for found in (residue.name, residue.before) if found]
        return [found for found in known if (found == name if name else task_of(found) == task)]

    def _note(self, name: str, before: str, global_step: int) -> None:
        residue = Residue(run=self.run, name=name, before=before, global_step=global_step)
        write_record(self.record, residue)

    def _residue(self) -> Residue | None:
        try:
            return read_record(self.record, Residue)
        except Configuration:  # damaged: the residual belongs to an unknown result
            self.zero()
            return None

    def _file(self, what: str) -> Path:
        return self._stem.with_name(f"{self._stem.name}.{what}.safetensors")


class Residuals:
    """Carried state of every run and device of this worker."""

    def __init__(self, root: Path, say: Callable[[str], None] = lambda sentence: None) -> None:
        self.root = private_directory(root)
        self._say = say
        self._in_use: WeakValueDictionary[tuple[str, str], Carried] = WeakValueDictionary()

    def of(self, run: str, device: str) -> Carried:
        """Return the state of one (run, device); all callers share one object."""
        carried = self._in_use.get((run, device))
        if carried is None:
            carried = self._in_use[run, device] = Carried(self.root, run, device)
        return carried

    def judged(self, verdict: Verdict, devices: tuple[str, ...], name: str = "") -> None:
        """Settle a contribution's residual by its verdict; `name` is the result."""
        if verdict.state in ("received", "checking"):
            return
        if verdict.state in ("accepted", "merged"):
            for device in devices:
                self.of(verdict.run, device).counted(verdict.task, name)
        elif verdict.state == "rejected" and verdict.reason not in NOT_THE_CONTENT:
            for device in devices:
                self.of(verdict.run, device).zero()
        else:
            self.lost(verdict.run, verdict.task, devices, name)

    def lost(self, run: str, task: int, devices: tuple[str, ...], name: str = "") -> None:
        """Take back the residual of a result that was replaced or is not wanted any more."""
        for device in devices:
            if not self.of(run, device).lost(task, name):
                self._say(
                    Sentence(
                        "the error feedback of {run} is dropped: neither the last update nor "
                        "the one "
                        "before it counted",
                        run=run,
                    )
                )

    def forget(self, run: str, devices: tuple[str, ...]) -> None:
        """Drop a run's state after a rollback."""
        for device in devices:
            self.of(run, device).forget()
