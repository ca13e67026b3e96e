"""Report of a demo: figures, samples, pictures, strength where versions play."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from coordinator.database import experience, runs, versions
from coordinator.experience.replay import ANCHOR, standing
from coordinator.runs.definition import definition
from coordinator.runs.version_files import read_weights
from shared.copying import copying
from shared.decoding import decode
from shared.protocol.accounts import RunInfo
from shared.protocol.versions import VersionInfo
from shared.workloads.games import Encounter, Games

GAMES = 40  # games of the last match


class ProcessTraffic(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes and tasks that one volunteer process reported at its end, and its complaint."""

    sent_bytes: int = 0
    received_bytes: int = 0
    tasks: int = 0
    complaint: str = ""  # reason why its last task failed


class Strength(msgspec.Struct, frozen=True, kw_only=True):
    """Result of games of the last version against version 0, from fixed openings."""

    version: int
    wins: int
    draws: int
    losses: int
    elo: float  # Elo above version 0
    error: float  # half of the 95 % interval
    matches: int  # matches that volunteers played and the coordinator checked
    game: str  # one of the games, in which the last version has the first stones

    @property
    def points(self) -> float:
        """Return the share of the points, where a draw is half a point."""
        return (self.wins + self.draws / 2) / max(1, self.wins + self.draws + self.losses)


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The summary."""

    workload: str
    run: str
    seconds: float
    versions: int
    loss_first: float | None
    loss_last: float | None
    sample_prompt: str
    sample_first: str
    sample_last: str
    tokens: int
    items: str  # unit of `tokens`
    measure: str  # what the loss measures
    accepted: int
    rejected: int
    credits: dict[str, float]
    ledger: str  # "balanced", or the first breach
    sent_bytes: int  # bytes that all volunteers sent
    received_bytes: int
    data_dir: str
    complaint: str = ""  # complaint of a volunteer, where no contribution came
    history: tuple[VersionInfo, ...] = ()
    strength: Strength | None = None  # strength of a workload that plays
    pictures: tuple[str, ...] = ()  # names of files in `data_dir`

    @property
    def improved(self) -> bool:
        """Return True if the last version beats the first: by games, otherwise by loss."""
        if self.strength is not None:
            return self.strength.wins > self.strength.losses
        return (
            self.loss_first is not None
            and self.loss_last is not None
            and self.loss_last < self.loss_first
        )


class DemoPictures(msgspec.Struct, frozen=True, kw_only=True):
    """Samples of the first and the last version, as PNG."""

    first: bytes
    last: bytes


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a report that come from the demo's processes, not from the coordinator."""

    workload: str
    prompt: str
    seconds: float
    data_dir: str


async def report(services: Any, name: str, said: Said, traffic: Sequence[ProcessTraffic]) -> Report:
    """Return the summary of a run whose volunteers have gone."""
    run: RunInfo = await services.runs.queries.info(name)
    leaders = await services.volunteers.leaderboard()
    decided = await services.runs.queries.decided(name)
    breaches = await services.ledger.check()
    measured = [row for row in await services.runs.queries.versions(name) if row.loss is not None]
    handed_in = decided.accepted + decided.rejected
    return copying(Report, said, run, decided)(
        run=name,
        versions=run.version,
        loss_first=measured[0].loss if measured else None,
        loss_last=measured[-1].loss if measured else None,
        sample_prompt=said.prompt,
        sample_first=measured[0].sample if measured else "",
        sample_last=measured[-1].sample if measured else "",
        credits={row.nickname: row.earned_micro / 1e6 for row in leaders},
        ledger=breaches[0] if breaches else "balanced",
        sent_bytes=sum(item.sent_bytes for item in traffic),
        received_bytes=sum(item.received_bytes for item in traffic),
        complaint="" if handed_in else next((t.complaint for t in traffic if t.complaint), ""),
        history=tuple(measured),
        strength=await strength(services, name),
    )


async def strength(services: Any, name: str) -> Strength | None:
    """Return the strength of a run's newest version; None where versions do not play, or there is
    one only.
    """
    run = await services.db.read(lambda conn: runs.by_name(conn, name))
    if not isinstance(definition(run).workload.experience, Games) or run.head == ANCHOR:
        return None
    first, last = [
        await services.db.read(lambda conn, n=number: versions.get(conn, run.id, n))
        for number in (ANCHOR, run.head)
    ]
    paths = [await services.blobs.local(row.published_sha256) for row in (last, first)]
    found = await asyncio.to_thread(_meet, run, paths)
    rows = await services.db.read(lambda conn: experience.matches_of(conn, run.id))
    own = copying(experience.MatchRow, found)(
        contribution_id=0,
        run_id=run.id,
        version=run.head,
        against=ANCHOR,
        at=0.0,
    )
    rating = standing([*rows, own]).ratings[run.head]
    return copying(Strength, found, rating)(
        version=run.head,
        matches=len(rows),
    )


def _meet(run: runs.RunRow, paths: Sequence[Path]) -> Encounter:
    """Play the last version against the first; called on a thread, because it runs the network."""
    import torch

    torch.set_num_threads(1)
    about = definition(run)
    played = about.workload.experience
    assert isinstance(played, Games)  # the caller has checked this
    last, first = (read_weights(path, about) for path in paths)
    return played.meet(about.file.model, about.file.task.options, (last, first), GAMES)


def traffic_of(path: Path) -> ProcessTraffic:
    """Return the traffic of a volunteer: from its `Stopped` event, or its last `Traffic`."""
    found, complaint = ProcessTraffic(), ""
    for line in path.read_bytes().splitlines():
        try:
            event = decode(line)
        except msgspec.DecodeError:
            continue
        if (event.get("type"), event.get("reason")) == ("Idle", "failing"):
            complaint = str(event["message"])
        if event.get("type") in ("Stopped", "Traffic"):
            found = ProcessTraffic(
                sent_bytes=event["sent_bytes"],
                received_bytes=event["received_bytes"],
                tasks=event.get("tasks", found.tasks),
            )
    return msgspec.structs.replace(found, complaint=complaint)


async def drawn(services: Any, found: Report) -> DemoPictures | None:
    """Return the pictures of the first and the last version, where the workload draws."""
    pictures = [version.picture.sha256 for version in found.history if version.picture]
    if not pictures:
        return None
    first, last = [(await services.blobs.local(pictures[at])).read_bytes() for at in (0, -1)]
    return DemoPictures(first=first, last=last)


def keep(pair: DemoPictures, directory: Path) -> tuple[str, ...]:
    """Write the pictures into the folder of the logs; return the names of their files."""
    files = {"first.png": pair.first, "last.png": pair.last}
    for name, data in files.items():
        (directory / name).write_bytes(data)
    return tuple(str(directory / name) for name in files)
