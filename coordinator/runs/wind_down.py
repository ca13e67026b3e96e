"""Wind-down and reuse of runs: delete, extend, fork, compare.

Each method that changes something describes its effect; only if `yes` is set it makes the change
and adds a line to the record.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from coordinator.database import datasets, evaluations, record, runs, tasks, versions
from coordinator.plan import privacy
from coordinator.platform import PlatformService
from coordinator.rules import run_file
from coordinator.rules.run_file import StopSettings
from coordinator.runs.definition import definition
from coordinator.runs.run_ends import why_end
from shared.errors import BadRequest, Conflict, NotFound
from shared.text import counted, size

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from sqlalchemy import Connection

    from coordinator.database.runs import RunRow

# form in which a run file names a version
VERSION = re.compile(r"(?P<run>[^\s@/]+)@(?P<version>[0-9]{1,9})")


class Deed(msgspec.Struct, frozen=True, kw_only=True):
    """Sentences on the effect of a command; `done` is False if the effect was only previewed."""

    says: tuple[str, ...]
    done: bool


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One key in which two runs differ."""

    key: str
    first: str
    second: str


class WindDown(PlatformService):
    """Deletes, extends, forks and compares runs, and deletes datasets."""

    async def _do(self, work: Callable[[Connection], tuple[str, ...]], yes: bool) -> Deed:
        """Make a change in one transaction, which is undone unless `yes` is set."""
        sentences: list[str] = []

        def once(conn: Connection) -> None:
            sentences[:] = work(conn)
            if not yes:
                raise _OnlyAsked

        try:
            await self._db.write(once)
        except _OnlyAsked:
            return Deed(says=tuple(sentences), done=False)
        for topic in ("runs", "queue"):
            self._signals.notify(topic)
        return Deed(says=tuple(sentences), done=True)

    def _note(
        self, conn: Connection, action: str, name: str, detail: str | Mapping[str, object]
    ) -> None:
        record.append(conn, "organiser", action, name, detail, self._clock.now())

    async def delete_run(self, name: str, *, yes: bool) -> Deed:
        """Delete a draft, or the files of a run that has ended; credits and record stay. Raises
        Conflict for a run that has not ended.
        """

        def delete(conn: Connection) -> tuple[str, ...]:
            run = runs.by_id(conn, runs.by_name(conn, name).id, lock=True)
            if run.state in runs.OPEN:
                raise Conflict(
                    f'"{name}" is {run.state}: `coordinator run stop {name} --yes` ends it'
                )
            self._note(conn, "run.delete", name, {"state": run.state, "head": run.head})
            if run.state == "draft":
                runs.remove(conn, run.id)
                return (f'the draft "{name}" goes',)
            stranded = [
                f'the draft "{draft.name}" begins from it and can start no more'
                for draft in runs.every(conn, ("draft",))
                if definition(draft).file.train.init_from.startswith(f"{name}@")
            ]
            bytes_ = versions.bytes_kept(conn, run.id)
            evaluations.prune_all(conn, run.id)
            runs.set_values(conn, run.id, state="deleted", name=f"{name}~{run.id}", dataset_id=None)
            return (
                f'the files of all {run.head + 1} versions of "{name}" go, about {size(bytes_)}',
                "the run is no longer listed, and its name is free",
                *stranded,
                "credits, receipts and the record stay",
            )

        return await self._do(delete, yes)

    async def delete_dataset(self, name: str, *, yes: bool) -> Deed:
        """Delete a dataset that no run needs. Raises Conflict for a dataset in use."""

        def delete(conn: Connection) -> tuple[str, ...]:
            row = datasets.by_name(conn, name)
            if users := runs.users_of(conn, row.id, name):
                raise Conflict(f'"{name}" is the dataset of {", ".join(users)}: delete those first')
            self._note(conn, "dataset.delete", name, {"manifest": row.manifest_sha256})
            datasets.remove(conn, row.id)
            return (f'the dataset "{name}" goes, with every blob that no other needs',)

        return await self._do(delete, yes)

    async def extend(self, name: str, stop: StopSettings, *, yes: bool) -> Deed:
        """Move the end of a run; a completed run continues. Raises Conflict for a failed run,
        BadRequest for an end that is not given or already reached.
        """

        def move(conn: Connection) -> tuple[str, ...]:
            now = self._clock.now()
            run = runs.by_id(conn, runs.by_name(conn, name).id, lock=True)
            if run.state == "failed":
                raise Conflict(f'"{name}" failed: `coordinator run fork` begins from a version')
            file = definition(run).file
            changed = {key: value for key, value in msgspec.structs.asdict(stop).items() if value}
            if not changed:
                raise BadRequest("say what to extend to: --versions, --passes, --tokens or --date")
            later = msgspec.structs.replace(file.stop, **changed)
            run_file.check_stop(later, now)
            run_file.check_passes(file.data, later)
            text = run_file.encode(msgspec.structs.replace(file, stop=later))
            moved = msgspec.structs.replace(run, file=text)
            if reason := why_end(conn, moved, now):
                raise BadRequest(f'"{name}" would end at once: {reason}')
            runs.set_values(conn, run.id, file=text)
            says = [f'"{name}" ends at {_in_words(later)} instead of {_in_words(file.stop)}']
            if run.state == "completed":
                runs.move(conn, run, "running", runs.StateChange(at=now), ended_at=None)
                count = tasks.reopen_run(conn, run.id)
                says.append(
                    f"it runs again from version {run.head}, {counted(count, 'cancelled task')} too"
                )
            self._note(conn, "run.extend", name, changed)
            return tuple(says)

        return await self._do(move, yes)

    async def fork(self, source: str, name: str, *, yes: bool) -> Deed:
        """Make a draft with the run file of a run; the draft begins from a version of that run.
        Raises BadRequest for an invalid source or name, NotFound for an unknown or pruned version.
        """
        match = VERSION.fullmatch(source)
        if match is None:
            raise BadRequest(f'--from must look like RUN@40, not "{source}"')
        if not run_file.fits_a_path(name):
            raise BadRequest(f"the name of a run must be {run_file.NAME_RULE}")

        def copy(conn: Connection) -> tuple[str, ...]:
            run = runs.by_name(conn, match["run"])
            kept_version(conn, run, int(match["version"]))
            file = definition(run).file
            train = msgspec.structs.replace(file.train, init_from=source)
            file = msgspec.structs.replace(file, name=name, train=train)
            values = msgspec.structs.asdict(run) | {
                "name": name,
                "state": "draft",
                "file": run_file.encode(file),
                "created_at": self._clock.now(),
                **runs.UNSTARTED,
            }
            del values["id"]
            runs.add(conn, values)
            self._note(conn, "run.fork", name, {"from": source})
            return (
                f'the draft "{name}" begins from version {match["version"]} of "{run.name}", with '
                "its run file; optimizers begin from zero",
                *_new_budget(conn, run),
                f"next: `coordinator run start {name}`",
            )

        return await self._do(copy, yes)

    async def diff(self, first: str, second: str) -> tuple[Difference, ...]:
        """Return the differences of two runs: keys of their files, and their progress."""

        def read(conn: Connection) -> tuple[Difference, ...]:
            facts = [_facts(conn, runs.by_name(conn, name)) for name in (first, second)]
            keys = sorted(facts[0].keys() | facts[1].keys())
            pairs = [(key, facts[0].get(key, ""), facts[1].get(key, "")) for key in keys]
            return tuple(Difference(key=k, first=a, second=b) for k, a, b in pairs if a != b)

        return await self._db.read(read)


def _new_budget(conn: Connection, run: RunRow) -> tuple[str, ...]:
    """Return the warning about the budget of a fork of a private run."""
    spent = privacy.privacy_spent(definition(run).file.privacy, versions.count_merges(conn, run.id))
    if spent is None:
        return ()
    return (
        "its [privacy] budget begins anew, and protects each member less: over the same data the "
        f'epsilon of both runs adds up. "{run.name}": {spent.text}',
    )


class _OnlyAsked(Exception):
    """Raised to undo a transaction that was only a preview."""


def kept_version(conn: Connection, run: RunRow, version: int) -> str:
    """Return the blob of a version's weights. Raises NotFound for an unknown version, or if its
    weights were pruned.
    """
    if not 0 <= version <= run.head:
        raise NotFound(f'"{run.name}" has no version {version}: its newest is {run.head}')
    if evaluations.evaluation(conn, run.id, version).pruned:
        raise NotFound(
            f'the files of version {version} of "{run.name}" were pruned; kept: see `coordinator '
            f"run show {run.name}`"
        )
    return versions.get(conn, run.id, version).master_sha256


_ENDS = {
    "versions": "version {:,}",
    "passes": "pass {:,}",
    "tokens": "{:,} tokens",
    "date": "{}",
    "loss": "loss {:g}",
}


def _in_words(stop: StopSettings) -> str:
    conditions = {key: value for key, value in msgspec.structs.asdict(stop).items() if value}
    phrases = [_ENDS[key].format(value) for key, value in conditions.items()]
    return ", ".join(phrases) or "the organiser's word"


def _facts(conn: Connection, run: RunRow) -> dict[str, str]:
    facts = dict(_flat("", msgspec.to_builtins(definition(run).file)))
    del facts["name"]
    loss = evaluations.newest_loss(conn, run.id)
    head = "" if run.head < 0 else str(run.head)
    facts |= {"(version)": head, "(tokens)": str(run.tokens), "(state)": run.state}
    return facts | {"(loss)": "" if loss is None else f"{loss:.4f}"}


def _flat(path: str, value: object) -> list[tuple[str, str]]:
    """Return every key of nested tables with its value as text."""
    if not isinstance(value, dict):
        return [(path, str(value))]
    prefix = f"{path}." if path else ""
    return [pair for key, child in value.items() for pair in _flat(f"{prefix}{key}", child)]
