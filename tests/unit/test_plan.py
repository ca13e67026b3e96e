"""Plans: presets work as they are, mistakes get a sentence, triggers and weights do what the text says."""

from __future__ import annotations

import math
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.merge.plan import (
    Pending,
    Phase,
    Plan,
    Ready,
    Term,
    in_phase,
    phase_index,
    plan,
    quorum_of,
    ready,
    staleness_weight,
    weigh,
)
from coordinator.merge.presets import PRESETS
from shared.errors import InvalidPlan

NAMED = {
    *("fedavg", "fedprox", "fedavgm", "fedadam", "fedyogi", "diloco", "fedbuff", "fedasync"),
    *("async-diloco", "gradient-average", "sync-sgd", "async-sgd"),
}

# ------------------------------------------------------------------ presets


def test_the_strategies_of_the_design_are_all_there() -> None:
    assert set(PRESETS) >= NAMED


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_preset_works_as_it_is_and_survives_storage(name: str) -> None:
    found = plan({"preset": name})
    assert found.preset == name
    assert plan(msgspec.to_builtins(found)) == found
    assert msgspec.json.decode(msgspec.json.encode(found), type=Plan) == found
    for version in (0, 59, 60, 10_000):
        assert in_phase(found, phase_index(found, version, 0)).phases == ()


def test_an_empty_table_is_fedavg() -> None:
    assert plan({}) == plan({"preset": "fedavg"}) == Plan()


def test_any_key_of_a_preset_can_be_overridden() -> None:
    found = plan({"preset": "diloco", "quorum": 5, "lr": 0.5, "codec": "int4", "shards": 4})
    assert (found.quorum, found.lr, found.codec, found.shards) == (5, 0.5, "int4", 4)
    assert (found.optimizer, found.momentum) == ("nesterov", 0.9)


def test_another_optimizer_brings_no_momentum_of_the_presets() -> None:
    found = plan({"preset": "diloco", "optimizer": "adam", "lr": 0.003})
    assert (found.optimizer, found.momentum) == ("adam", 0.0)


def test_s4s_table_brings_its_own_window() -> None:
    assert plan({"table": "s4"}).max_staleness == 200
    assert plan({"table": "s4", "max_staleness": 90}).max_staleness == 90


# ------------------------------------------------------------------ mistakes


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        ({"preset": "dilocco"}, 'unknown preset "dilocco": did you mean "diloco"?'),
        ({"preset": "xyz"}, "known are fedavg, fedprox"),
        ({"preset": ["fedavg"]}, "unknown preset"),
        ({"qurom": 3}, 'unknown key "qurom" in [plan]: did you mean "quorum"?'),
        ({"aggregate": "meen"}, 'aggregate = "meen" is unknown: did you mean "mean"?'),
        ({"codec": "int9"}, 'did you mean "int8"?'),
        ({"quorum": 0}, "[plan] quorum: expected a whole number of at least 1"),
        ({"quorum": "3"}, "[plan] quorum: expected a whole number, not a text"),
        ({"quorum": True}, "[plan] quorum: expected a whole number"),
        ({"lr": 0.0}, "[plan] lr: expected a number above 0.0"),
        ({"lr": math.nan}, "[plan] lr = nan is not a number"),
        ({"deadline_seconds": math.inf}, "deadline_seconds = inf is not a number"),
        ({"optimizer": "adam"}, "the learning rate is missing"),
        ({"update": "gradient"}, "the learning rate is missing"),
        ({"optimizer": "nesterov", "lr": 0.7}, "set momentum = 0.9"),
        ({"optimizer": "adam", "lr": 0.1, "momentum": 0.9}, "set beta1 instead"),
        ({"min_contributions": 5}, "lower min_contributions or raise quorum"),
        ({"max_staleness": 0}, 'set in_flight = "cancel"'),
        ({"max_staleness": 0, "quorum": 1, "in_flight": "cancel"}, "raise quorum or max_staleness"),
        ({"preset": "gradient-average", "deadline_seconds": 0}, "set deadline_seconds, e.g. 300"),
        ({"table": "s4", "max_staleness": 500}, "set it to 200 or less"),
        ({"damping": True, "table": "constant"}, 'set table = "polynomial"'),
        ({"in_flight": "redo"}, 'set in_flight = "continue"'),
        ({"preset": "sync-sgd", "prox_mu": 0.1}, "leave it out"),
        ({"pull_every": 4}, "leave both at 0 and set [task] local_steps instead"),
        (
            {"quorum": 3000, "max_staleness": 1},
            "set quorum to 2048 or less, or raise max_staleness",
        ),
        ({"window": 4}, 'belongs to optimizer = "delayed-nesterov"'),
        ({"aggregate": "krum"}, "needs quorum >= 5 to leave out a bad one, not 3"),
        ({"aggregate": "median", "quorum": 2}, 'set aggregate = "norm-clip"'),
        ({"aggregate": "trimmed-mean"}, "set trim = 0.34 or more"),
        ({"aggregate": "krum", "quorum": 9, "byzantine": 0.1}, "set byzantine = 0.12 or more"),
        ({"aggregate": "median", "codec": "topk-int4"}, 'set codec = "int4"'),
        ({"phases": 5}, "[plan] phases: expected a list"),
        ({"phases": [3]}, "[plan] phases[0]: expected a table"),
        ({"phases": [{"until_version": 3}]}, 'did you mean "until_versions"?'),
        ({"phases": [{"overrides": {"lr": 0.1}}]}, "phase 1 never ends: give it until_versions"),
        (
            {"phases": [{"until_versions": 3, "overrides": {"lrr": 0.1}}]},
            'unknown key "lrr" in phase 1 of [plan]: did you mean "lr"?',
        ),
        (
            {"phases": [{"until_versions": 3, "overrides": {"shards": 2}}]},
            'phase 1 cannot override "shards": it holds for the whole run',
        ),
        (
            {"phases": [{"until_versions": 3, "overrides": {"in_flight": "redo"}}]},
            'phase 1 of [plan]: in_flight = "redo"',
        ),
    ],
)
def test_a_mistake_gets_a_sentence(raw: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidPlan, match=re.escape(sentence)):
        plan(raw)


def test_what_a_sentence_advises_is_accepted() -> None:
    plan({"aggregate": "trimmed-mean", "trim": 0.34})
    plan({"aggregate": "krum", "quorum": 9, "byzantine": 0.12})
    plan({"aggregate": "krum", "quorum": 5})
    plan({"aggregate": "median", "quorum": 3})
    plan({"aggregate": "norm-clip", "quorum": 2})
    plan({"max_staleness": 0, "in_flight": "cancel"})
    plan({"table": "s4", "max_staleness": 200})


ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=10),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=5), st.integers(), max_size=2),
)


@given(
    st.dictionaries(
        st.sampled_from(Plan.__struct_fields__) | st.text(max_size=8), ANYTHING, max_size=4
    )
)
def test_any_table_is_a_plan_or_a_sentence(raw: dict[str, Any]) -> None:
    try:
        found = plan(raw)
    except InvalidPlan:
        return
    assert plan(msgspec.to_builtins(found)) == found


# ------------------------------------------------------------------ phases


def test_diloco_begins_with_plain_averaging_at_few_local_steps() -> None:
    whole = plan({"preset": "diloco"})
    warm, later = (in_phase(whole, phase_index(whole, v, 0)) for v in (59, 60))
    assert (warm.optimizer, warm.lr, warm.momentum, warm.local_steps) == ("sgd", 1.0, 0.0, 10)
    assert (later.optimizer, later.lr, later.momentum, later.local_steps) == (
        "nesterov",
        0.7,
        0.9,
        0,
    )


PHASES = plan(
    {
        "phases": [
            {"until_versions": 10, "overrides": {"quorum": 5}},
            {
                "until_tokens": 1000,
                "until_slope": 0.01,
                "slope_window": 3,
                "overrides": {"quorum": 6},
            },
        ]
    }
)


FLAT, FALLING = (
    (9.0, 2.0, 1.99, 1.981),
    (9.0, 2.0, 1.99, 1.98),
)  # by 0.95 % and by 1 % over the last three


@pytest.mark.parametrize(
    ("version", "tokens", "losses", "quorum"),
    [
        (0, 0, (), 5),
        (9, 10**9, FLAT, 5),  # conditions of a later phase do not end an earlier one
        (10, 999, (), 6),
        (10, 999, FLAT, 6),  # measured before it began
        (10, 1000, (), 3),
    ],
)
def test_a_phase_ends_at_the_first_of_its_conditions(
    version: int, tokens: int, losses: tuple[float, ...], quorum: int
) -> None:
    index = phase_index(PHASES, version, tokens, losses)
    assert in_phase(PHASES, index).quorum == quorum


@pytest.mark.parametrize(
    ("losses", "index"),
    [((), 1), (FLAT[:2], 1), (FLAT, 2), (FALLING, 1), ((1.0, 1.0, 1.5), 2), ((0.0, 0.0, 0.0), 2)],
)
def test_a_phase_ends_when_the_loss_hardly_falls_over_its_last_evaluations(
    losses: tuple[float, ...], index: int
) -> None:
    assert phase_index(PHASES, 12, 0, losses, reached=1) == index


def test_a_phase_that_is_over_does_not_come_back() -> None:
    assert phase_index(PHASES, 21, 0, FALLING) == 1
    assert phase_index(PHASES, 21, 0, FALLING, reached=2) == 2
    assert phase_index(PHASES, 5, 0, FALLING, reached=2) == 2
    assert in_phase(PHASES, 2).quorum == 3


def test_a_phase_may_end_by_its_loss_alone() -> None:
    found = plan({"phases": [{"until_slope": 0.01, "overrides": {"quorum": 5}}]})
    assert [phase_index(found, 99, 10**9, [2.0] * count) for count in (4, 5)] == [0, 1]


@given(
    st.integers(0, 30),
    st.integers(0, 2000),
    st.lists(st.floats(-9, 9), max_size=6),
    st.integers(0, 2),
)
def test_phases_only_go_on(version: int, tokens: int, losses: list[float], reached: int) -> None:
    assert phase_index(PHASES, version, tokens, losses, reached) >= reached


def test_a_phase_may_change_the_kind_of_update() -> None:
    gradients = {"update": "gradient", "optimizer": "adam", "lr": 0.001, "tau": 1e-8}
    whole = plan(
        {
            "preset": "diloco",
            "phases": [{"until_tokens": 10**6, "overrides": gradients | {"momentum": 0}}],
        }
    )
    assert in_phase(whole, phase_index(whole, 0, 0)).update == "gradient"
    assert in_phase(whole, phase_index(whole, 0, 10**6)).update == "delta"


def test_a_phase_is_a_plain_value() -> None:
    assert Phase(until_versions=3) == Phase(until_versions=3)


# ------------------------------------------------------------------ when


@pytest.mark.parametrize(
    ("pending", "expected"),
    [
        (Pending(count=0, live_workers=5), Ready(now=False, needs=3, deadline_in_s=None)),
        (
            Pending(count=1, waited_s=108, live_workers=5),
            Ready(now=False, needs=2, deadline_in_s=192),
        ),
        (
            Pending(count=3, waited_s=1, live_workers=5),
            Ready(now=True, needs=0, deadline_in_s=299),
        ),
        # Two volunteers alone still merge, and one too.
        (Pending(count=2, live_workers=2), Ready(now=True, needs=0, deadline_in_s=300)),
        (Pending(count=1, live_workers=2), Ready(now=False, needs=1, deadline_in_s=300)),
        (Pending(count=1, live_workers=1), Ready(now=True, needs=0, deadline_in_s=300)),
        (Pending(count=1, live_workers=0), Ready(now=True, needs=0, deadline_in_s=300)),
        (
            Pending(count=1, waited_s=300, live_workers=5),
            Ready(now=True, needs=2, deadline_in_s=0),
        ),
        (
            Pending(count=1, waited_s=9999, live_workers=5),
            Ready(now=True, needs=2, deadline_in_s=0),
        ),
    ],
)
def test_merging_waits_for_the_count_or_the_deadline(pending: Pending, expected: Ready) -> None:
    assert ready(plan({"quorum": 3, "deadline_seconds": 300}), pending) == expected


def test_enough_work_merges_before_the_count() -> None:
    wants = plan({"quorum": 10, "work_target": 100, "min_contributions": 2})
    assert not ready(wants, Pending(count=2, work=99, live_workers=20)).now
    assert ready(wants, Pending(count=2, work=100, live_workers=20)).now
    alone = ready(wants, Pending(count=1, work=500, waited_s=1e6, live_workers=20))
    assert alone == Ready(now=False, needs=9, deadline_in_s=None)


def test_without_a_deadline_only_the_count_decides() -> None:
    wants = plan({"quorum": 3, "deadline_seconds": 0})
    waiting = ready(wants, Pending(count=2, waited_s=1e9, live_workers=9))
    assert waiting == Ready(now=False, needs=1, deadline_in_s=None)


def test_fedbuff_fills_a_buffer_of_half_the_workers() -> None:
    wants = plan({"preset": "fedbuff"})
    assert [quorum_of(wants, live) for live in (0, 1, 2, 3, 8, 9)] == [1, 1, 2, 2, 4, 5]


@pytest.mark.parametrize("name", ["fedasync", "async-diloco", "async-sgd"])
def test_async_plans_merge_every_arrival(name: str) -> None:
    wants = in_phase(plan({"preset": name}), 99)
    assert ready(wants, Pending(count=1, live_workers=100)).now


@given(st.sampled_from(sorted(PRESETS)), st.integers(0, 50), st.integers(0, 60))
def test_a_merge_never_waits_for_more_than_live(name: str, live: int, count: int) -> None:
    found = ready(plan({"preset": name}), Pending(count=count, live_workers=live))
    assert found.now == (found.needs == 0)
    assert count + found.needs <= max(1, live, count)


# ------------------------------------------------------------------ how much


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ({"max_staleness": 3}, {0: 1, 1: 0.75, 3: 0.25, 4: 0}),
        ({"table": "s4"}, {0: 1, 50: 1, 51: 149 / 150, 125: 0.5, 200: 0, 201: 0}),
        ({"table": "polynomial"}, {0: 1, 3: 0.5, 8: 1 / 3, 11: 0}),
        ({"table": "hinge"}, {0: 1, 4: 1, 5: 1 / 11, 6: 1 / 21, 11: 0}),
        ({"table": "constant"}, {0: 1, 10: 1, 11: 0}),
        ({"table": "inverse"}, {0: 1, 1: 1, 2: 0.5, 10: 0.1, 11: 0}),
    ],
)
def test_weight_tables(raw: dict[str, Any], expected: dict[int, float]) -> None:
    wants = plan(raw)
    assert {gap: staleness_weight(wants, gap) for gap in expected} == pytest.approx(expected)


@given(st.sampled_from(["linear", "s4", "polynomial", "hinge", "constant", "inverse"]))
def test_a_later_contribution_never_counts_more(table: str) -> None:
    wants = plan({"table": table})
    weights = [staleness_weight(wants, gap) for gap in range(230)]
    assert weights[0] == 1
    assert weights == sorted(weights, reverse=True)
    assert weights[-1] == 0


def test_a_base_that_does_not_exist_yet_is_refused() -> None:
    with pytest.raises(ValueError, match="2 versions in the future"):
        staleness_weight(Plan(), -2)


def test_weight_is_work_times_staleness_times_trust() -> None:
    found = weigh(
        plan({"max_staleness": 3}),
        [Term(work=50), Term(work=10, gap=1), Term(work=50, trust=0.5), Term(work=50, gap=9)],
    )
    assert list(found.weights) == [50, 7.5, 25, 0]
    assert (found.scale, found.work) == (1, 110)


def test_with_damping_a_single_late_arrival_moves_less() -> None:
    late = [Term(work=50, gap=3)]
    assert weigh(plan({"preset": "fedasync"}), late).scale == pytest.approx(0.5)
    assert weigh(plan({"preset": "fedavg"}), late).scale == 1
    assert weigh(plan({"preset": "async-sgd"}), late).scale == pytest.approx(1 / 3)


def test_fedbuff_divides_by_the_work_and_not_by_the_damped_weights() -> None:
    """theta <- theta - lr / B x sum w(s) delta (Nguyen et al. 2022), with equal work."""
    found = weigh(plan({"preset": "fedbuff"}), [Term(work=9, gap=0), Term(work=9, gap=3)])
    share = [weight / sum(found.weights) * found.scale for weight in found.weights]
    assert share == pytest.approx([0.5 * 1, 0.5 * 0.5])


@pytest.mark.parametrize("name", ["fedbuff", "fedasync", "async-diloco"])
def test_async_plans_begin_in_step_with_most_of_the_workers(name: str) -> None:
    """From nothing they ended no better than one worker alone (docs/experiments.md)."""
    warm = in_phase(plan({"preset": name}), 0)
    assert [quorum_of(warm, live) for live in (1, 2, 4, 8)] == [1, 2, 3, 4]
    assert not warm.overlap
    assert weigh(warm, [Term(work=9, gap=1)] * 2, live_workers=4).scale == 0.5


def test_arrivals_may_move_by_their_share_of_the_workers() -> None:
    warm = plan({"preset": "fedasync", "arrival_scale": "sqrt", "phases": []})
    assert weigh(warm, [Term(work=9)], live_workers=4).scale == pytest.approx(0.5)
    assert weigh(warm, [Term(work=9)] * 4, live_workers=4).scale == 1
    assert weigh(warm, [Term(work=9)] * 9, live_workers=4).scale == 1
    assert weigh(plan({}), [Term(work=9)] * 3, live_workers=8).scale == pytest.approx(3 / 8)
    assert weigh(plan({}), [Term(work=9)] * 3, live_workers=2).scale == 1


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_impossible_work_or_trust_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="negative or not finite"):
        weigh(Plan(), [Term(work=value)])
    with pytest.raises(ValueError, match="negative or not finite"):
        weigh(Plan(), [Term(work=1, trust=value)])


def test_when_all_are_too_late_nothing_counts() -> None:
    found = weigh(plan({"preset": "fedasync"}), [Term(work=5, gap=99)])
    assert (list(found.weights), found.scale, found.work) == ([0.0], 1.0, 0.0)
