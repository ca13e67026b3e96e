"""The state of the machine in one sign, one word and one sentence that says why and what ends
it.
"""

from __future__ import annotations

import msgspec
from rich.cells import cell_len

from shared.protocol.heartbeat import RunBeat
from shared.text import printable, size
from volunteer.control.commands import How
from volunteer.control.events import BenchmarkProgress
from volunteer.control.sentences import OPEN_ENDED, YOU
from volunteer.control.status import PauseStatus, TaskStatus
from volunteer.tui.text import Glyphs, countdown, fit, soon
from volunteer.tui.view import AgentView

STAGES = {
    "fp32": "matrix products in float32",
    "bf16": "matrix products in bfloat16",
    "memory": "memory",
    "step": "real training steps",
    "disk": "disk",
}


class Activity(msgspec.Struct, frozen=True, kw_only=True):
    """State as a sign, a word and a sentence. `role` colours sign and word; the sentence stays
    plain.
    """

    sign: str
    word: str
    role: str
    sentence: str = ""


_PHASES = {
    "claimed": "starting",
    "fetch": "downloading",
    "train": "training",
    "upload": "uploading",
    "checking": "being checked",
}


LEAVING: dict[How, str] = {
    "finish": "the task in hand is completed first",
    "save": "the half-done task is kept for the next start",
    "release": "the task is given back",
}


def activity(view: AgentView, now: float, glyphs: Glyphs, device: str = "") -> Activity:
    """Return the state of this machine, or of one device of it."""
    status = view.status
    if view.ended is not None or status.stopped:
        code, said = (view.ended.code, view.ended.message) if view.ended else (0, "")
        said = "the volunteer has ended; q quits" if said in ("", "ended") else said
        sign, role = (glyphs.cross, "bad") if code else (glyphs.off, "dim")
        return Activity(sign=sign, word="stopped", role=role, sentence=said)
    if pause := status.paused(device):
        return Activity(sign=glyphs.paused, word="paused", role="warn", sentence=why_paused(pause))
    if view.benchmark is not None and device in ("", view.benchmark.device):
        return Activity(
            sign=glyphs.run, word="measuring", role="info", sentence=stage_words(view.benchmark)
        )
    task = view.task(device)
    sentence = f"{task.run} {glyphs.dot} task {task.task}" if task is not None else ""
    if task is not None and task.phase == "upload" and not status.online and status.connection:
        return Activity(sign=glyphs.wait, word="waiting", role="info", sentence=sentence)
    if task is not None and not (task.phase == "claimed" and status.idle):
        word = (
            "finishing"
            if status.finishing
            else "starting"
            if fetched(task)
            else _PHASES[task.phase]
        )
        role = "info" if task.phase in ("checking", "claimed") else "good"
        return Activity(sign=glyphs.on, word=word, role=role, sentence=sentence)
    if status.finishing:
        return Activity(
            sign=glyphs.off, word="finished", role="info", sentence="no more tasks are taken"
        )
    if status.idle or status.idle_message:
        wait = f" ({countdown(status.idle_until - now)})" if status.idle_until else ""
        return Activity(
            sign=glyphs.wait, word="waiting", role="info", sentence=f"{status.idle_message}{wait}"
        )
    return Activity(sign=glyphs.wait, word="starting", role="dim", sentence="looking for work")


def stage_words(told: BenchmarkProgress) -> str:
    """Return the stage of a benchmark in words."""
    return STAGES.get(told.stage) or printable(told.stage, 40)


def fetched(task: TaskStatus) -> bool:
    """Return True if all downloads of a task are complete and its first step is running."""
    return task.phase == "fetch" and task.done_bytes >= task.total_bytes > 0


def why_paused(pause: PauseStatus) -> str:
    """Return the reason of a pause and what ends it, as one sentence."""
    if pause.by == YOU:
        own = pause.message if pause.message not in ("", "paused") else "by you"
        if pause.until not in OPEN_ENDED:
            own = f"{own} until {pause.until}"
        return own if "space" in own else f"{own}; press space to resume"
    return f"{pause.message}, until {pause.until}" if pause.until else pause.message


def connection(view: AgentView, now: float, glyphs: Glyphs) -> Activity:
    """Return the state of the connection with the coordinator."""
    status = view.status
    if view.ended is not None or status.stopped:
        return Activity(sign=glyphs.off, word="ended", role="dim", sentence=status.server)
    if status.online:
        return Activity(sign=glyphs.on, word="online", role="good", sentence=status.server)
    if not status.connection and status.retry_at is None:
        return Activity(sign=glyphs.wait, word="connecting", role="dim", sentence=status.server)
    retry = f"next try in {soon(status.retry_at - now)}" if status.retry_at else ""
    return Activity(sign=glyphs.off, word="offline", role="bad", sentence=retry)


def merging(view: AgentView, run: str, now: float) -> str:
    """Return when the next version is made: "next version in 2 contributions or 3:12"."""
    beat = view.beat(run)
    if beat is not None and beat.state != "running":
        return f"run is {beat.state}"
    when = next_merge(view, run, now)
    return f"next version {when}" if when else ""


def next_merge(view: AgentView, run: str, now: float) -> str:
    """Return when a run is merged next: "in 2 contributions or 3:12"; empty if unknown."""
    beat = view.beat(run)
    if beat is None:
        info = view.info(run)
        return info.merging.removeprefix("merging ") if info else ""
    if beat.state != "running":
        return f"run is {beat.state}"
    return when_merged(beat, now - view.beats_at.get(run, now))


def when_merged(beat: RunBeat, since_s: float) -> str:
    """Return the condition of the next merge, `since_s` after the heartbeat that reported it."""
    parts = []
    if beat.needs > 0:
        parts.append(f"in {beat.needs} contribution{'' if beat.needs == 1 else 's'}")
    if beat.merge_in_s is not None:
        left = beat.merge_in_s - since_s
        parts.append(f"in {countdown(left)}" if not parts else countdown(left))
    return " or ".join(parts) or "now"


REASON_CELLS = 46


def banner(view: AgentView, now: float, cells: int, ellipsis: str = "…") -> str:
    """Return the fault of the connection, the time of the next retry and what still works; empty
    while all is well.
    """
    status = view.status
    if status.online or not status.connection or status.stopped:
        return ""
    reason = status.connection.removeprefix(status.coordinator).strip()  # its name stands above
    said = fit(reason.partition("; ")[0].rstrip("."), min(cells, REASON_CELLS), ellipsis)
    parts = []
    if status.retry_at:
        parts.append(f"next try in {soon(status.retry_at - now)}")
    if status.queued:
        parts.append(f"{status.queued} result{'' if status.queued == 1 else 's'} queued")
    if any(task.phase == "train" for task in status.tasks):
        parts.append("training goes on")
    for part in parts:
        if cell_len(said) + 2 + len(part) <= cells:
            said = f"{said}; {part}"
    return said


def traffic(view: AgentView, glyphs: Glyphs) -> str:
    """Return the bytes sent and received since the start."""
    status = view.status
    return f"{glyphs.up} {size(status.sent_bytes)}  {glyphs.down} {size(status.received_bytes)}"
