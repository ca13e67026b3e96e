"""Causes of a standstill of a run: the one answer to "why does this run not go on?", from facts.

Causes are tried in the order of `_CAUSES`: what the organiser decided, what stops the server, what
goes wrong with the work, who is missing, what the run waits for. The first that holds is the answer
of every surface: `status`, `run show`, `top`, the page, alerts, metrics, the app and `--no-ui`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from coordinator.rules.overview import Level
from shared.protocol.base import Cause, Standstill
from shared.protocol.limits import memory_on
from shared.text import counted, duration, printable, size
from shared.units import DAY_S, HOUR_S, MINUTE_S

REPEATED = 3  # failures, or refusals, in a row that show a fault of the run
RECENT_S = HOUR_S  # older failures, refusals and harvests do not count
MERGE_S = MINUTE_S  # longest time that a merge may be due
PROOF_S = 20.0  # an update that waits for its proof for less is no standstill
BARREN_MIN = 64  # least episodes that show whether learners can use any
TAUGHT_MIN = 0.01  # least share of episodes that learners can use
USUAL_TIMES = 5  # a run stalls after this many times its usual time for a version
SENTENCE_MAX = 300


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the facts about a run."""


class PauseFacts(Facts, frozen=True, kw_only=True):
    """Pause of a run, its actor and its reason."""

    actor: str = "organiser"
    reason: str = ""
    at: float | None = None


class OutcomeFacts(Facts, frozen=True, kw_only=True):
    """Tasks that failed, or updates that were refused, since the run's newest accepted work."""

    count: int = 0
    machines: int = 0
    commonest: str = ""  # sentence of most of these failures or refusals
    since: float | None = None
    stuck: bool = False  # a failed task is needed for the next version, and no machine has it


class PresenceFacts(Facts, frozen=True, kw_only=True):
    """Machines that were seen lately, on the whole server."""

    online: int = 0
    paused: int = 0
    fitting: int = 0  # online machines that can take part in the run
    at_work: int = 0  # online machines that hold a task of the run, or wait for its merge
    # online machines that keep data for the run; None if its organiser keeps the data
    keepers: int | None = None
    workload: bool = True  # some online machine has the workload
    largest: int = 0  # most bytes of memory of an online device
    largest_name: str = ""
    last_seen: float | None = None


class ProofFacts(Facts, frozen=True, kw_only=True):
    """Updates that cannot be merged before their recompute has passed."""

    count: int = 0
    provers: str = ""  # who makes the recomputes, or why they wait
    since: float | None = None


class EpisodeFacts(Facts, frozen=True, kw_only=True):
    """Newest episodes that actors made, and the samples in them that learners can use."""

    unit: str = "episode"
    made: int = 0
    taught: float = 1.0  # share of the episodes that learners can use
    learning: int = 0  # tasks of learners that have not ended
    since: float | None = None


class MergeFacts(Facts, frozen=True, kw_only=True):
    """Next merge of a run."""

    failed: bool = False
    message: str = ""
    failed_at: float | None = None
    due: bool = False  # the plan's conditions are fulfilled
    under_way: bool = False
    waits_since: float | None = None  # when the newest update was accepted
    ready: int = 0  # updates that could be merged now
    members: int = 0  # further members whose updates must be among those of the merge


class RunFacts(Facts, frozen=True, kw_only=True):
    """All facts from which a standstill follows."""

    name: str
    state: Literal["draft", "running", "paused", "completed", "failed"]
    now: float
    version: int = 0
    served: bool = True  # a serving process sends beats
    closed: str = ""  # why the server accepts nothing new
    pause: PauseFacts = PauseFacts()
    failures: OutcomeFacts = OutcomeFacts()
    refusals: OutcomeFacts = OutcomeFacts()
    machines: PresenceFacts = PresenceFacts()
    needs_bytes: int = 0  # memory that a device must have
    workload: str = ""
    proofs: ProofFacts = ProofFacts()
    episodes: EpisodeFacts = EpisodeFacts()
    merge: MergeFacts = MergeFacts()
    made_at: float | None = None  # time of the newest version
    watched_since: float = 0.0  # time from which on the run was running and a process served it
    usual_s: float = 0.0  # usual time from version to version
    stalled_s: float = 0.0  # setting `alert_stalled_s`


class Handling(msgspec.Struct, frozen=True, kw_only=True):
    """Level of a cause, and the seconds after which its alert is sent; None if no alert is sent, or
    an alert of another kind reports the cause.
    """

    level: Level
    patience_s: float | None


HANDLING: dict[Cause, Handling] = {
    Cause.PAUSED: Handling(level="good", patience_s=None),
    Cause.AT_FAULT: Handling(level="bad", patience_s=0.0),
    Cause.NO_SERVER: Handling(level="bad", patience_s=None),
    Cause.CLOSED: Handling(level="bad", patience_s=None),
    Cause.MERGE_FAILS: Handling(level="bad", patience_s=0.0),
    Cause.FAILING: Handling(level="bad", patience_s=0.0),
    Cause.REFUSED: Handling(level="bad", patience_s=0.0),
    Cause.NOTHING_TEACHES: Handling(level="bad", patience_s=10 * MINUTE_S),
    Cause.NO_FIT: Handling(level="bad", patience_s=10 * MINUTE_S),
    Cause.NOBODY: Handling(level="watch", patience_s=30 * MINUTE_S),
    Cause.NO_DATA: Handling(level="watch", patience_s=30 * MINUTE_S),
    Cause.PROOF: Handling(level="watch", patience_s=30 * MINUTE_S),
    Cause.MERGE_DUE: Handling(level="bad", patience_s=MINUTE_S),
    Cause.COMPANY: Handling(level="watch", patience_s=0.0),
    Cause.STALLED: Handling(level="bad", patience_s=0.0),
}


def standstill(facts: RunFacts) -> Standstill | None:
    """Return why a run does not go on; None if it does, or is neither running nor paused."""
    if facts.state not in ("running", "paused"):
        return None
    for find in _CAUSES:
        if (answer := find(facts)) is not None:
            return msgspec.structs.replace(answer, message=answer.message[:SENTENCE_MAX])
    return None


def _paused(facts: RunFacts) -> Standstill | None:
    if facts.state != "paused":
        return None
    itself = facts.pause.actor == "run"
    reason = f": {facts.pause.reason}" if facts.pause.reason else ""
    return Standstill(
        cause=Cause.AT_FAULT if itself else Cause.PAUSED,
        message=f"it paused itself{reason}" if itself else f"paused by its organiser{reason}",
        todo=f"`coordinator run resume {facts.name}` hands out its tasks again",
        since=facts.pause.at,
    )


def _unserved(facts: RunFacts) -> Standstill | None:
    if facts.served:
        return None
    message, todo = "no server is running", "start it with `coordinator serve`"
    return Standstill(cause=Cause.NO_SERVER, message=message, todo=todo)


def _closed(facts: RunFacts) -> Standstill | None:
    if not facts.closed:
        return None
    return Standstill(
        cause=Cause.CLOSED,
        message=f"the coordinator accepts nothing new: {facts.closed}",
        todo="free space, or make the disk or store writable; work then continues",
    )


def _merge_fails(facts: RunFacts) -> Standstill | None:
    if not facts.merge.failed:
        return None
    why = f": {facts.merge.message}" if facts.merge.message else ""
    return Standstill(
        cause=Cause.MERGE_FAILS,
        message=f"the merge to version {facts.version + 1} fails{why}",
        todo="the server's log says more; it is tried again without the culprit",
        since=facts.merge.failed_at,
    )


def _fails(facts: RunFacts) -> Standstill | None:
    """Return the standstill of a run whose newest tasks all failed, or whose work was refused."""
    failed, refused = facts.failures, facts.refusals
    if failed.count + refused.count < REPEATED and not failed.stuck:
        return None
    if failed.stuck or failed.count >= refused.count:
        machines = counted(failed.machines, "machine")
        task_words = "task" if failed.count == 1 else counted(failed.count, "task")
        return Standstill(
            cause=Cause.FAILING,
            message=f"its last {task_words} failed, on {machines}: {failed.commonest}",
            todo="mend what the sentence names in the run file, and create the run anew; "
            "`coordinator task list` shows each failure",
            since=failed.since,
        )
    return Standstill(
        cause=Cause.REFUSED,
        message=f"its last {counted(refused.count, 'contribution')} were refused: "
        f"{refused.commonest}",
        todo="mend [train] or the data, and create the run anew",
        since=refused.since,
    )


def _barren(facts: RunFacts) -> Standstill | None:
    episodes = facts.episodes
    if episodes.made < BARREN_MIN or episodes.taught >= TAUGHT_MIN or episodes.learning:
        return None
    episode_words = counted(episodes.made, f"newest {episodes.unit}")
    return Standstill(
        cause=Cause.NOTHING_TEACHES,
        message=f"nothing teaches: {episodes.taught:.1%} of the {episode_words} can be learnt from",
        todo="give it easier problems, or a longer warm start ([task.options] warm_steps)",
        since=episodes.since,
    )


def _unfit(facts: RunFacts) -> Standstill | None:
    machines = facts.machines
    if not machines.online or machines.fitting or machines.at_work:
        return None
    many = machines.online > 1
    none = (
        f"none of the {machines.online} machines here fits"
        if many
        else "the machine here does not fit"
    )
    if not machines.workload:
        return Standstill(
            cause=Cause.NO_FIT,
            message=f'{none}: the workload "{facts.workload}" is enabled on none',
            todo="ask volunteers to install and enable it",
        )
    return Standstill(
        cause=Cause.NO_FIT,
        message=f"{none}: it needs about {size(facts.needs_bytes)} of a GPU or "
        f"{size(memory_on('cpu', facts.needs_bytes))} of a computer's memory, and the largest, "
        f"{printable(machines.largest_name, 80)}, has {size(machines.largest)}",
        todo="invite larger machines, or create a smaller model",
    )


def _deserted(facts: RunFacts) -> Standstill | None:
    machines = facts.machines
    if machines.online or machines.at_work:
        return None
    if machines.paused:
        here = "all machines here are" if machines.paused > 1 else "the only machine here is"
        return Standstill(cause=Cause.NOBODY, message=f"{here} paused by its owner")
    last_seen = machines.last_seen
    last = (
        ""
        if last_seen is None
        else f", the last machine was seen {duration(facts.now - last_seen)} ago"
    )
    return Standstill(
        cause=Cause.NOBODY,
        message=f"nobody is here{last}",
        todo="`coordinator invite create` lets somebody in",
        since=last_seen,
    )


def _dataless(facts: RunFacts) -> Standstill | None:
    machines = facts.machines
    if machines.keepers is None or machines.keepers or machines.at_work:
        return None
    return Standstill(
        cause=Cause.NO_DATA,
        message=f"nobody with data for it is here, of {counted(machines.online, 'machine')} online",
        todo=f"each member adds its own with `volunteer data add {facts.name} PATH`",
    )


def _unproven(facts: RunFacts) -> Standstill | None:
    proofs = facts.proofs
    waits_s = facts.now - (facts.now if proofs.since is None else proofs.since)
    if not proofs.count or facts.merge.ready or waits_s < PROOF_S:
        return None
    provers = f": {proofs.provers}" if proofs.provers else ""
    verb = "waits" if proofs.count == 1 else "wait"
    return Standstill(
        cause=Cause.PROOF,
        message=f"{counted(proofs.count, 'contribution')} {verb} for proof, for "
        f"{duration(waits_s)}{provers}",
        todo="`coordinator checker work` on another machine takes its part",
        since=proofs.since,
    )


def _due(facts: RunFacts) -> Standstill | None:
    merge = facts.merge
    since = merge.waits_since
    if not merge.due or merge.under_way or since is None or facts.now - since < MERGE_S:
        return None
    return Standstill(
        cause=Cause.MERGE_DUE,
        message=f"its merge is due since {duration(facts.now - since)} and does not begin",
        todo="the server's log says more; start it again",
        since=since,
    )


def _lonely(facts: RunFacts) -> Standstill | None:
    since, members = _stalled_since(facts), facts.merge.members
    if since is None or not members or facts.merge.waits_since is None:
        return None
    company = (
        "an update of another member" if members == 1 else f"updates of {members} other members"
    )
    return Standstill(
        cause=Cause.COMPANY,
        message=f"no version for {span(facts.now - since)}: its merge waits for {company}",
        todo="`coordinator invite create` lets a member in, who adds data with "
        f"`volunteer data add {facts.name} PATH`",
        since=since,
    )


def _stalled_since(facts: RunFacts) -> float | None:
    """Return the time since which a run should have made a version; None while it need not."""
    if not facts.stalled_s or facts.made_at is None:
        return None
    since = max(facts.made_at, facts.watched_since)
    return since if facts.now - since >= stalled_after(facts.stalled_s, facts.usual_s) else None


def _stalled(facts: RunFacts) -> Standstill | None:
    since = _stalled_since(facts)
    if since is None:
        return None
    busy_elsewhere = facts.machines.fitting - facts.machines.at_work
    at_work = counted(facts.machines.at_work, "machine")
    return Standstill(
        cause=Cause.STALLED,
        message=f"no version for {span(facts.now - since)}, with {at_work} at work"
        + (f" and {busy_elsewhere} busy elsewhere or at rest" if busy_elsewhere > 0 else ""),
        todo=f"`coordinator run show {facts.name}` says what its merge waits for",
        since=since,
    )


def stalled_after(least_s: float, usual_s: float) -> float:
    """Return the longest time that an active run may make no version."""
    return max(least_s, USUAL_TIMES * usual_s)


def span(seconds: float) -> str:
    """Return a duration, from two days on in whole days: 12 s, 47:10 h, 9 days."""
    return duration(seconds) if seconds < 2 * DAY_S else f"{seconds // DAY_S:.0f} days"


_CAUSES: Sequence[Callable[[RunFacts], Standstill | None]] = (
    _paused, _closed, _unserved, _merge_fails, _fails, _barren, _unfit, _deserted, _dataless,
    _unproven, _due, _lonely, _stalled,
)  # fmt: skip
