"""Validation of a contribution: pure rules over its measurement.

No rule reads a database or trusts the client. `measure` streams once through the file; `judge`
compares the figures with the task, the head and the cohort, and returns a verdict with a reason for
the volunteer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from coordinator.plan.merge_weights import staleness_weight
from coordinator.plan.plan_tables import Plan
from coordinator.rules.run_file import ValidationSettings
from shared.errors import InvalidFrame
from shared.protocol.base import ContributionState, Reason
from shared.protocol.contributions import SubmitRequest
from shared.workloads.base import TrainSettings
from shared.workloads.training.lr_schedule import full_steps

if TYPE_CHECKING:
    from shared.tensors.spec import Schema

P = TypeVar("P", bound=tuple[Any, ...])

MAD_TO_SIGMA = 1.4826
# An Adam step moves an element by about lr; more than this many lr a step is not honest work.
ADAM_REACH = 4.0
# most volunteers whose norms count, those of the newest updates; with fewer than COHORT_MIN
# volunteers no update is refused by comparison
COHORT, COHORT_MIN = 32, 8
ROUNDING = 0.1  # most that the rounding of a codec lengthens an update, relative to it
VOICE_OF = 8  # most norms of a volunteer, its newest, from which its median is taken
# A random walk of Adam's steps has the norm lr sqrt(steps parameters). A hundredth of that means
# that only one of ten thousand parameters was trained.
ADAM_LEAST = 0.01
# Momenta of a version and of a task's end are means of clipped gradients. Each half of them, of
# matrices in blocks and of other parameters, has weights of its own.
MOMENTUM_REACH = 2 * math.sqrt(2)
COHORT_LEAST = 0.02  # an honest update has at least this share of the cohort's median norm


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """Measurement of an uploaded file. `problem` is set for an unusable file, `damaged` if the
    store does not return the uploaded bytes.
    """

    norm: float = 0.0  # of the parameters
    momentum: float = 0.0  # norm of the change of the momenta
    finite: bool = True
    problem: str = ""
    damaged: bool = False


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on one contribution."""

    state: ContributionState
    reason: str = ""
    message: str = ""
    weight: float = 0.0  # by staleness
    clip: float = 1.0  # factor that scales the update to its cohort

    def columns(self, measurement: Measurement) -> dict[str, object]:
        """Return the columns to store; the norm is None if it is of no use for comparisons."""
        names = ("state", "reason", "message", "weight", "clip")
        is_usable = measurement.finite and not (measurement.problem or measurement.damaged)
        norm = measurement.norm if is_usable else None
        return {name: getattr(self, name) for name in names} | {"norm": norm}


PAID = "the work is paid"  # clause of verdicts, replaced by the reason for work that is not paid
TOO_LATE = Judgement(
    state="superseded",
    reason=Reason.RUN_ENDED.value,
    message=f"the run has ended; {PAID}",
)
SUSPENDED = Judgement(
    state="superseded",
    message="this account is suspended: its work is neither merged nor paid",
)
BANNED = Judgement(
    state="superseded",
    message=f"not merged: this account is banned; {PAID}",
)
FORGOTTEN = Judgement(
    state="superseded",
    message=f"not merged: this account was forgotten; {PAID}",
)


def excluded(
    judgement: Judgement, state: str, standing: str, *, at_members: bool = False
) -> Judgement:
    """Return the judgement of work whose account may be banned, suspended or forgotten by now.

    On data of members the same person may join again: a forgotten account is none of the members
    that a version mixes.
    """
    if judgement.state == "rejected":
        return judgement
    if standing == "suspended":
        return SUSPENDED
    if at_members and state == "forgotten":
        return FORGOTTEN
    return BANNED if state == "banned" else judgement


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """Complete input of a judgement."""

    submit: SubmitRequest
    measurement: Measurement
    task_steps: int
    task_samples: int
    head: int
    base_version: int  # bound by the lease, not by the client
    effort: float  # see `effort`
    cohort: Sequence[float]  # norm by effort of each volunteer, see `voices`
    loss: float | None  # loss of the newest evaluated version
    parameters: int
    replayed: bool  # the same bytes were submitted for another task, or another part of it


def measure(path: Path, schema: Schema, codec: str) -> Measurement:
    """Measure an uploaded file in one streaming pass. Never raises for its content."""
    from shared.tensors import update
    from shared.tensors.codec import codec as codec_named

    try:
        stats = update.inspect(path, schema, codec_named(codec))
    except InvalidFrame as error:
        return Measurement(problem=error.message)
    problem = f"{stats.negative} holds a variance below zero" if stats.negative else ""
    return Measurement(
        norm=stats.norm, momentum=stats.momentum, finite=stats.finite, problem=problem
    )


def reach(train: TrainSettings, steps: int, parameters: int) -> float:
    """Return the L2 norm that honest local work cannot exceed; infinite without a bound on the
    gradient.

    Adam moves each element by about lr a step, plus the decay; Muon by a fifth of lr, as the mean
    over a matrix; plain SGD moves all elements together by at most lr x clip_norm a step.
    """
    if train.optimizer in ("adamw", "muon"):
        return ADAM_REACH * train.lr * steps * math.sqrt(parameters)
    return ADAM_REACH * train.lr * steps * train.clip_norm if train.clip_norm > 0 else math.inf


def effort(update: str, train: TrainSettings, first: int, steps: int, total: int) -> float:
    """Return the divisor of a norm before comparison: for a delta its steps, each weighted by its
    learning rate; for a mean gradient 1.

    Division by plain steps would let warm-up set a limit that later work must exceed.
    """
    return 1.0 if update == "gradient" else full_steps(train, first, steps, total)


def by_effort(norm: float, effort_there: float, effort_here: float) -> float:
    """Return the norm by effort of a contribution of `effort_there`, for comparison with a
    contribution of `effort_here`: the largest plausible value.

    The steps of a task partly undo each other, so norms grow with something between the square root
    of the steps and the steps themselves. Divided by its steps alone, the norm of an honest task
    with a tenth of the steps stood out by up to a factor of three.
    """
    return (
        norm / effort_there
        if effort_here >= effort_there
        else norm / math.sqrt(effort_there * effort_here)
    )


def voices(peers: Iterable[P], most: int, norm: Callable[[P], float]) -> list[float]:
    """Return one norm for each volunteer, the median of its newest `VOICE_OF`, so that many
    machines or tasks have no more influence than one.

    The first field of each of `peers`, newest first, is its volunteer; `norm` returns the norm by
    effort, and is called only for the newest `most` volunteers.
    """
    by_account: dict[str, list[P]] = {}
    for peer in peers:
        peers_of_account = by_account.get(peer[0])
        if peers_of_account is None:
            if len(by_account) < most:
                by_account[peer[0]] = [peer]
        elif len(peers_of_account) < VOICE_OF:
            peers_of_account.append(peer)
    return [median([norm(peer) for peer in own_peers]) for own_peers in by_account.values()]


def cohort_limit(cohort: Sequence[float], settings: ValidationSettings) -> float:
    """Return the norm limit: median + max(norm_limit x 1.4826 MAD, norm_room x median)."""
    middle = median(cohort)
    spread = median(abs(norm - middle) for norm in cohort)
    return middle + max(settings.norm_limit * MAD_TO_SIGMA * spread, settings.norm_room * middle)


def least(train: TrainSettings, effort: float, steps: int, parameters: int) -> float:
    """Return the L2 norm below which an update by Adam or Muon counts as no work; 0 if unknown.

    `effort` is in steps at the full learning rate.
    """
    if train.optimizer == "sgd":
        return 0.0
    return ADAM_LEAST * train.lr * effort / math.sqrt(max(1, steps)) * math.sqrt(parameters)


def _rejected(reason: Reason, message: str) -> Judgement:
    return Judgement(state="rejected", reason=reason.value, message=message)


def _content(evidence: Evidence) -> Judgement | None:
    """Return the rejection of a contribution that is bad by itself; None for a usable
    contribution.
    """
    submit, measurement = evidence.submit, evidence.measurement
    if submit.steps != evidence.task_steps or submit.samples != evidence.task_samples:
        return _rejected(
            Reason.STEPS,
            f"the task is {evidence.task_steps} steps over {evidence.task_samples} samples, the "
            f"submission claims {submit.steps} over {submit.samples}",
        )
    if submit.base_version != evidence.base_version:
        return _rejected(
            Reason.STALE,
            f"trained from version {submit.base_version}, the lease was bound to "
            f"{evidence.base_version}",
        )
    if measurement.problem:
        return _rejected(Reason.FRAME, measurement.problem)
    if not measurement.finite:
        return _rejected(
            Reason.NOT_FINITE,
            "the update holds NaN or infinity: the training diverged, or memory is bad",
        )
    if measurement.norm == 0.0:
        return _rejected(
            Reason.EMPTY, "the update changes nothing: the weights came back as they were sent"
        )
    if evidence.replayed:
        return _rejected(Reason.REPLAY, "the same bytes were submitted for another task")
    return None


def _loss(evidence: Evidence, settings: ValidationSettings) -> Judgement | None:
    last = evidence.submit.loss_last
    if last is None:
        return None
    if not math.isfinite(last) or last < 0:
        return _rejected(Reason.LOSS, f"a loss of {last} is impossible")
    if (
        evidence.loss is not None
        and evidence.loss > 0
        and last > settings.loss_limit * evidence.loss
    ):
        return _rejected(
            Reason.LOSS,
            f"the loss {last:.3f} is more than {settings.loss_limit:g} times the global one "
            f"({evidence.loss:.3f})",
        )
    return None


def _norm(
    evidence: Evidence, settings: ValidationSettings, train: TrainSettings, plan: Plan
) -> Judgement | float:
    """Return a rejection, or the factor that scales the contribution to its cohort."""
    norm, steps = evidence.measurement.norm, evidence.task_steps
    momentum, most_momentum = evidence.measurement.momentum, MOMENTUM_REACH * train.clip_norm
    if momentum > most_momentum * (1 + ROUNDING):
        return _rejected(
            Reason.NORM,
            f"the momentum changes by {momentum:.3g}; gradients clipped to {train.clip_norm:g} "
            f"cannot change it by more than {most_momentum:.3g}",
        )
    if plan.update == "delta":
        most = reach(train, steps, evidence.parameters)
        if norm > most:
            return _rejected(
                Reason.NORM,
                f"the update has norm {norm:.3g}; {steps} steps at lr {train.lr:g} cannot "
                f"exceed {most:.3g}",
            )
        if norm < least(train, evidence.effort, steps, evidence.parameters):
            return _rejected(
                Reason.EMPTY,
                f"the update has norm {norm:.3g}: {steps} steps at lr {train.lr:g} change a model "
                "more than that",
            )
    if not evidence.cohort:
        return 1.0
    per_step, limit = norm / evidence.effort, cohort_limit(evidence.cohort, settings)
    enough = len(evidence.cohort) >= COHORT_MIN
    if enough and per_step < COHORT_LEAST * median(evidence.cohort):
        return _rejected(
            Reason.NORM,
            f"the norm a step, {per_step:.3g}, is far below that of other volunteers "
            f"({median(evidence.cohort):.3g})",
        )
    if per_step <= limit:
        return 1.0
    if enough and per_step > settings.clip_until * limit:
        return _rejected(
            Reason.NORM,
            f"the norm a step, {per_step:.3g}, is far above that of other volunteers (limit "
            f"{limit:.3g})",
        )
    return limit / per_step


def judge(
    evidence: Evidence, settings: ValidationSettings, train: TrainSettings, plan: Plan
) -> Judgement:
    """Return the verdict, with a reason for the volunteer."""
    if wrong := _content(evidence) or _loss(evidence, settings):
        return wrong
    bounded = _norm(evidence, settings, train, plan)
    if isinstance(bounded, Judgement):
        return bounded
    gap = evidence.head - evidence.base_version
    weight = staleness_weight(plan, gap)
    if weight <= 0.0 and plan.in_flight == "cancel":
        return Judgement(
            state="superseded",
            reason=Reason.STALE.value,
            message=f"version {evidence.head} was merged meanwhile; {PAID}",
        )
    if weight <= 0.0:
        return _rejected(
            Reason.STALE,
            f"{gap} versions were merged since it began, at most {plan.max_staleness} are "
            "allowed: nothing is counted against you",
        )
    message = (
        "accepted"
        if bounded == 1.0
        else f"accepted, scaled by {bounded:.2f} to the size of its cohort"
    )
    return Judgement(state="accepted", message=message, weight=weight, clip=bounded)
