"""Defaults of a run that strangers may join: a robust rule, tight norms, a gate; what the file says
stays.
"""

from __future__ import annotations

import pytest

from coordinator.plan.plan import plan
from coordinator.plan.plan_tables import Plan
from coordinator.rules import run_file
from coordinator.rules.run_file import RunFile
from coordinator.runs.definition import check_train, of_file, table_defaults
from shared.errors import InvalidRunFile
from shared.workloads.base import load

HEAD = 'name = "x"\nworkload = "{workload}"\ndataset = "d"\n'


def resolved(
    text: str = "", workload: str = "gpt", *, parameters: int = 10**8, strangers: bool = True
) -> RunFile:
    """The run file with the defaults that `run create` writes into it."""
    whole = HEAD.format(workload=workload) + text
    tables = table_defaults(
        run_file.written_tables(whole), load(workload), parameters, strangers=strangers
    )
    return run_file.parse(whole, tables)


def rules(found: Plan) -> tuple[str, int, int, float]:
    return found.aggregate, found.aggregate_from, found.quorum, found.quorum_share


def test_an_open_run_merges_by_a_robust_rule_and_is_gated() -> None:
    file = resolved()
    assert rules(plan(file.plan)) == ("centred-clip", 5, 5, 0.75)
    assert (file.validation.norm_room, file.validation.clip_until) == (0.5, 2.0)
    assert file.evaluation.gate


def test_by_invitation_the_presets_hold() -> None:
    file = resolved(strangers=False)
    assert rules(plan(file.plan)) == ("mean", 1, 3, 0.6)
    assert (file.validation.norm_room, file.validation.clip_until) == (2.0, 1.0)
    assert not file.evaluation.gate


@pytest.mark.parametrize("rule", ["mean", "median", "norm-clip"])
def test_a_file_that_names_its_rule_keeps_it(rule: str) -> None:
    file = resolved(f'[plan]\naggregate = "{rule}"\n[evaluation]\ngate = false\n')
    found = plan(file.plan)
    assert (found.aggregate, found.aggregate_from) == (rule, 1)
    assert found.quorum == 5
    assert not file.evaluation.gate


def test_a_file_that_says_when_to_merge_keeps_that() -> None:
    found = plan(resolved("[plan]\nquorum = 4\n").plan)
    assert rules(found) == ("centred-clip", 5, 4, 0.0)


@pytest.mark.parametrize("preset", ["fedbuff", "fedasync", "async-diloco", "async-sgd"])
def test_a_preset_that_says_when_to_merge_keeps_that(preset: str) -> None:
    found = plan(resolved(f'[plan]\npreset = "{preset}"\n').plan)
    same = plan({"preset": preset})
    assert rules(found) == ("centred-clip", 5, same.quorum, same.quorum_share)


@pytest.mark.parametrize("workload", ["dcgan", "gomoku"])
def test_a_workloads_own_words_go_before(workload: str) -> None:
    file, closed = resolved("", workload), resolved("", workload, strangers=False)
    assert plan(file.plan).quorum_share in (0.75, plan(closed.plan).quorum_share)
    if closed.validation.clip_until != 1.0:
        assert file.validation.clip_until == closed.validation.clip_until


@pytest.mark.parametrize("preset", ["gradient-average", "sync-sgd", "async-sgd"])
def test_keys_of_train_that_nobody_reads_are_refused(preset: str) -> None:
    file = run_file.parse(
        HEAD.format(workload="gpt") + "[train]\nlr = 1e-2\nprox_mu = 9.0\nclip_norm = 0.1\n"
    )
    with pytest.raises(InvalidRunFile, match=r"train. prox_mu: in the preset .*by AdamW"):
        check_train(file.train, plan({"preset": preset}))
    with pytest.raises(InvalidRunFile, match=r'lr and clip_norm and prox_mu: .*"sgd"'):
        check_train(file.train, plan({"preset": preset, "optimizer": "sgd", "lr": 0.1}))
    check_train(file.train, plan({"preset": "fedavg"}))
    text = f'[plan]\npreset = "{preset}"\n[train]\nprecision = "bfloat16"\n'
    check_train(resolved(text).train, plan({"preset": preset}))


@pytest.mark.parametrize("preset", ["gradient-average", "sync-sgd", "async-sgd"])
def test_a_preset_of_gradients_is_refused_where_learners_send_deltas(preset: str) -> None:
    """Their updates would be accepted and paid, and never merged."""
    said = resolved("").train
    with pytest.raises(InvalidRunFile, match=f'"{preset}" merges gradients, but learners'):
        check_train(said, plan({"preset": preset}), learns=True)
    check_train(said, plan({"preset": "self-play"}), learns=True)


SHARED = "[model]\nvocab_size = 300\nshared_momentum = true\n"


@pytest.mark.parametrize(
    "tables",
    [
        '[plan]\npreset = "gradient-average"\n',
        '[plan]\ncodec = "float32"\n',
        '[train]\noptimizer = "adamw"\n',
        "[train]\nclip_norm = 0.0\n",
    ],
)
def test_a_momentum_that_no_optimiser_moves_or_bounds_is_not_shared(tables: str) -> None:
    file = resolved(SHARED + tables)
    with pytest.raises(InvalidRunFile, match="shared_momentum = true shares the momentum of local"):
        of_file(run_file.encode(file))


def test_who_shares_the_momentum_merges_with_little_more_of_it() -> None:
    apart, shared = (plan(resolved(model).plan) for model in ("", SHARED))
    assert (apart.lr, apart.momentum, shared.lr, shared.momentum) == (0.7, 0.8, 1.0, 0.3)
    own = plan(resolved(SHARED + '[plan]\npreset = "diloco"\nlr = 0.5\n').plan)
    assert (own.lr, own.momentum) == (0.5, 0.3)
    average = plan(resolved(SHARED + '[plan]\npreset = "fedavg"\n').plan)
    assert (average.lr, average.momentum) == (1.0, 0.0)


SMALL = 800_000


def outer(file: RunFile) -> tuple[float, float, float]:
    merge = plan(file.plan)
    return merge.lr, merge.momentum, merge.transfer_share


def test_a_small_model_shares_its_momentum() -> None:
    file = resolved(parameters=SMALL, strangers=False)
    assert (file.model["shared_momentum"], file.steps) == (True, 15)
    assert outer(file) == (1.0, 0.3, 0.1)
    assert resolved('[plan]\npreset = "diloco"\n', parameters=SMALL).model["shared_momentum"]


@pytest.mark.parametrize(
    "text",
    [
        "[model]\nshared_momentum = false\n",
        "[plan]\noverlap = true\n",
        '[plan]\ncodec = "float32"\n',
        '[plan]\npreset = "diloco"\nmomentum = 0.9\n',
        '[train]\noptimizer = "adamw"\n',
        "[train]\nclip_norm = 0\n",
        "[task]\nlocal_steps = 300\n",
        "[task]\ntarget_seconds = 60\n",
        '[data]\nat = "members"\n',
    ],
)
def test_a_file_with_a_way_of_its_own_shares_none(text: str) -> None:
    own, large = resolved(text, parameters=SMALL), resolved(text)
    assert not own.model["shared_momentum"]
    assert own == large


@pytest.mark.parametrize("preset", ["fedavg", "async-diloco", "gradient-average"])
def test_other_presets_share_no_momentum(preset: str) -> None:
    assert "shared_momentum" not in resolved(f'[plan]\npreset = "{preset}"\n', parameters=1).model


def test_what_the_file_says_of_momentum_holds_for_any_size() -> None:
    file = resolved("[model]\nshared_momentum = true\n", strangers=False)
    assert outer(file) == (1.0, 0.3, 0.1)
