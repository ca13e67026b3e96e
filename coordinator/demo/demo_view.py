"""Text of the demo: lines of progress, and the summary."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

from shared.programs.progress_line import ProgressLine
from shared.text import counted, measure_word, measured, printable, size, sparkline
from shared.workloads.data.image_files import read_png
from shared.workloads.data.resize import braille, corner
from shared.workloads.declaration import MEASURES

if TYPE_CHECKING:
    from coordinator.demo.demo_report import DemoPictures, Report
    from shared.protocol.accounts import RunInfo
    from shared.protocol.versions import VersionInfo

LINE_EVERY_S = 2.5
SAMPLE_CHARS = 360
PICTURE_CELLS = 37
TABLE_ROWS = 8


class DemoView:
    """Draws to standard output; with `json` progress goes to standard error."""

    def __init__(self, *, json: bool) -> None:
        self._json = json
        self._out = sys.stderr if json else sys.stdout
        self._printed_at = -LINE_EVERY_S

    def _print(self, text: str) -> None:
        print(text, file=self._out, flush=True)

    def note(self, text: str) -> None:
        """Print a remark during the demo."""
        self._print(f"  {text}")

    @contextmanager
    def stage(self, text: str) -> Iterator[None]:
        """Print one step of the preparation, and how long it took."""
        began = time.monotonic()
        self._print(f"… {text}")
        with ProgressLine(self._out):
            yield
        self._print(f"✓ {text} ({time.monotonic() - began:.1f} s)")

    def progress(self, elapsed_s: float, run: RunInfo, versions: Sequence[VersionInfo]) -> None:
        """Print a line about the run, at most one every LINE_EVERY_S."""
        if elapsed_s - self._printed_at >= LINE_EVERY_S:
            self._printed_at = elapsed_s
            self._print(status(elapsed_s, run, versions))

    def summary(self, report: Report, pictures: DemoPictures | None) -> None:
        if self._json:
            print(msgspec.json.encode(report).decode())
            return
        lines = summary(report)
        if pictures is not None:
            lines += ["", *side_by_side(report.versions, pictures), ""]
        elif report.sample_last:
            lines += samples(report)
        print("\n".join([*lines, *hints(report)]))


def status(elapsed_s: float, run: RunInfo, versions: Sequence[VersionInfo]) -> str:
    """Return the state of the run in one line."""
    losses = [version.loss for version in versions if version.loss is not None]
    now = [measured(row, run.measure) for row in losses[:1] + losses[-1:]]
    loss = f"{measure_word(run.measure)} {' -> '.join(now) or 'not measured yet'}"
    return (
        f"  {elapsed_s:4.0f} s  version {run.version:3d}  {loss}  "
        f"{counted(run.workers, 'volunteer')} at work  "
        + (run.standstill.message if run.standstill else run.merging)
    )


def _quoted(text: str) -> list[str]:
    excerpt = text[:SAMPLE_CHARS].rstrip()
    return [f"    │ {line}" for line in (excerpt.splitlines() or ["(empty)"])[:12]]


def summary(report: Report) -> list[str]:
    """Return the summary of a demo, as lines."""
    merged = f"{counted(report.versions, 'version')} merged in {report.seconds:.0f} s"
    lines = ["", f"  {report.run}: {merged}", ""]
    if report.loss_first is not None and report.loss_last is not None:
        first, last = (measured(x, report.measure) for x in (report.loss_first, report.loss_last))
        lines.append(
            f"  {MEASURES[report.measure]:<16} {first} -> {last}  (measured by the coordinator)"
        )
        lines.append(
            "                   "
            f"{sparkline([v.loss for v in report.history if v.loss is not None])}"
        )
    if any("elo" in version.metrics for version in report.history):
        lines += ["", *table(report.history), ""]
    else:
        lines += [
            f"  {name.replace('_', ' '):<16} {first:.3f} -> {last:.3f}"
            for name, first, last in metric_changes(report)
        ]
    lines.append(f"  trained          {report.tokens:,} {report.items}")
    lines.append(f"  contributions    {report.accepted} accepted, {report.rejected} rejected")
    lines.append(
        f"  traffic          {size(report.sent_bytes)} sent, {size(report.received_bytes)} "
        "received by the volunteers"
    )
    for nickname, earned in report.credits.items():
        lines.append(f"  credits          {nickname}: {earned:,.1f}")
    lines.append(f"  ledger           {report.ledger}")
    return lines


def table(history: Sequence[VersionInfo]) -> list[str]:
    """Return a table of rating and other figures for some versions, with the first and the last."""
    count = min(len(history), TABLE_ROWS)
    rows = [history[index * (len(history) - 1) // max(1, count - 1)] for index in range(count)]
    metrics = dict.fromkeys(name for row in rows for name in row.metrics)
    names = [name for name in metrics if name not in ("loss", "elo", "elo_error")]
    if not names:
        return []
    heads = [name.replace("_", " ").replace(f"{names[0]} ", "") for name in names]
    lines = ["  version          Elo  " + "".join(f"{head:>9}" for head in heads)]
    for row in rows:
        elo, error = row.metrics.get("elo"), row.metrics.get("elo_error", 0.0)
        rated = "" if elo is None else f"{elo:+.0f} ± {error:.0f}"
        shares = (f"{100 * row.metrics[n]:7.0f} %" if n in row.metrics else "" for n in names)
        lines.append(
            f"  {row.version:7d} {rated:>13} " + "".join(f"{share:>9}" for share in shares)
        )
    return lines


def metric_changes(report: Report) -> list[tuple[str, float, float]]:
    """Return the other figures in which the first and the last measured version differ."""
    if not report.history:
        return []
    first, last = report.history[0].metrics, report.history[-1].metrics
    return [
        (name, first[name], last[name])
        for name in first
        if name != "loss" and name in last and first[name] != last[name]
    ]


def samples(report: Report) -> list[str]:
    """Return the texts of the first and the last version."""
    verb = f"continues “{report.sample_prompt}”:" if report.sample_prompt else "gives:"
    lines = ["", f"  version 0 {verb}", *_quoted(report.sample_first)]
    return [*lines, "", f"  version {report.versions} {verb}", *_quoted(report.sample_last), ""]


def side_by_side(version: int, pictures: DemoPictures) -> list[str]:
    """Return parts of both pictures side by side, in dots."""
    sides = [
        braille(corner(read_png(data)), PICTURE_CELLS) for data in (pictures.first, pictures.last)
    ]
    titles = f"  {'version 0':<{PICTURE_CELLS}}  version {version}"
    return [titles, *(f"  {left}  {right}" for left, right in zip(*sides, strict=True))]


def hints(report: Report) -> list[str]:
    """Return the next steps, as lines."""
    lines = []
    if report.data_dir:
        there = shlex.quote(f"{report.data_dir}/coordinator")
        lines.append(
            f"  kept in {report.data_dir}: coordinator run export {report.run} --data-dir "
            f"{there} --to model"
        )
    elif any(version.picture for version in report.history):
        lines.append("  --data-dir DIR keeps these pictures")
    if report.pictures:
        lines.append(f"  pictures: {', '.join(report.pictures)}")
    if report.complaint:
        lines.append(f"  No contribution came: {printable(report.complaint, 300)}")
    elif not report.improved:
        lines.append(
            f"  The {MEASURES[report.measure]} did not improve: give it more --minutes, or look "
            "at the logs with --data-dir."
        )
    return lines
