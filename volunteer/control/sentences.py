"""Every event as a sentence: what `--no-ui` prints and the log page lists."""

from __future__ import annotations

from collections.abc import Callable

from shared.protocol.accounts import Me
from shared.protocol.heartbeat import Announcement
from shared.protocol.limits import VEST_AFTER, VEST_DAYS
from shared.text import credit, duration, size
from volunteer.control import events
from volunteer.control.events import AnyEvent
from volunteer.text import loss

YOU = "you"  # who pauses by hand
OPEN_ENDED = ("", "you resume", "you start")  # ends of a pause that need no words


def words(event: AnyEvent) -> str | None:
    """An event as a sentence; None for what only a screen can use."""
    writer = _WRITERS.get(type(event))
    return None if writer is None else writer(event)


def _started(e: events.Started) -> str:
    return f'"{e.nickname}" helps {e.server} at {e.coordinator} (key {e.fingerprint})'


def announcement_words(found: Announcement) -> str:
    """Return an announcement with what it is about."""
    about = f" about {found.run}" if found.run else ""
    return f"announcement{about}: {found.text}"


def _announced(e: events.Announced) -> str | None:
    return "; ".join(map(announcement_words, e.announcements)) or None


def _connection(e: events.Connection) -> str | None:
    """One sentence when it stops answering, and one when it answers again."""
    if e.repeated:
        return None
    if e.online:
        again = f" again, after {duration(e.at - e.since)}" if e.since is not None else ""
        return f"the coordinator answers{again}"
    queued = f"; {e.queued} result{'s' if e.queued != 1 else ''} queued" if e.queued else ""
    again = f"; next try in {duration(e.retry_at - e.at)}" if e.retry_at is not None else ""
    return f"coordinator unreachable: {e.message}{queued}{again}"


def _devices(e: events.DevicesFound) -> str:
    parts = []
    for device in e.devices:
        what = f"{device.id} {device.name} ({size(device.memory_bytes)})"
        parts.append(what if device.usable else f"{what} cannot be used: {device.problem}")
    return "devices: " + "; ".join(parts)


def _benchmarked(e: events.Benchmarked) -> str:
    b = e.benchmark
    return (
        f"{b.device}: {b.step_flops / 1e9:,.0f} GFLOP/s in training, "
        f"{b.fp32_flops / 1e9:,.0f} in matrix products"
    )


def _idle(e: events.Idle) -> str | None:
    if e.repeated:
        return None
    again = f"; next poll in {duration(e.until - e.at)}" if e.until is not None else ""
    return f"idle ({e.reason}): {e.message}{again}"


def _claimed(e: events.Claimed) -> str:
    return (
        f"task {e.task} of {e.run} on {e.device}: {e.steps} steps, "
        f"pays {credit(e.price_micro)} credits"
    )


def _training(e: events.Training) -> str:
    left = f", {duration(e.eta_s)} left" if e.eta_s is not None else ""
    if e.counted:
        return f"task {e.task}  {e.step} of {e.steps} {e.counted}{left}"
    rate = f"{e.tokens_per_s:,.0f} {e.items}/s"
    return f"task {e.task} step {e.step}/{e.steps}  loss {loss(e.loss)}  {rate}{left}"


def _halved(e: events.Halved) -> str:
    return (
        f"task {e.task}: {e.device} ran out of memory; "
        f"going on with {e.micro_batch} samples at a time "
        "(same batch, same pay)"
    )


def _trained(e: events.Trained) -> str:
    said = f"task {e.task} trained in {duration(e.train_s)}"
    if e.loss_last is None:
        return said
    return f"{said}: loss {loss(e.loss_first)} -> {loss(e.loss_last)}"


def _judged(e: events.Judged) -> str:
    v = e.verdict
    paid = f", {credit(v.credits_micro)} credits" if v.credits_micro else ""
    into = f" into version {v.version}" if v.version is not None else ""
    said = f"{v.state}{into}"
    why = f": {v.message}" if v.message and v.message not in said else ""
    return f"task {v.task} of {v.run} {said}{paid}{why}"


def _measured(e: events.LossMeasured) -> str:
    mine = f", {e.mine} of yours in it" if e.mine else ""
    held_out = e.measure.removeprefix("held-out ") in ("", "loss")
    said = f"loss {loss(e.loss)} on held-out data" if held_out else f"{e.measure} {loss(e.loss)}"
    return f"{e.run} version {e.version}: {said}{mine}"


ESCROW = (
    f"escrow is earned once {VEST_AFTER} more of your contributions are accepted, or after "
    f"{VEST_DAYS:g} days with a check passed since"
)
DEBT = "what is owed was taken back after it was spent: later pay settles it first"


def held_words(me: Me) -> list[str]:
    """Say of credits that are not to be spent when they become earned; nothing without any."""
    lines: list[str] = []
    if me.escrow_micro:
        lines.append(f"in escrow: {credit(me.escrow_micro)}; {ESCROW}")
    if me.debt_micro:
        lines.append(f"owed: {credit(me.debt_micro)}; {DEBT}")
    return lines


def credits_words(e: events.Credits) -> str:
    """Describe the credits in a sentence."""
    me = e.me
    rank = f", rank {me.rank}" if me.rank else ""
    held = f", {credit(me.escrow_micro)} in escrow" if me.escrow_micro else ""
    owed = f", {credit(me.debt_micro)} owed" if me.debt_micro else ""
    said = f"credits: {credit(me.earned_micro)} earned, {credit(me.pending_micro)} pending"
    said += held + owed
    if me.standing == "suspended":
        return f"this account is suspended: {me.standing_reason}; {said}"
    return f"{said}{rank}"


def _paused(e: events.Paused) -> str:
    if e.by == YOU:
        what = f"{e.device} paused" if e.device else "paused"
        end = "" if e.until in OPEN_ENDED else f" until {e.until}"
        said = f"{what} by you" if e.message in ("", "paused") else f"{what}: {e.message}"
        return f"{said}{end}"
    until = f"; until {e.until}" if e.until else ""
    return f"{e.device or 'everything'} paused by {e.by}: {e.message}{until}"


def _ended(e: events.Stopped) -> str:
    if e.code and not e.tasks:
        return f"ended: {e.message}"
    why = "" if e.message == "ended" else f"{e.message}; "
    return (
        f"ended after {duration(e.seconds)}: {why}{e.tasks} task{'s' * (e.tasks != 1)} submitted, "
        f"{size(e.sent_bytes)} sent, {size(e.received_bytes)} received"
    )


_WRITERS: dict[type, Callable[..., str | None]] = {
    events.Started: _started,
    events.Announced: _announced,
    events.Connection: _connection,
    events.DevicesFound: _devices,
    events.Benchmarked: _benchmarked,
    events.Idle: _idle,
    events.Claimed: _claimed,
    events.Training: _training,
    events.Halved: _halved,
    events.Trained: _trained,
    events.Submitted: lambda e: f"task {e.task} submitted ({size(e.bytes)})",
    events.Judged: _judged,
    events.TaskEnded: lambda e: f"task {e.task} {e.how}: {e.message}",
    events.LossMeasured: _measured,
    events.Credits: credits_words,
    events.Paused: _paused,
    events.Resumed: lambda e: e.message or f"{e.device or 'everything'} resumed",
    events.Finishing: lambda e: e.message,
    events.Notice: lambda e: e.message if e.level == "info" else f"{e.level}: {e.message}",
    events.Celebrated: lambda e: f"a mark: {e.message}",
    events.Alerted: lambda e: f"alert: {e.message}",
    events.Stopped: _ended,
}
