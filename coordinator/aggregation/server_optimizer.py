"""Server optimisers: the step from an aggregated update to new master weights.

An update is a pseudo-gradient (base - local) or a gradient, so every rule subtracts. Each formula
uses float32 with multiply and add as two steps, so that the same state and update give the same
bytes on every machine; torch's own kernels fuse them if the processor can. The tests compare every
rule with torch's.

`begin` runs once a merge: it advances the counters and computes the numbers of the step. `step`
then runs on each piece, in place, on any thread. The state has one flat float32 array for each slot
of each parameter, zero at first, in a memory-mapped file (`optimizer_state`).

Legend: p weights, g update, m momentum, v second moment, (N,) each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

import numpy as np

from coordinator.aggregation.cohort import Floats
from shared.tensors.slices import aligned
from shared.tensors.spec import Schema, TensorSpec, grid

if TYPE_CHECKING:
    from coordinator.plan.plan_tables import Plan

TAU = {"delta": 1e-3, "gradient": 1e-8}  # tau, added to the divisor of FedAdam and FedYogi
BLOCK = 32 * 1024  # elements: weights, update, state and scratch of a block stay in the cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """Scalar inputs of a server-optimiser step."""

    scale: float = 1.0  # less than 1 for stale updates, or if few of the live workers contributed
    work: float = 1.0  # merged steps, in units of the steps of one full contribution
    workers: int = 1  # live workers


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTerms:
    """Counters after this merge, and the numbers of its step, which all pieces share."""

    counters: Mapping[str, float]
    numbers: Mapping[str, np.float32]


class ServerOptimizer(Protocol):
    """Rule p <- p - f(update, state), built with its hyper-parameters."""

    slots: ClassVar[tuple[str, ...]]  # state arrays the size of the parameters
    counters: ClassVar[tuple[str, ...]]  # single numbers, advanced once a merge

    def begin(self, counters: Mapping[str, float], push: Push) -> StepTerms:
        """Advance the counters (a missing one is zero) and return the step's numbers."""

    def step(
        self, params: Floats, update: Floats, state: Mapping[str, Floats], terms: StepTerms
    ) -> None:
        """Move a piece of the weights and its state (slot -> array), all (N,) float32, in place."""


def server_optimizer(plan: Plan) -> ServerOptimizer:
    """Return the server optimiser of a plan."""
    match plan.optimizer:
        case "sgd":
            return Momentum(plan.lr, plan.momentum, ahead=False) if plan.momentum else Sgd(plan.lr)
        case "nesterov":
            return Momentum(plan.lr, plan.momentum, ahead=True)
        case "delayed-nesterov":
            return DelayedNesterov(plan.lr, plan.momentum, plan.window)
        case "adam" | "yogi" | "adamw":  # with adamw the plan has rate and betas of `[train]`
            return Adaptive(
                plan.lr,
                (plan.beta1, plan.beta2),
                TAU[plan.update],
                bias_correction=plan.bias_correction,
                additive=plan.optimizer == "yogi",
            )


def state_schema(optimizer: ServerOptimizer, schema: Schema) -> Schema:
    """Return the schema of the state for a model's schema, all F32: a flat "slot/tensor" for each
    parameter, and "count/counter" with one element.
    """
    slots = (
        TensorSpec(name=f"{slot}/{spec.name}", shape=(spec.count,), dtype="F32", role="buffer")
        for slot in optimizer.slots
        for spec in schema
        if spec.role == "parameter"
    )
    counters = (
        TensorSpec(name=f"count/{counter}", shape=(1,), dtype="F32", role="buffer")
        for counter in optimizer.counters
    )
    return (*slots, *counters)


@dataclass(frozen=True, slots=True)
class Sgd:
    """Plain steps, p -= lr g; with lr 1 and deltas this is averaging of the models."""

    lr: float
    slots: ClassVar[tuple[str, ...]] = ()
    counters: ClassVar[tuple[str, ...]] = ()

    def begin(self, counters: Mapping[str, float], push: Push) -> StepTerms:
        return _step_terms({}, lr=self.lr * push.scale)

    def step(
        self, params: Floats, update: Floats, state: Mapping[str, Floats], terms: StepTerms
    ) -> None:
        lr = terms.numbers["lr"]
        for _, p, g, t in _blocks(params, update):
            p -= np.multiply(g, lr, out=t)


@dataclass(frozen=True, slots=True)
class Momentum:
    """Momentum, m = mu m + g; then p -= lr m (FedAvgM), or with `ahead` p -= lr (g + mu m)
    (Nesterov).
    """

    lr: float
    momentum: float
    ahead: bool
    slots: ClassVar[tuple[str, ...]] = ("momentum",)
    counters: ClassVar[tuple[str, ...]] = ()

    def begin(self, counters: Mapping[str, float], push: Push) -> StepTerms:
        return _step_terms({}, lr=self.lr * push.scale, mu=self.momentum)

    def step(
        self, params: Floats, update: Floats, state: Mapping[str, Floats], terms: StepTerms
    ) -> None:
        lr, mu = terms.numbers["lr"], terms.numbers["mu"]
        for block, p, g, t in _blocks(params, update):
            m = state["momentum"][block]
            m *= mu
            m += g
            if self.ahead:
                np.multiply(m, mu, out=t)
                t += g
                t *= lr
            else:
                np.multiply(m, lr, out=t)
            p -= t


@dataclass(frozen=True, slots=True)
class DelayedNesterov:
    """Nesterov's rule for merges of few contributions ("pushes"): each push moves the weights by
    its part of the mean, and the momentum moves them once a window.

    Each push, of work a: p -= lr a g / W; b += a g. At the end of a window, with M the sum of its
    work: m = mu m + b / M; p -= lr mu m; b = 0. The pushes of a window therefore add up to one
    Nesterov step on their mean (Liu et al. 2024). A window ends when the work of its pushes amounts
    to W full contributions, and the last push corrects the difference between W and M, so that the
    mean is exactly the work-weighted one. (With a push of 6 steps counted like one of 30, training
    ended worse than one worker alone.)
    """

    lr: float
    momentum: float
    window: int  # full contributions; 0 = as many as there are workers when the window begins
    slots: ClassVar[tuple[str, ...]] = ("momentum", "buffer")
    counters: ClassVar[tuple[str, ...]] = ("mass", "window")

    def begin(self, counters: Mapping[str, float], push: Push) -> StepTerms:
        before = counters.get("mass", 0.0)
        window = counters.get("window", 0.0) if before > 0 else 0.0
        window = window or float(self.window or max(1, push.workers))
        mass = before + push.work
        # The window closes at the push nearest to its end. If it waited for whole contributions, a
        # round with one small push would leave it open, and momentum would act every other round.
        closing = mass + push.work / 2 > window - 1e-3  # 1e-3: float32 rounding of the sum
        after = {"mass": 0.0, "window": 0.0} if closing else {"mass": mass, "window": window}
        return _step_terms(
            after,
            lr=self.lr,
            mu=self.momentum,
            push=push.work * push.scale,
            now=self.lr * push.work * push.scale / window,
            mend=self.lr * (1 / mass - 1 / window) if closing else 0.0,
            share=1 / mass if closing else 0.0,
        )

    def step(
        self, params: Floats, update: Floats, state: Mapping[str, Floats], terms: StepTerms
    ) -> None:
        numbers = terms.numbers
        ahead = numbers["lr"] * numbers["mu"]
        for block, p, g, t in _blocks(params, update):
            m, b = state["momentum"][block], state["buffer"][block]
            p -= np.multiply(g, numbers["now"], out=t)
            b += np.multiply(g, numbers["push"], out=t)
            if numbers["share"]:
                p -= np.multiply(b, numbers["mend"], out=t)
                m *= numbers["mu"]
                m += np.multiply(b, numbers["share"], out=t)
                p -= np.multiply(m, ahead, out=t)
                b.fill(0)


@dataclass(frozen=True, slots=True)
class Adaptive:
    """FedAdam and FedYogi (Reddi et al. 2021): m = b1 m + (1 - b1) g; p -= lr m / (sqrt v + tau).

    Adam: v = b2 v + (1 - b2) g^2. Yogi (`additive`): v -= (1 - b2) g^2 sign(v - g^2). Bias
    correction divides m and v by 1 - b^t first, as torch's Adam does.
    """

    lr: float
    betas: tuple[float, float]
    tau: float
    bias_correction: bool
    additive: bool
    slots: ClassVar[tuple[str, ...]] = ("first", "second")
    counters: ClassVar[tuple[str, ...]] = ("step",)

    def begin(self, counters: Mapping[str, float], push: Push) -> StepTerms:
        count = counters.get("step", 0.0) + 1
        first, second = (1 - beta**count for beta in self.betas) if self.bias_correction else (1, 1)
        return _step_terms(
            {"step": count},
            lr=self.lr * push.scale / first,
            b1=self.betas[0],
            b2=self.betas[1],
            rest1=1 - self.betas[0],
            rest2=1 - self.betas[1],
            root=math.sqrt(second),
            tau=self.tau,
        )

    def step(
        self, params: Floats, update: Floats, state: Mapping[str, Floats], terms: StepTerms
    ) -> None:
        n = terms.numbers
        other = _scratch(params)
        for block, p, g, t in _blocks(params, update):
            m, v = state["first"][block], state["second"][block]
            d = other[: len(p)]
            m *= n["b1"]
            m += np.multiply(g, n["rest1"], out=t)
            np.multiply(g, g, out=t)
            if self.additive:
                np.sign(np.subtract(v, t, out=d), out=d)
                t *= n["rest2"]
                t *= d
                v -= t
            else:
                v *= n["b2"]
                t *= n["rest2"]
                v += t
            np.sqrt(v, out=d)
            d /= n["root"]
            d += n["tau"]
            np.multiply(m, n["lr"], out=t)
            t /= d
            p -= t


def _step_terms(counters: Mapping[str, float], **numbers: float) -> StepTerms:
    return StepTerms(
        counters=counters, numbers={name: np.float32(x) for name, x in numbers.items()}
    )


def _blocks(params: Floats, update: Floats) -> Iterator[tuple[slice, Floats, Floats, Floats]]:
    """Yield each block of a piece with its weights, its update, and scratch of the same length."""
    scratch = _scratch(params)
    for start, stop in grid(len(params), BLOCK):
        block = slice(start, stop)
        yield block, params[block], update[block], scratch[: stop - start]


def _scratch(like: Floats) -> Floats:
    return aligned(min(BLOCK, len(like)))
