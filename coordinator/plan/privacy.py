"""Privacy of a run over members' data: the table `[privacy]`, and the cost of its merges.

Each merge adds Gaussian noise to a sum in which no member counts for more than `clip` (McMahan et
al. 2018, "Learning Differentially Private Recurrent Language Models", with a fixed divisor). A
member may take part in every merge, so sampling makes no merge cheaper: n merges are one Gaussian
mechanism whose noise is divided by the root of n (Dong et al. 2022). The library dp-accounting
computes the exact epsilon of that mechanism (Balle and Wang 2018).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from shared.errors import InvalidRunFile
from shared.programs.installation import missing_extra_error
from shared.protocol.accounts import PrivacySpent
from shared.text import counted
from shared.workloads.base import is_here

if TYPE_CHECKING:
    from coordinator.plan.plan_tables import Plan
    from coordinator.rules.run_file import DataSettings
    from shared.tensors.spec import Schema

LIBRARY = "dp_accounting"
# Largest sensible ratio of the norm of a merge's noise to the largest norm of its sum. Measured on
# digits (docs/experiments.md): a ratio of 1.8 costs a tenth of the progress, 4.6 raises the loss by
# half, 11 leaves nearly no progress.
NOISE_RATIO_MAX = 4.0
MERGES_MAX = 1_000_000  # most merges that a budget is divided into


class PrivacySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Table `[privacy]`: noise in the merges of a run over members' data; `epsilon` 0 = no noise.

    The published versions are (`epsilon`, `delta`)-differentially private: between two data sets
    that differ in the whole data of one member.
    """

    epsilon: Annotated[float, Meta(ge=0, le=1000)] = 0.0  # budget; the run ends before it exceeds
    delta: Annotated[float, Meta(gt=0, lt=1)] = 1e-5
    # largest norm with which a member's updates count in a merge
    clip: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    # Standard deviation of the noise in multiples of one member's largest influence; 0 = what the
    # budget allows over `[stop] versions`.
    noise: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    merges: Annotated[int, Meta(ge=0, le=MERGES_MAX)] = 0  # most merges; 0 = what the budget allows

    @property
    def on(self) -> bool:
        return self.epsilon > 0


def epsilon_after(settings: PrivacySettings, merges: int) -> float:
    """Return the epsilon that this number of merges spends."""
    return _epsilon(settings.noise, settings.delta, merges)


def privacy_spent(settings: PrivacySettings, merges: int) -> PrivacySpent | None:
    """Return the privacy that this number of merges spends; None in a run without noise."""
    if not settings.on:
        return None
    here = is_here(LIBRARY)
    return PrivacySpent(
        epsilon=epsilon_after(settings, merges) if here else None,
        planned=epsilon_after(settings, settings.merges) if here else None,
        budget=settings.epsilon,
        delta=settings.delta,
        merges=merges,
        merges_max=settings.merges,
        noise=settings.noise,
        clip=settings.clip,
    )


@lru_cache(maxsize=1024)
def _epsilon(noise: float, delta: float, merges: int) -> float:
    import numpy as np
    from dp_accounting import get_epsilon_gaussian

    if merges == 0:
        return 0.0
    with np.errstate(divide="ignore"):  # with very much noise, delta alone covers the risk
        return float(get_epsilon_gaussian(noise / math.sqrt(merges), delta))


def merges_within(settings: PrivacySettings) -> int:
    """Return the number of merges that the budget allows, at most `MERGES_MAX`."""
    costs = range(MERGES_MAX + 1)
    return bisect_right(costs, settings.epsilon, key=partial(epsilon_after, settings)) - 1


def fill_in(
    settings: PrivacySettings, versions: int, plan_keys: Collection[str] = ()
) -> PrivacySettings:
    """Return the settings with noise and merges filled in: the least noise that keeps `versions`
    merges within the budget, and the number of merges that the budget allows. `plan_keys` are the
    keys that the run file has in `[plan]`.

    Raises InvalidRunFile for settings that protect nobody or allow no merge, Configuration without
    the library.
    """
    if not settings.on:
        if settings != PrivacySettings():
            raise InvalidRunFile("[privacy] needs epsilon, the budget of the run, such as 8.0")
        return settings
    if settings.clip <= 0:
        raise InvalidRunFile(
            "[privacy] needs clip, the largest norm that a member's updates count with in a merge:"
            " about what an honest update has, such as 1.0"
        )
    for key in sorted({"arrival_scale", "damping"} & {*plan_keys}):
        raise InvalidRunFile(
            f"[plan] {key} sizes the step of a merge, and [privacy]'s noise with it, by who takes"
            " part: take it out, since each merge of such a run is a whole step"
        )
    if settings.noise == versions == 0:
        raise InvalidRunFile(
            "[privacy] divides epsilon over [stop] versions: say how many there will be, or give"
            " noise"
        )
    if not is_here(LIBRARY):
        raise missing_extra_error("[privacy]", "privacy")
    if settings.noise == 0:
        settings = msgspec.structs.replace(settings, noise=_least_noise(settings, versions))
    most, merges = merges_within(settings), max(settings.merges, versions, 1)
    if merges > most:
        raise InvalidRunFile(
            f"[privacy] noise = {settings.noise:g} costs epsilon"
            f" {epsilon_after(settings, merges):.3g} after {counted(merges, 'merge')}, more than"
            f" the budget {settings.epsilon:g}: raise noise, or merge less often ([stop] versions)"
        )
    return msgspec.structs.replace(settings, merges=settings.merges or most)


def noise_advice(settings: PrivacySettings, plan: Plan, parameters: int) -> tuple[str, ...]:
    """Return advice for a run whose noise drowns the members' updates; () for another run."""
    ratio = settings.noise * math.sqrt(parameters) / plan.quorum
    if not settings.on or ratio <= NOISE_RATIO_MAX:
        return ()
    members = math.ceil(ratio * plan.quorum / NOISE_RATIO_MAX)
    return (
        f"[privacy] the noise of a merge is {ratio:,.0f} times as long as the longest sum of the"
        f" updates, so that nothing is learnt: with {members:,}"
        " members in a merge ([plan] quorum) it would be learnt with loss; fewer [stop] versions, a"
        " larger epsilon, or a smaller model (adapters) need fewer",
    )


def check(
    settings: PrivacySettings,
    plan: Plan,
    schema: Schema,
    *,
    data: DataSettings,
    gate: bool,
) -> None:
    """Raise InvalidRunFile for a run that would reveal members' data by another way than the noisy
    sum.
    """
    if not settings.on:
        return
    if data.at != "members":
        raise InvalidRunFile(
            '[privacy] protects data that members keep: it needs [data] at = "members"'
        )
    state = next((spec.name for spec in schema if spec.role != "parameter"), "")
    rules = (
        (plan.update == "delta", f'[plan] preset = "{plan.preset}" sends gradients: take "fedavg"'),
        (
            plan.aggregate == "mean",
            f'[plan] aggregate = "{plan.aggregate}" compares members: take'
            ' "mean", in which [privacy] clip limits each of them',
        ),
        (
            data.best == "mean",
            f'[data] best = "{data.best}" is by losses that members measure: take it out, since'
            " such a run is measured on its example",
        ),
        (not gate, "[evaluation] gate = true tries members' updates one by one: take it out"),
        (
            not state,
            f"the model has statistics of its data ({state}), to which no noise is added:"
            " take a model without them, such as one with group norm in place of batch norm",
        ),
    )
    for holds, sentence in rules:
        if not holds:
            raise InvalidRunFile(f"[privacy] protects the sum of the updates alone, but {sentence}")


def _least_noise(settings: PrivacySettings, merges: int) -> float:
    from dp_accounting import get_sigma_gaussian

    sigma = float(get_sigma_gaussian(settings.epsilon, settings.delta))
    noise = sigma * math.sqrt(merges) * (1 + 1e-9)  # the root of its square may round down
    return math.ceil(noise * 1e6) / 1e6
