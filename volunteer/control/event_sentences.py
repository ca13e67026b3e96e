"""Events as sentences, printed by `--no-ui` and listed on the log page."""

from __future__ import annotations

from collections.abc import Callable

from shared.protocol.accounts import Me
from shared.protocol.heartbeat import Announcement
from shared.text import duration, printable
from volunteer.control import events
from volunteer.control.events import AnyEvent
from volunteer.control.shortage import shortage_words
from volunteer.i18n.catalogue import N_, _, ngettext, number, translated
from volunteer.i18n.coordinator import verdict_reason
from volunteer.i18n.formats import credit, duration_words, size
from volunteer.text import loss, measure_name

YOU = "you"  # `by` of a pause by the owner
OPEN_ENDED = ("", "you resume", "you start")  # ends of a pause that are not shown
START = N_("press space to start")  # the reason of the pause before the first start
# Words that arrive in events and are shown in a sentence.
EVENT_WORDS = (
    N_("received"),
    N_("checking"),
    N_("accepted"),
    N_("merged"),
    N_("superseded"),
    N_("rejected"),
    N_("released"),
    N_("cancelled"),
    N_("gone"),
    N_("failed"),
    N_("saved"),
    N_("refused"),
    N_("info"),
    N_("warning"),
    N_("error"),
    N_("paused"),
    N_("resumed"),
    N_("the next login"),
)


def words(event: AnyEvent) -> str | None:
    """Return an event as a sentence; None for an event that only screens use."""
    writer = _WRITERS.get(type(event))
    return None if writer is None else writer(event)


def _started(e: events.Started) -> str:
    return _(
        '"{nickname}" helps {server} at {coordinator} (key {fingerprint})',
        nickname=e.nickname,
        server=e.server,
        coordinator=e.coordinator,
        fingerprint=e.fingerprint,
    )


def announcement_words(announcement: Announcement) -> str:
    """Return an announcement with its subject."""
    if announcement.run:
        return _("announcement about {run}: {text}", run=announcement.run, text=announcement.text)
    return _("announcement: {text}", text=announcement.text)


def _announced(e: events.Announced) -> str | None:
    return "; ".join(map(announcement_words, e.announcements)) or None


def _connection(e: events.Connection) -> str | None:
    """Return the sentence that the coordinator answers, or that it cannot be reached; None if the
    event repeats the last one.
    """
    if e.repeated:
        return None
    if e.online:
        if e.since is None:
            return _("the coordinator answers")
        return _("the coordinator answers again, after {time}", time=duration(e.at - e.since))
    clauses = [_("coordinator unreachable: {message}", message=e.message)]
    if e.queued:
        clauses.append(ngettext("{n} result queued", "{n} results queued", e.queued))
    if e.retry_at is not None and e.retry_at - e.at >= 1.0:  # later retries are not reported
        clauses.append(_("next try in {time}", time=duration(e.retry_at - e.at)))
    return "; ".join(clauses)


def _devices(e: events.DevicesFound) -> str:
    parts = []
    for device in e.devices:
        label = f"{device.id} {device.name} ({size(device.memory_bytes)})"
        unusable = _(
            "{device} cannot be used: {problem}",
            device=label,
            problem=e.problems.get(device.id, device.problem),
        )
        parts.append(label if device.usable else unusable)
    devices = "; ".join(parts)
    if not e.torch:
        return _("devices: {devices}", devices=devices)
    return _("torch {version} works on: {devices}", version=e.torch, devices=devices)


def _benchmarked(e: events.Benchmarked) -> str:
    return _(
        "{device}: {training} GFLOP/s in training, {products} in matrix products",
        device=e.benchmark.device,
        training=number(e.benchmark.step_flops / 1e9, ",.0f"),
        products=number(e.benchmark.fp32_flops / 1e9, ",.0f"),
    )


def _step_measured(e: events.StepMeasured) -> str | None:
    if e.known:
        return None
    sentence = _(
        '{device}: a step of "{run}" takes {time}',
        device=e.step.device,
        run=printable(e.step.run, 64),
        time=duration_words(e.step.step_s),
    )
    if not e.step.peak_bytes:
        return sentence
    return _("{said}, {size} of memory at the most", said=sentence, size=size(e.step.peak_bytes))


def _idle(e: events.Idle) -> str | None:
    if e.repeated:
        return None
    if e.reason == "asking":
        return translated(e.message)
    sentence = _("idle ({reason}): {message}", reason=e.reason, message=e.message)
    if e.until is None:
        return sentence
    return f"{sentence}; {_('next poll in {time}', time=duration(e.until - e.at))}"


def _claimed(e: events.Claimed) -> str:
    fields = {"task": e.task, "run": e.run, "device": e.device, "credits": credit(e.price_micro)}
    if e.kind == events.AUDIT:
        return ngettext(
            "task {task} of {run} on {device} checks another's work: {n} step, pays {credits} "
            "credits",
            "task {task} of {run} on {device} checks another's work: {n} steps, pays {credits} "
            "credits",
            e.steps,
            **fields,
        )
    if e.counted:  # paid by the work done, so the price is an estimate
        return _(
            "task {task} of {run} on {device}: {n} {things}, pays about {credits} credits",
            n=e.steps,
            things=_(e.counted),
            **fields,
        )
    return ngettext(
        "task {task} of {run} on {device}: {n} step, pays {credits} credits",
        "task {task} of {run} on {device}: {n} steps, pays {credits} credits",
        e.steps,
        **fields,
    )


def _training(e: events.Training) -> str:
    left = f", {_('{time} left', time=duration(e.eta_s))}" if e.eta_s is not None else ""
    if e.counted:
        done = _("{done} of {all} {things}", done=e.step, all=e.steps, things=_(e.counted))
        return f"{_('task {number}', number=e.task)}  {done}{left}"
    sentence = _("task {number} step {step}/{steps}", number=e.task, step=e.step, steps=e.steps)
    if e.loss is not None:
        sentence += f"  {_('loss {loss}', loss=loss(e.loss))}"
    if e.tokens_per_s > 0:  # the first step has no rate yet
        sentence += f"  {number(e.tokens_per_s, ',.0f')} {_(e.items)}/s"
    return f"{sentence}{left}"


def _halved(e: events.Halved) -> str:
    return ngettext(
        "task {task}: {device} ran out of memory; continuing with {n} sample at a time "
        "(same batch, same pay)",
        "task {task}: {device} ran out of memory; continuing with {n} samples at a time "
        "(same batch, same pay)",
        e.micro_batch,
        task=e.task,
        device=e.device,
    )


def _trained(e: events.Trained) -> str:
    sentence = _("task {number} trained in {time}", number=e.task, time=duration(e.train_s))
    if e.loss_last is None:
        return sentence
    return f"{sentence}: {_('loss {loss}', loss=loss(e.loss_first))} -> {loss(e.loss_last)}"


def _judged(e: events.Judged) -> str:
    v = e.verdict
    state, why = _(v.state), translated(verdict_reason(v))
    about = {"task": v.task, "run": v.run, "state": state}
    if v.version is None:
        sentence = _("task {task} of {run} {state}", **about)
    else:
        sentence = _(
            "task {task} of {run} {state} into version {version}", **about, version=v.version
        )
    if v.credits_micro:
        sentence += f", {_('{credits} credits', credits=credit(v.credits_micro))}"
    return f"{sentence}: {why}" if v.message not in ("", v.state) and why else sentence


def _measured(e: events.LossMeasured) -> str:
    sentence = f"{_('{run} version {version}', run=e.run, version=e.version)}: "
    sentence += (
        _("loss {loss} on held-out data", loss=loss(e.loss))
        if e.measure == "loss"
        else f"{measure_name(e.measure)} {loss(e.loss, e.measure)}"
    )
    if not e.mine:
        return sentence
    tasks = ngettext("made with {n} task of yours", "made with {n} tasks of yours", e.mine)
    return f"{sentence}; {tasks}"


def escrow_words(me: Me) -> str:
    """Say when pay at stake, or pay that awaits its check, is released; "" without such pay."""
    if not (me.escrow_micro or me.proving):
        return ""
    first = ""
    if not (me.invited or me.earned_micro):
        first = _("the first credits are free once two tasks of yours are proved and merged")
    if not me.proving:
        return first or _("free once a later task of yours, drawn by lot, passes a recompute")
    proof = _("being proved: tasks of yours are recomputed")
    if me.proved_in_s is not None:
        proof = _("being proved, about {time}", time=duration(me.proved_in_s))
    return f"{proof}; {first}" if first else proof


def debt_words() -> str:
    """Explain where a debt comes from."""
    return _(
        "a debt is pay that was spent before it was taken back, or work not proved; new pay "
        "settles it"
    )


def stake_words(me: Me) -> list[str]:
    """Describe pay at stake and a debt, a line each; [] without either."""
    lines: list[str] = []
    if me.escrow_micro:
        stake = _("at stake: {credits}", credits=credit(me.escrow_micro))
        lines.append(f"{stake}; {escrow_words(me)}")
    elif wait := escrow_words(me):
        lines.append(wait)
    if me.debt_micro:
        owed = _("owed: {credits}", credits=credit(me.debt_micro))
        lines.append(f"{owed}; {debt_words()}")
    return lines


def credits_words(e: events.Credits) -> str:
    """Describe the account's credits in one sentence."""
    me = e.me
    sentence = _(
        "credits: {earned} earned, {pending} pending",
        earned=credit(me.earned_micro),
        pending=credit(me.pending_micro),
    )
    if me.escrow_micro:
        sentence += f", {_('{credits} at stake', credits=credit(me.escrow_micro))}"
    if me.debt_micro:
        sentence += f", {_('{credits} owed', credits=credit(me.debt_micro))}"
    if wait := escrow_words(me):
        sentence += f"; {wait}"
    if me.standing == "suspended":
        return _(
            "this account is suspended: {why}; {credits}", why=me.standing_reason, credits=sentence
        )
    return f"{sentence}, {_('rank {rank}', rank=me.rank)}" if me.rank else sentence


def _paused(e: events.Paused) -> str:
    if e.by == YOU:
        subject = _("{device} paused", device=e.device) if e.device else _("paused")
        if e.message == START:  # START names a key, and plain output has none
            return _("paused: `volunteer resume` starts it")
        by_you = _("{device} paused by you", device=e.device) if e.device else _("paused by you")
        sentence = by_you if e.message in ("", "paused") else f"{subject}: {_(e.message)}"
        if e.until in OPEN_ENDED:
            return sentence
        return _("{paused} until {time}", paused=sentence, time=_(e.until))
    sentence = _(
        "{device} paused by {rule}: {message}",
        device=e.device or _("everything"),
        rule=_(e.by),
        message=e.message,
    )
    return f"{sentence}; {_('until {time}', time=e.until)}" if e.until else sentence


def _resumed(e: events.Resumed) -> str:
    return translated(e.message) or _("{device} resumed", device=e.device or _("everything"))


def _ended(e: events.Stopped) -> str:
    if e.code and not e.tasks:
        return _("ended: {message}", message=e.message)
    sentence = _("ended after {time}", time=duration(e.seconds))
    why = "" if e.message == "ended" else f"{translated(e.message)}; "
    tasks = ngettext("{n} task submitted", "{n} tasks submitted", e.tasks)
    sent = _(
        "{sent} sent, {received} received", sent=size(e.sent_bytes), received=size(e.received_bytes)
    )
    return f"{sentence}: {why}{tasks}, {sent}"


def _submitted(e: events.Submitted) -> str:
    return _("task {number} submitted ({size})", number=e.task, size=size(e.bytes))


def _task_ended(e: events.TaskEnded) -> str:
    return _("task {number} {how}: {message}", number=e.task, how=_(e.how), message=e.message)


def _noticed(e: events.Notice) -> str:
    return translated(e.message) if e.level == "info" else f"{_(e.level)}: {translated(e.message)}"


_WRITERS: dict[type, Callable[..., str | None]] = {
    events.Started: _started,
    events.Announced: _announced,
    events.Connection: _connection,
    events.DevicesFound: _devices,
    events.Benchmarked: _benchmarked,
    events.StepMeasured: _step_measured,
    events.ShortOfMemory: lambda e: None if e.known else translated(shortage_words(e.shortage)),
    events.Idle: _idle,
    events.Claimed: _claimed,
    events.Training: _training,
    events.Halved: _halved,
    events.Trained: _trained,
    events.Submitted: _submitted,
    events.Judged: _judged,
    events.TaskEnded: _task_ended,
    events.LossMeasured: _measured,
    events.Credits: credits_words,
    events.Paused: _paused,
    events.Resumed: _resumed,
    events.Finishing: lambda e: translated(e.message),
    events.Notice: _noticed,
    events.Stopped: _ended,
}
