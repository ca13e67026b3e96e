"""Report of a demo: figures, samples, pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from shared.decoding import MALFORMED, decode
from shared.protocol.accounts import RunInfo
from shared.protocol.versions import VersionInfo
from shared.workloads.declaration import Measure


class ProcessTraffic(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes and tasks that one volunteer process reported at its end, and its complaint."""

    sent_bytes: int = 0
    received_bytes: int = 0
    tasks: int = 0
    complaint: str = ""  # reason why its last task failed


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of a demo."""

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
    measure: Measure  # what the loss measures
    accepted: int
    rejected: int
    credits: dict[str, float]
    ledger: str  # "balanced", or the first breach
    sent_bytes: int  # bytes that all volunteers sent
    received_bytes: int
    data_dir: str
    complaint: str = ""  # complaint of a volunteer, where no contribution came
    history: tuple[VersionInfo, ...] = ()
    pictures: tuple[str, ...] = ()  # names of files in `data_dir`

    @property
    def improved(self) -> bool:
        """Return True if the last version has a lower loss than the first."""
        return (
            self.loss_first is not None
            and self.loss_last is not None
            and self.loss_last < self.loss_first
        )


class DemoPictures(msgspec.Struct, frozen=True, kw_only=True):
    """Samples of the first and the last version, as PNG."""

    first: bytes
    last: bytes


class ReportInputs(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a report that come from the demo's processes, not from the coordinator."""

    workload: str
    prompt: str
    seconds: float
    data_dir: str


async def report(
    services: Any, name: str, inputs: ReportInputs, traffic: Sequence[ProcessTraffic]
) -> Report:
    """Return the summary of a run whose volunteers have gone."""
    run: RunInfo = await services.runs.queries.info(name)
    leaders = await services.volunteers.leaderboard()
    decided = await services.runs.queries.decided(name)
    breaches = await services.ledger.check()
    measured = [row for row in await services.runs.queries.versions(name) if row.loss is not None]
    handed_in = decided.accepted + decided.rejected
    return Report(
        workload=inputs.workload,
        seconds=inputs.seconds,
        tokens=run.tokens,
        items=run.items,
        measure=run.measure,
        accepted=decided.accepted,
        rejected=decided.rejected,
        data_dir=inputs.data_dir,
        run=name,
        versions=run.version,
        loss_first=measured[0].loss if measured else None,
        loss_last=measured[-1].loss if measured else None,
        sample_prompt=inputs.prompt,
        sample_first=measured[0].sample if measured else "",
        sample_last=measured[-1].sample if measured else "",
        credits={row.nickname: row.earned_micro / 1e6 for row in leaders},
        ledger=breaches[0] if breaches else "balanced",
        sent_bytes=sum(item.sent_bytes for item in traffic),
        received_bytes=sum(item.received_bytes for item in traffic),
        complaint="" if handed_in else next((t.complaint for t in traffic if t.complaint), ""),
        history=tuple(measured),
    )


def traffic_of(path: Path) -> ProcessTraffic:
    """Return the traffic of a volunteer: from its `Stopped` event, or its last `Traffic`."""
    traffic, complaint = ProcessTraffic(), ""
    for line in path.read_bytes().splitlines():
        try:
            event = decode(line)
        except MALFORMED:
            continue
        if (event.get("type"), event.get("reason")) == ("Idle", "failing"):
            complaint = str(event["message"])
        if event.get("type") in ("Stopped", "Traffic"):
            traffic = ProcessTraffic(
                sent_bytes=event["sent_bytes"],
                received_bytes=event["received_bytes"],
                tasks=event.get("tasks", traffic.tasks),
            )
    return msgspec.structs.replace(traffic, complaint=complaint)


async def sample_pictures(services: Any, summary: Report) -> DemoPictures | None:
    """Return the pictures of the first and the last version, where the workload draws."""
    pictures = [version.picture.sha256 for version in summary.history if version.picture]
    if not pictures:
        return None
    first, last = [(await services.blobs.local(pictures[at])).read_bytes() for at in (0, -1)]
    return DemoPictures(first=first, last=last)


def save_pictures(pictures: DemoPictures, directory: Path) -> tuple[str, ...]:
    """Write the pictures into the folder of the logs; return the names of their files."""
    files = {"first.png": pictures.first, "last.png": pictures.last}
    for name, data in files.items():
        (directory / name).write_bytes(data)
    return tuple(str(directory / name) for name in files)
