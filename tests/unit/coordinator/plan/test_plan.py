"""Plans: presets work as they are, mistakes get a sentence, triggers and weights do what the text
says.
"""

from __future__ import annotations

import math
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.plan.merge_readiness import Pending, Ready, quorum_of, ready
from coordinator.plan.plan import plan
from coordinator.plan.plan_checks import check_steps
from coordinator.plan.plan_tables import Plan
from coordinator.plan.presets import PRESETS
from shared.errors import InvalidPlan
from shared.protocol.limits import PARTS_MAX

NAMED = {
    *("fedavg", "fedprox", "fedavgm", "fedadam", "fedyogi", "diloco", "fedbuff", "fedasync"),
    *("async-diloco", "gradient-average", "sync-sgd", "async-sgd"),
}


def test_the_strategies_of_the_design_are_all_there() -> None:
    assert set(PRESETS) >= NAMED


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_preset_works_as_it_is_and_survives_storage(name: str) -> None:
    found = plan({"preset": name})
    assert found.preset == name
    assert plan(msgspec.to_builtins(found)) == found
    assert msgspec.json.decode(msgspec.json.encode(found), type=Plan) == found


def test_an_empty_table_is_fedavg() -> None:
    assert plan({}) == plan({"preset": "fedavg"}) == Plan()


def test_any_key_of_a_preset_can_be_overridden() -> None:
    found = plan({"preset": "diloco", "quorum": 5, "lr": 0.5, "codec": "int4", "shards": 4})
    assert (found.quorum, found.lr, found.codec, found.shards) == (5, 0.5, "int4", 4)
    assert (found.optimizer, found.momentum) == ("nesterov", 0.8)


def test_another_optimizer_brings_no_momentum_of_the_presets() -> None:
    found = plan({"preset": "diloco", "optimizer": "adam", "lr": 0.003})
    assert (found.optimizer, found.momentum) == ("adam", 0.0)


def test_s4s_table_brings_its_own_window() -> None:
    assert plan({"table": "s4"}).max_staleness == 200
    assert plan({"preset": "fedbuff", "table": "s4"}).quorum_share == 0.6
    assert plan({"table": "s4", "max_staleness": 90}).max_staleness == 90


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        ({"preset": "dilocco"}, 'unknown preset "dilocco": did you mean "diloco"?'),
        ({"preset": "xyz"}, "known: fedavg, fedprox"),
        ({"preset": ["fedavg"]}, "unknown preset"),
        ({"qurom": 3}, 'unknown key "qurom" in [plan]: did you mean "quorum"?'),
        ({"aggregate": "meen"}, '"trimmed-mean", did you mean "mean"?'),
        ({"codec": "int9"}, 'did you mean "int8"?'),
        ({"quorum": 0}, "[plan] quorum: expected a whole number of at least 1"),
        ({"quorum": "3"}, "[plan] quorum: expected a whole number, not a text"),
        ({"quorum": True}, "[plan] quorum: expected a whole number"),
        ({"lr": 0.0}, "[plan] lr: expected a number above 0"),
        ({"lr": math.nan}, "[plan] lr = nan is not a finite number"),
        ({"deadline_seconds": math.inf}, "deadline_seconds = inf is not a finite number"),
        ({"optimizer": "adam"}, "the learning rate is missing"),
        ({"update": "gradient"}, "the learning rate is missing"),
        ({"preset": "sync-sgd", "optimizer": "sgd"}, "the learning rate is missing"),
        ({"optimizer": "adamw"}, 'set optimizer = "adam", or update = "gradient"'),
        ({"preset": "async-sgd", "lr": 0.1}, "has the rate and the betas of [train]: set them"),
        ({"optimizer": "nesterov", "lr": 0.7}, "set momentum = 0.9"),
        ({"optimizer": "delayed-nesterov", "lr": 0.7}, "set momentum = 0.9"),
        ({"optimizer": "adam", "lr": 0.1, "momentum": 0.9}, "set beta1 instead"),
        ({"optimizer": "yogi", "lr": 0.1, "momentum": 0.9}, "set beta1 instead"),
        ({"min_contributions": 5}, "lower min_contributions or raise quorum"),
        ({"max_staleness": 0}, 'set in_flight = "cancel"'),
        ({"max_staleness": 0, "quorum": 1, "in_flight": "cancel"}, "raise quorum or max_staleness"),
        ({"preset": "gradient-average", "deadline_seconds": 0}, "set deadline_seconds, e.g. 300"),
        ({"quorum": 2, "deadline_seconds": 0, "in_flight": "cancel"}, "set deadline_seconds"),
        ({"table": "s4", "max_staleness": 201}, "set it to 200 or less"),
        ({"damping": True, "table": "constant"}, 'set table = "polynomial"'),
        ({"in_flight": "redo"}, 'set in_flight = "continue"'),
        ({"preset": "sync-sgd", "prox_mu": 0.1}, "leave it out"),
        ({"pull_every": 1}, "leave both at 0 and set [task] local_steps instead"),
        ({"gradient_every": 1}, "leave both at 0 and set [task] local_steps instead"),
        (
            {"quorum": 2049, "max_staleness": 1},
            "set quorum to 2048 or less, or raise max_staleness",
        ),
        ({"window": 1}, 'belongs to optimizer = "delayed-nesterov"'),
        ({"aggregate": "krum"}, "needs quorum >= 5 to leave out a bad one, not 3"),
        ({"aggregate": "krum", "quorum": 4}, 'or set aggregate = "median"'),
        ({"aggregate": "krum"}, 'or set aggregate = "median"'),
        ({"aggregate": "krum", "quorum": 2}, 'or set aggregate = "norm-clip"'),
        ({"aggregate": "multi-krum", "quorum": 4}, "needs quorum >= 5"),
        ({"aggregate": "multi-krum", "quorum": 9, "byzantine": 0.1}, "set byzantine = 0.12"),
        ({"aggregate": "krum", "quorum": 5, "byzantine": 0.1}, "set byzantine = 0.2 or more"),
        ({"aggregate": "median", "quorum": 2}, 'set aggregate = "norm-clip"'),
        ({"aggregate": "trimmed-mean"}, "set trim = 0.34 or more"),
        ({"aggregate": "krum", "quorum": 9, "byzantine": 0.1}, "set byzantine = 0.12 or more"),
    ],
)
def test_a_mistake_gets_a_sentence(raw: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidPlan, match=re.escape(sentence)):
        plan(raw)


def test_a_sentence_says_where_in_the_file_and_no_more() -> None:
    with pytest.raises(InvalidPlan, match=r"^max_staleness = 0 discards all work in flight"):
        plan({"max_staleness": 0})
    with pytest.raises(InvalidPlan) as caught:
        plan({"shard_by": "x", "codec": "y" * 1000})
    assert len(caught.value.message) < 400


GRADIENTS = {"preset": "async-sgd"}


@pytest.mark.parametrize(
    ("raw", "steps", "most", "sentence"),
    [
        ({"gradient_every": 3}, 10, 0, "local_steps = 10 is no multiple of gradient_every = 3"),
        ({"gradient_every": 3}, 10, 0, "set local_steps = 12, or"),
        ({"gradient_every": 2}, 2 * PARTS_MAX + 2, 0, f"more than {PARTS_MAX} gradients"),
        ({"gradient_every": 2}, 2, 2 * PARTS_MAX + 1, f"a task of {2 * PARTS_MAX + 1} steps"),
        ({"gradient_every": 1, "pull_every": 0, "max_staleness": 3}, 5, 0, "up to 4 versions old"),
        (
            {"gradient_every": 2, "pull_every": 0, "max_staleness": 1},
            6,
            0,
            "set pull_every = 4, or raise",
        ),
        ({"gradient_every": 1, "pull_every": 3, "max_staleness": 1}, 9, 0, "pull_every = 3 a"),
        ({"gradient_every": 1, "pull_every": 0, "max_staleness": 3}, 50, 0, "pull_every = 0 a"),
        (
            {"gradient_every": 1, "pull_every": 0, "max_staleness": 10},
            1,
            500,  # sized to each worker
            "up to 499 versions old",
        ),
    ],
)
def test_tasks_that_do_not_come_out_even_in_gradients_are_refused(
    raw: dict[str, Any], steps: int, most: int, sentence: str
) -> None:
    wants = plan(GRADIENTS | raw)
    with pytest.raises(InvalidPlan, match=re.escape(sentence)):
        check_steps(wants, steps, most)


def test_tasks_that_come_out_even_in_gradients_are_taken() -> None:
    check_steps(plan(GRADIENTS | {"gradient_every": 3}), 12, 0)
    check_steps(plan(GRADIENTS | {"gradient_every": 3}), 10, 30)  # sized, so cut to fit
    check_steps(plan(GRADIENTS | {"gradient_every": 2, "pull_every": 2}), 2 * PARTS_MAX, 0)
    check_steps(plan(GRADIENTS | {"gradient_every": 1, "pull_every": 0, "max_staleness": 3}), 4, 0)
    check_steps(plan(GRADIENTS | {"pull_every": 80, "max_staleness": 3}), 4, 0)
    check_steps(plan(GRADIENTS | {"pull_every": 4, "max_staleness": 3}), 1, 500)
    check_steps(plan({"preset": "gradient-average"}), 10, 0)
    check_steps(plan({}), 10, 0)


def test_what_a_sentence_advises_is_accepted() -> None:
    plan({"quorum": 2048, "max_staleness": 1})
    plan({"preset": "diloco", "optimizer": "nesterov"})
    plan({"quorum": 1, "deadline_seconds": 0, "in_flight": "cancel"})
    plan({"preset": "sync-sgd", "quorum": 1})
    plan({"aggregate": "krum", "quorum": 5, "byzantine": 0.2})
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


@pytest.mark.parametrize(
    ("count", "quiet_s", "now", "left_s"),
    [
        (3, 0.0, False, 10.0),  # the fourth of four equal machines is about to arrive
        (3, 9.0, False, 1.0),
        (3, 10.0, True, 300.0),  # it does not
        (4, 0.0, True, 300.0),
        (2, 50.0, False, 300.0),  # without a quorum there is no grace
    ],
)
def test_with_a_quorum_it_waits_a_little_for_the_others(
    count: int, quiet_s: float, now: bool, left_s: float
) -> None:
    wants = plan({"quorum": 3, "grace": 0.1})
    pending = Pending(count=count, live_workers=4, quiet_s=quiet_s, round_s=100.0)
    found = ready(wants, pending)
    assert (found.now, found.deadline_in_s) == (now, left_s)
    assert ready(plan({"quorum": 3, "grace": 0}), pending).now == (count >= 3)


def test_a_deadline_is_never_shorter_than_a_round() -> None:
    """Machines that are out of step by less than a task are merged together."""
    wants = plan({"quorum": 3, "deadline_seconds": 60})
    assert not ready(wants, Pending(count=2, waited_s=61, round_s=700.0, live_workers=4)).now
    assert not ready(wants, Pending(count=2, waited_s=770, round_s=700.0, live_workers=4)).now
    assert ready(wants, Pending(count=2, waited_s=875, round_s=700.0, live_workers=4)).now
    assert ready(wants, Pending(count=2, waited_s=61, round_s=20.0, live_workers=4)).now


def test_a_quorum_of_a_run_file_is_its_own_whatever_the_share_of_its_preset() -> None:
    assert quorum_of(plan({"preset": "diloco"}), 10) == 6
    assert quorum_of(plan({"preset": "diloco", "quorum": 2}), 10) == 2
    both = plan({"preset": "diloco", "quorum": 2, "quorum_share": 0.5})
    assert quorum_of(both, 10) == 5


def test_a_run_on_the_organisers_data_may_wait_for_more_updates_than_one_merge_takes() -> None:
    wants = plan({"quorum": 2000, "min_contributions": 1025})
    assert not ready(wants, Pending(count=1024, waited_s=1e6, live_workers=2000)).now
    assert ready(wants, Pending(count=2000, live_workers=2000)).now


def test_enough_work_merges_before_the_count() -> None:
    wants = plan({"quorum": 10, "work_target": 100, "min_contributions": 2})
    assert not ready(wants, Pending(count=2, work=99, live_workers=20)).now
    assert ready(wants, Pending(count=2, work=100, live_workers=20)).now
    alone = ready(wants, Pending(count=1, work=500, waited_s=1e6, live_workers=20))
    assert alone == Ready(now=False, needs=9, deadline_in_s=None)


def test_updates_of_too_few_members_are_never_merged_whoever_is_there() -> None:
    wants = plan({"quorum": 3, "min_contributions": 2, "work_target": 10})
    alone = Pending(count=5, members=1, work=500, waited_s=1e6, live_workers=1)
    assert ready(wants, alone) == Ready(now=False, needs=1, members=1, deadline_in_s=None)
    nobody = ready(wants, Pending(count=0, members=0, live_workers=0))
    assert nobody == Ready(now=False, needs=2, members=2, deadline_in_s=None)
    assert ready(wants, msgspec.structs.replace(alone, members=2)).now
    assert ready(wants, msgspec.structs.replace(alone, members=None)).now
    # a quorum counts contributions, and is capped by the machines that are there
    two = Pending(count=2, members=2, live_workers=2)
    assert ready(plan({"quorum": 3, "min_contributions": 2}), two).now


def test_the_first_step_is_enough_work_where_one_is_asked_for() -> None:
    wants = plan({"quorum": 10, "work_target": 1, "min_contributions": 1})
    assert ready(wants, Pending(count=1, work=1, live_workers=20)).now


def test_the_time_that_is_left_is_the_shorter_of_deadline_and_grace() -> None:
    pending = Pending(count=3, live_workers=4, round_s=100.0, waited_s=120.0)
    assert ready(plan({"grace": 0.1, "deadline_seconds": 60}), pending).deadline_in_s == 5.0
    assert ready(plan({"grace": 0.1, "deadline_seconds": 300}), pending).deadline_in_s == 10.0
    found = ready(plan({"grace": 0.1, "deadline_seconds": 0}), pending)
    assert found == Ready(now=False, needs=0, deadline_in_s=10.0)


def test_without_a_deadline_only_the_count_decides() -> None:
    wants = plan({"quorum": 3, "deadline_seconds": 0})
    waiting = ready(wants, Pending(count=2, waited_s=1e9, live_workers=9))
    assert waiting == Ready(now=False, needs=1, deadline_in_s=None)


def test_fedbuff_fills_a_buffer_of_more_than_half_the_workers() -> None:
    wants = plan({"preset": "fedbuff"})
    assert [quorum_of(wants, live) for live in (0, 1, 2, 3, 4, 8, 9)] == [1, 1, 2, 2, 3, 5, 6]


def test_async_diloco_merges_threes_and_waits_for_nobody_beyond() -> None:
    wants = plan({"preset": "async-diloco"})
    assert [quorum_of(wants, live) for live in (0, 1, 2, 3, 100)] == [1, 1, 2, 3, 3]
    three = Pending(count=3, round_s=30.0, quiet_s=2.9, live_workers=4)
    assert not ready(wants, three).now  # the others of its round come within a tenth of it
    assert ready(wants, msgspec.structs.replace(three, quiet_s=3.0)).now
    assert not wants.overlap


@pytest.mark.parametrize("name", ["fedasync", "async-sgd"])
def test_async_plans_merge_every_arrival(name: str) -> None:
    wants = plan({"preset": name})
    assert ready(wants, Pending(count=1, live_workers=100)).now


@given(st.sampled_from(sorted(PRESETS)), st.integers(0, 50), st.integers(0, 60))
def test_a_merge_never_waits_for_more_than_live(name: str, live: int, count: int) -> None:
    found = ready(plan({"preset": name}), Pending(count=count, live_workers=live))
    assert found.now == (found.needs == 0)
    assert count + found.needs <= max(1, live, count)
