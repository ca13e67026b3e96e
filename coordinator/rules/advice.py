"""Advice on run files that are valid but unwise, as sentences for their authors."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.plan.plan_tables import Plan
from shared.protocol.accounts import Device
from shared.protocol.limits import memory_on
from shared.text import counted, printable, size
from shared.workloads.base import TrainSettings

# Outer rates with momentum, on deltas of 30 local steps (docs/decisions/0036-fresh-optimisers.md):
# up to 0.9 the updates kept their direction; at 1.4 they turned back, and the run lowered its rate.
LR_STEADY, LR_UNSTEADY = 0.9, 1.4
MOMENTUM_MIN = 0.5
# Least steps of a learner's task, which begins with a new optimiser. On a 6 x 6 board, tasks of 40
# steps made a player that lost to version 0 (0.2 to 0.4 of the points, three seeds); tasks of 100
# steps made one that won (0.80 to 0.95).
GAME_STEPS = 100
FEW_LEARNT = 0.05  # a smaller share of learnt tokens gets advice
MUCH_PADDING = 0.1  # this share of empty places in windows, or more, gets advice


def too_large(needed: int, devices: Sequence[Device]) -> tuple[str, ...]:
    """Return the advice for a run that needs more memory than any online device has."""
    usable = [device for device in devices if device.memory_bytes > 0 and not device.problem]
    largest = max(usable, key=lambda device: device.memory_bytes, default=None)
    if largest is None or any(memory_on(d.kind, needed) <= d.memory_bytes for d in usable):
        return ()
    return (
        f"no device that is online can hold this run: it needs about {size(needed)} of a GPU or "
        f"{size(memory_on('cpu', needed))} of a computer's memory, and the largest, "
        f"{printable(largest.name, 80)}, has {size(largest.memory_bytes)}. A smaller model, "
        'train = "lora" where all weights are trained, or a shorter context makes it smaller',
    )


def brief_games(unit: str, local_steps: int) -> tuple[str, ...]:
    """Return the advice for a run of games whose learners have too few steps in a task."""
    if unit != "game" or local_steps >= GAME_STEPS:
        return ()
    return (
        f"[task] local_steps = {local_steps}: a learner's optimiser begins afresh in each task, and"
        " a measured player lost to version 0 after tasks of 40 steps (0.2 to 0.4 of the points)"
        f" and beat it after tasks of {GAME_STEPS} (0.80 to 0.95)",
    )


def alone(plan: Plan, *, noise: bool) -> tuple[str, ...]:
    """Return the advice for a run on members' data whose versions may hold one member's change
    alone.
    """
    if noise:
        return ()
    shown = "so that two versions together show what that member's data changed"
    if plan.quorum == 1 and not plan.quorum_share:
        return (
            f"[plan] quorum = 1: each version is one member's change alone, {shown}. A quorum of"
            " several members mixes them ([privacy] adds noise)",
        )
    if plan.min_contributions > 1:
        return ()
    return (
        f"[plan] min_contributions = 1: a version may be one member's change alone, {shown}. "
        "A larger min_contributions waits for so many members ([privacy] adds noise)",
    )


def few_learnt(dataset: str, share: float) -> tuple[str, ...]:
    """Return the advice for dialogues of which few tokens are learnt."""
    if share >= FEW_LEARNT:
        return ()
    return (f'{share:.1%} of the tokens of "{printable(dataset, 80)}" are learnt',)


def long_dialogues(dataset: str, context: int, lengths: Sequence[int]) -> tuple[str, ...]:
    """Return the advice for dialogues that exceed the context, by their lengths in tokens."""
    # the last token of a window is only a target
    count = sum(length > context + 1 for length in lengths)
    if not count:
        return ()
    return (
        f'{count:,} of the {counted(len(lengths), "dialogue")} of "{printable(dataset, 80)}" exceed'
        f" the context of {context:,} tokens, the longest with {max(lengths):,}: training reads"
        " them in parts, and a version is measured without their ends",
    )


def padded(windows: int, context: int, tokens: int) -> tuple[str, ...]:
    """Return the advice for windows that whole dialogues fill badly."""
    share = 1 - tokens / max(1, windows * (context + 1))
    if share < MUCH_PADDING:
        return ()
    return (
        f"{share:.0%} of the windows of {context:,} tokens stay empty, since a dialogue is kept"
        " whole: another context may fit these dialogues better",
    )


def unsteady(plan: Plan, train: TrainSettings, *, trained: bool) -> tuple[str, ...]:
    """Return warnings about a plan whose outer momentum was measured to do harm; `trained` is False
    for a run from random weights.
    """
    if plan.update != "delta" or plan.momentum < MOMENTUM_MIN:
        return ()
    sentences = []
    if plan.lr >= LR_UNSTEADY:
        sentences.append(
            f"[plan] lr = {plan.lr:g} with momentum = {plan.momentum:g} was measured to be "
            f"unstable: at 30 local steps updates agreed with the momentum up to lr {LR_STEADY:g} "
            f"and opposed it at {LR_UNSTEADY:g}, where a run lowers its rate by itself, and ends "
            "at a higher loss than a run that began with a lower rate"
        )
    if train.optimizer != "muon" and not trained:
        sentences.append(
            f'[plan] has momentum = {plan.momentum:g}, and [train] optimizer = "{train.optimizer}" '
            "begins from random weights: measured runs like this ended above one machine alone; "
            'set [train] optimizer = "muon", or [plan] preset = "fedavg"'
        )
    return tuple(sentences)
