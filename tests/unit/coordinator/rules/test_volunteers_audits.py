"""Rules of audits by volunteers: who may have one, and what an answer says."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.checking.recompute_comparison import likeness
from coordinator.rules.audits import (
    CONFIRM_MIN,
    PAY_PER_AUDIT,
    AccountMarks,
    Auditor,
    WaitingAudit,
    agree,
    confirmed_chance,
    made_up,
    may_audit,
)
from coordinator.rules.draws import Likeness, Redone
from shared.protocol.limits import AUDIT_BYTES
from shared.tensors.sketch import audit_sums
from shared.tensors.slices import ArrayReader
from shared.tensors.spec import Role, TensorSpec
from tests.support.examples import examples

ANN = AccountMarks(volunteer="ann", invite=1, network="203.0.113.0/24")
BOB = AccountMarks(volunteer="bob", invite=2, network="198.51.100.0/24")
PRICE = 7
OPEN = WaitingAudit(kind="train", worker=ANN, price_micro=PRICE)


def auditor(person: AccountMarks = BOB, kind: str = "cpu", audits: int = 0) -> Auditor:
    enough = PAY_PER_AUDIT * PRICE * (audits + 1)
    return Auditor(person=person, kind=kind, accepted_micro=enough, audited_micro=audits * PRICE)


def test_an_auditor_shares_neither_account_nor_invite_nor_network() -> None:
    assert may_audit(OPEN, auditor())
    for same in ({"volunteer": "ann"}, {"invite": 1}, {"network": ANN.network}):
        assert not may_audit(OPEN, auditor(msgspec.structs.replace(BOB, **same)))
    stranger = AccountMarks(volunteer="eve")  # without an invite, from nowhere that is known
    assert may_audit(
        msgspec.structs.replace(OPEN, worker=stranger), auditor(AccountMarks(volunteer="x"))
    )


def test_an_auditor_of_other_arithmetic_is_asked_nothing() -> None:
    assert not may_audit(OPEN, auditor(kind="cuda"))


def test_an_account_that_gave_an_audit_back_is_not_asked_again() -> None:
    given = msgspec.structs.replace(OPEN, declined=frozenset({"bob"}))
    assert not may_audit(given, auditor())
    assert may_audit(given, auditor(AccountMarks(volunteer="eve")))


def test_audits_are_a_small_share_of_the_work_of_an_account() -> None:
    one = auditor(audits=3)
    assert may_audit(OPEN, one)
    assert not may_audit(OPEN, msgspec.structs.replace(one, accepted_micro=one.accepted_micro - 1))


@given(st.integers(1, 10**12), st.integers(0, 10**12))
def test_an_answer_for_an_account_of_ones_own_loses_what_it_gains(freed: int, stake: int) -> None:
    """A friend who frees pay of a faker by an unchecked answer loses its stake if one is."""
    chance = confirmed_chance(freed, stake)
    assert (1 - chance) * freed <= chance * stake + 1e-6 * freed
    assert confirmed_chance(0, stake) == confirmed_chance(freed, None) == CONFIRM_MIN
    assert confirmed_chance(freed, 0) == 1.0


@settings(max_examples=examples(200))
@given(st.floats(allow_nan=True), st.floats(allow_nan=True))
def test_what_agrees_is_not_made_up(cosine: float, ratio: float) -> None:
    said = Likeness(cosine=cosine, norm_ratio=ratio)
    if agree(said):
        assert not made_up(said, redone())
        assert math.isfinite(cosine)


def redone(drift: float | None = None) -> Redone:
    """A recompute that agrees with the work."""
    return Redone(cosine=1.0, norm_ratio=1.0, drift=drift)


def test_an_answer_may_be_as_far_off_as_its_task_drifts() -> None:
    """An honest auditor of a learner of games, whose tasks part by a half, was suspended."""
    apart = Likeness(cosine=0.88, norm_ratio=1.0)
    assert made_up(apart, redone())
    assert not made_up(apart, redone(0.3))


class Memory:
    """An update in memory."""

    def __init__(self, values: np.ndarray) -> None:
        self._values = values

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        return self._values[start:stop]


@pytest.mark.parametrize("seed", [0, 1, (1 << 63) - 1])
def test_sums_made_up_or_of_another_seed_fail(seed: int) -> None:
    schema = (TensorSpec(name="w", shape=(60_000,), dtype="F32", role="parameter"),)
    random_ = np.random.default_rng(seed)
    update = Memory(random_.standard_normal(60_000).astype(np.float32))
    right = audit_sums(update, schema, seed)
    assert len(right.tobytes()) == AUDIT_BYTES
    assert agree(likeness(right.tobytes(), right.tobytes()))
    invented = random_.standard_normal(512).astype(np.float32)
    other = audit_sums(update, schema, seed ^ 5)
    for wrong in (invented, other, 1.2 * right, -right, np.zeros(512, np.float32)):
        answer = wrong.astype(np.float32).tobytes()
        assert made_up(likeness(right.tobytes(), answer), redone())


def test_an_audit_compares_buffers_too() -> None:
    roles: tuple[tuple[str, Role], ...] = (("w", "parameter"), ("mean", "buffer"))
    schema = tuple(
        TensorSpec(name=name, shape=(5_000,), dtype="F32", role=role) for name, role in roles
    )
    values = {name: np.random.default_rng(1).standard_normal(5_000, np.float32) for name in "wm"}
    whole = {"w": 1e-3 * values["w"], "mean": values["m"]}
    own = audit_sums(ArrayReader(whole, schema), schema, 7).tobytes()
    poisoned = whole | {"mean": 1.3 * whole["mean"]}
    theirs = audit_sums(ArrayReader(poisoned, schema), schema, 7).tobytes()
    assert agree(likeness(own, own))
    assert not agree(likeness(own, theirs))
