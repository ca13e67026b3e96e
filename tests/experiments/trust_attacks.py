"""Attacks on a run by a hostile minority that knows the rules and the honest updates of a round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tests.experiments.digits import Weights

LITTLE = 1.5  # standard deviations
INNER = 0.3  # of the mean
EDGE = 0.995  # of the largest norm that is let through whole


@dataclass(kw_only=True)
class Scene:
    """All that an attacker knows when it submits."""

    who: int
    honest: Sequence[Weights]  # updates of this round
    own: Callable[[], Weights]  # what it would send if it were honest
    part: Callable[[int], Weights]  # the same of so many steps
    elsewhere: Callable[[], Weights]  # of other samples than those of its task
    backdoor: Callable[[], Weights]
    whole: Callable[[], Weights]  # its own update with the buffers
    merged: Weights | None  # the last step of the model
    limit: float  # norm that is let through whole, as far as it can be known
    steps: int
    rng: np.random.Generator
    last: dict[int, Weights] = field(default_factory=dict)  # what each sent first
    shared: dict[str, Weights] = field(default_factory=dict)  # among the hostile, in this round


Attack = Callable[[Scene], Weights]


def flat(update: Weights) -> NDArray[np.float64]:
    return np.concatenate([np.ravel(value).astype(np.float64) for value in update.values()])


def norm(update: Weights) -> float:
    return float(np.sqrt(sum(float(np.vdot(v, v)) for v in update.values())))


def scaled(update: Weights, factor: float) -> Weights:
    return {name: (value * np.float32(factor)).astype(np.float32) for name, value in update.items()}


def sized(update: Weights, size: float) -> Weights:
    """The update with another norm."""
    return scaled(update, size / max(1e-30, norm(update)))


def plus(left: Weights, right: Weights, factor: float = 1.0) -> Weights:
    return {name: left[name] + np.float32(factor) * right[name] for name in left}


def mean(updates: Sequence[Weights]) -> Weights:
    return {name: np.mean([u[name] for u in updates], axis=0) for name in updates[0]}


def _usual(scene: Scene) -> float:
    return float(np.median([norm(update) for update in scene.honest]))


def _noise(share: float) -> Attack:
    def make(scene: Scene) -> Weights:
        like = scene.honest[0]
        drawn = {n: scene.rng.normal(size=v.shape).astype(np.float32) for n, v in like.items()}
        return sized(drawn, share * _usual(scene))

    return make


def _copy(scene: Scene) -> Weights:
    """One of them works, the others send the same with a little noise, so that the bytes differ."""
    found = scene.shared.get("copy")
    if found is None:
        scene.shared["copy"] = found = scene.own()
        return found
    return plus(found, sized(_noise(1.0)(scene), 0.01 * norm(found)))


def _again(scene: Scene) -> Weights:
    """Send the first update again and again, a little changed."""
    found = scene.last.get(scene.who) or scene.own()
    return plus(found, sized(_noise(1.0)(scene), 0.01 * norm(found)))


def _merge_again(scene: Scene) -> Weights:
    if scene.merged is None:
        return scene.own()
    found = sized(scene.merged, _usual(scene))
    return plus(found, sized(_noise(1.0)(scene), 0.01 * norm(found)))


def _times(factor: float) -> Attack:
    return lambda scene: scaled(scene.own(), factor)


def _edge(scene: Scene) -> Weights:
    """Send the own update with its sign flipped, as large as the limit allows."""
    return sized(scaled(scene.own(), -1.0), EDGE * scene.limit)


def _backdoor(scene: Scene) -> Weights:
    """Send honest work, and use the rest of the norm limit for the backdoor."""
    own, door = scene.own(), scene.backdoor()
    low, high = 0.0, 100.0
    for _ in range(40):
        middle = (low + high) / 2
        if norm(plus(own, door, middle)) <= EDGE * scene.limit:
            low = middle
        else:
            high = middle
    return plus(own, door, low) if low else sized(plus(own, door), EDGE * scene.limit)


def _inner(scene: Scene) -> Weights:
    return scaled(mean(scene.honest), -INNER)


def _little(scene: Scene) -> Weights:
    middle = mean(scene.honest)
    spread = {n: np.std([u[n] for u in scene.honest], axis=0) for n in middle}
    return {
        n: (middle[n] - LITTLE * np.sign(middle[n]) * spread[n]).astype(np.float32) for n in middle
    }


def _some(share: float) -> Attack:
    def make(scene: Scene) -> Weights:
        return sized(scene.part(max(1, round(share * scene.steps))), _usual(scene))

    return make


def _elsewhere(scene: Scene) -> Weights:
    return scene.elsewhere()


def _hollow(scene: Scene) -> Weights:
    """Its own update without what all have in common: its own samples gain, the model loses."""
    return sized(plus(scene.own(), mean(scene.honest), -1.3), EDGE * scene.limit)


def _buffers(scene: Scene) -> Weights:
    """Honest work with running means of a million: where it has buffers."""
    trained = scene.own()
    found = scene.whole()
    for name, value in found.items():
        if name not in trained and value.dtype.kind == "f":
            found[name] = value + np.float32(1e6)
    return found


ATTACKS: dict[str, Attack] = {
    "noise": _noise(1.0),
    "noise 5 %": _noise(0.05),
    "copy": _copy,
    "own last again": _again,
    "last merge again": _merge_again,
    "sign flip": _times(-1.0),
    "x -2.8": _times(-2.8),
    "to the edge": _edge,
    "backdoor": _backdoor,
    "inner product": _inner,
    "a little": _little,
    "lazy 10 %": _some(0.1),
    "half work": _some(0.5),
    "other data": _elsewhere,
    "hollow": _hollow,
}
BUFFERS: dict[str, Attack] = {"buffers": _buffers}  # of a model that has some
# of a player: nobody's updates are wrong, the games of the hostile are under every attack
GAMES: dict[str, Attack] = {"games of another network": lambda scene: scene.own()}
EVERY = ATTACKS | BUFFERS | GAMES
MIXED, AT_ONCE = "mixed", "all at once"
MAIN = ("noise", "sign flip", "x -2.8", "copy", "lazy 10 %")  # where all would take too long


def attack_of(name: str, who: int, number: int, names: Sequence[str] = tuple(ATTACKS)) -> Attack:
    """The attack of one volunteer in a round. Mixed: each its own; all at once: another each round,
    each begins with another of `names`.
    """
    if name == MIXED:
        return EVERY[names[(2 * who) % len(names)]]
    if name == AT_ONCE:
        return EVERY[names[(2 * who + number) % len(names)]]
    return EVERY[name]
