"""Checks of a plan; each error names the mistake and a value that works."""

from __future__ import annotations

import math

from coordinator.plan.plan_tables import Plan
from coordinator.plan.presets import PRESETS
from shared.errors import InvalidPlan
from shared.nearest_name import hint
from shared.protocol.limits import PARTS_MAX
from shared.text import escaped

BATCH_MAX = 1024  # contributions of one merge


def check_preset(name: object) -> str:
    """Return the preset's name. Raises InvalidPlan, naming the nearest preset."""
    if not isinstance(name, str) or name not in PRESETS:
        raise InvalidPlan(f"unknown preset {_shown(name)}: {hint(name, PRESETS)}")
    return name


def check(plan: Plan) -> None:
    """Raise InvalidPlan for keys that cannot work together, or that waste the volunteers' work."""
    for applies, sentence in (*_timing_rules(plan), *_update_rules(plan), *_robust_rules(plan)):
        if applies:
            raise InvalidPlan(sentence)


def check_steps(plan: Plan, steps: int, max_steps: int) -> None:
    """Raise InvalidPlan when tasks of `steps` steps cannot be divided into gradients, or give too
    many of them. `max_steps` is the most steps of a task; 0 = every task has `steps` steps.
    """
    interval, most = plan.gradient_every, max(steps, max_steps)
    if plan.update != "gradient" or not interval:
        return
    pull = min(plan.pull_every or most, most)
    own_versions = -(-pull // interval) - 1
    rules = (
        (
            not max_steps and steps % interval > 0,
            f"local_steps = {steps} is no multiple of gradient_every = {interval}, so the last "
            "gradient of a task would "
            f"hold fewer mini-batches: set local_steps = {-(-steps // interval) * interval}, or "
            "another gradient_every",
        ),
        (
            most > PARTS_MAX * interval,
            f"a task of {most} steps with gradient_every = {interval} would "
            f"submit more than {PARTS_MAX} gradients: raise gradient_every, or lower "
            "local_steps (max_steps)",
        ),
        (
            own_versions > plan.max_staleness,
            f"with pull_every = {plan.pull_every} a volunteer computes up to {pull} steps on one "
            f"version and submits a gradient every {interval}: merges of the earlier gradients "
            f"make the last one up to {own_versions} versions old, more than max_staleness = "
            f"{plan.max_staleness}: set pull_every = {(plan.max_staleness + 1) * interval}, or "
            "raise max_staleness",
        ),
    )
    for applies, sentence in rules:
        if applies:
            raise InvalidPlan(sentence)


def _timing_rules(plan: Plan) -> tuple[tuple[bool, str], ...]:
    endless = plan.quorum > 1 and not plan.deadline_seconds and not plan.work_target
    alone = plan.quorum == 1 and not plan.quorum_share
    return (
        (
            plan.min_contributions > plan.quorum and not plan.quorum_share,
            f"min_contributions = {plan.min_contributions} is above quorum = {plan.quorum}, so the "
            "deadline could never merge with fewer: lower min_contributions or raise quorum",
        ),
        (
            plan.quorum > BATCH_MAX * (plan.max_staleness + 1),
            f"quorum = {plan.quorum} is too large for max_staleness = {plan.max_staleness}: a "
            f"merge takes {BATCH_MAX} contributions, and the others would be too old before their "
            f"turn: set quorum to {BATCH_MAX * (plan.max_staleness + 1)} or less, or raise "
            "max_staleness",
        ),
        (
            plan.max_staleness == 0 and plan.in_flight == "continue",
            "max_staleness = 0 discards all work in flight at every merge: set in_flight = "
            '"cancel" (or "redo" for single gradients), or allow max_staleness of 1 or more',
        ),
        (
            plan.max_staleness == 0 and alone and plan.in_flight != "redo",
            "quorum = 1 with max_staleness = 0 lets one worker at a time make progress and "
            "discards the others' work: raise quorum or max_staleness",
        ),
        (
            endless and plan.in_flight != "continue",
            f"quorum = {plan.quorum} without a deadline waits as long as a worker is paused: "
            "set deadline_seconds, e.g. 300",
        ),
        (
            plan.table == "s4" and plan.max_staleness > 200,
            f'table = "s4" gives no weight above 200 versions, so max_staleness = '
            f"{plan.max_staleness} would pay for work that is never merged: set it to 200 or less",
        ),
        (
            plan.table == "constant" and plan.damping,
            'damping needs a table that falls with staleness: set table = "polynomial", or '
            "damping = false",
        ),
    )


def _update_rules(plan: Plan) -> tuple[tuple[bool, str], ...]:
    gradient = plan.update == "gradient"
    momentum = plan.optimizer in ("nesterov", "delayed-nesterov")
    return (
        (
            plan.in_flight == "redo" and not gradient,
            'in_flight = "redo" recomputes one mini-batch, and a delta has many steps: '
            'set in_flight = "continue", or update = "gradient"',
        ),
        (
            plan.prox_mu > 0 and gradient,
            "prox_mu pulls local steps towards the base, and a gradient has none: leave it out, or "
            'set update = "delta"',
        ),
        (
            not gradient and (plan.gradient_every > 0 or plan.pull_every > 0),
            "gradient_every and pull_every are for gradients; with deltas leave both at 0 and "
            "set [task] "
            'local_steps instead, or update = "gradient"',
        ),
        (
            momentum and plan.momentum == 0,
            f'optimizer = "{plan.optimizer}" without momentum is plain sgd: set momentum = 0.9, or '
            'optimizer = "sgd"',
        ),
        (
            plan.momentum > 0 and plan.optimizer in ("adam", "yogi", "adamw"),
            f'optimizer = "{plan.optimizer}" has beta1 and no momentum: set beta1 instead',
        ),
        (
            plan.optimizer == "adamw" and not gradient,
            'optimizer = "adamw" makes the steps of [train] from merged gradients, and a delta has '
            'made them: set optimizer = "adam", or update = "gradient"',
        ),
        (
            plan.optimizer == "adamw" and (plan.lr, plan.beta1, plan.beta2) != (1.0, 0.9, 0.99),
            'optimizer = "adamw" has the rate and the betas of [train]: set them there',
        ),
        (
            plan.window > 0 and plan.optimizer != "delayed-nesterov",
            'window belongs to optimizer = "delayed-nesterov": leave it out',
        ),
    )


def _robust_rules(plan: Plan) -> tuple[tuple[bool, str], ...]:
    # A small quorum is allowed if `aggregate_from` keeps the rule away from few contributions.
    rule, quorum = plan.aggregate, max(plan.quorum, plan.aggregate_from)
    least = 5 if rule in ("krum", "multi-krum") else 3
    capped = rule not in ("mean", "norm-clip") and quorum < least and not plan.quorum_share
    nothing_out = rule in ("krum", "multi-krum", "trimmed-mean") and (
        int((plan.trim if rule == "trimmed-mean" else plan.byzantine) * quorum) == 0
    )
    key = "trim" if rule == "trimmed-mean" else "byzantine"
    return (
        (
            capped,
            f'aggregate = "{rule}" compares contributions and needs quorum >= {least} to leave out '
            f"a bad one, not {quorum}: raise quorum, or set aggregate = "
            f"{chr(34)}{'median' if quorum >= 3 else 'norm-clip'}{chr(34)}",
        ),
        (
            nothing_out and not plan.quorum_share,
            f'aggregate = "{rule}" leaves no contribution out of {quorum}: {key} x quorum is below '
            f"1; set {key} = {math.ceil(100 / quorum) / 100} or more, or raise quorum",
        ),
    )


def _shown(value: object) -> str:
    return f'"{escaped(value)}"'
