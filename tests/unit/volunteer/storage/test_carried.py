"""What is carried over from one update to the next follows the verdicts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from shared.protocol.base import ContributionState
from shared.protocol.contributions import Verdict
from shared.tensors.frame import frame_bytes
from shared.tensors.spec import TensorSpec
from volunteer.storage.carried import Carried, InnerState, Residuals

SCHEMA = (TensorSpec("w", (2,)),)
CPU = ("cpu",)
FAR = 1_000  # steps, more than any base here has


def result(task: int, part: int = 0) -> str:
    """The name of a result."""
    return f"{task}-1-{part}-0"


def encode(
    carried: Carried, task: int, value: float, global_step: int = 0, *, part: int = 0
) -> None:
    """Store the residual of a written update as the current one."""
    carried.residual(SCHEMA, global_step)
    carried.next.write_bytes(frame_bytes({"w": np.full(2, value, np.float32)}))
    carried.advance(result(task, part), global_step)


def now(residuals: Residuals) -> float | None:
    found = residuals.of("r", "cpu").residual(SCHEMA, FAR)
    return float(found["w"][0]) if found else None


def verdict(task: int, state: ContributionState, reason: str = "") -> Verdict:
    return Verdict(contribution=task, task=task, run="r", state=state, reason=reason)


def two_updates(path: Path) -> Residuals:
    residuals = Residuals(path)
    carried = residuals.of("r", "cpu")
    encode(carried, 1, 0.1)
    encode(carried, 2, 0.2)
    return residuals


def test_the_first_update_carries_nothing(tmp_path: Path) -> None:
    assert now(Residuals(tmp_path)) is None


def test_an_accepted_update_keeps_its_residual(tmp_path: Path) -> None:
    residuals = two_updates(tmp_path)
    residuals.judged(verdict(2, "accepted"), CPU)
    residuals.judged(verdict(2, "merged"), CPU)
    assert now(residuals) == np.float32(0.2)
    assert not residuals.of("r", "cpu").previous.exists()


def test_rejected_content_zeroes_it(tmp_path: Path) -> None:
    residuals = two_updates(tmp_path)
    residuals.judged(verdict(1, "rejected", "norm"), CPU)
    assert now(residuals) is None


def test_an_update_that_never_counted_gives_the_one_before_back(tmp_path: Path) -> None:
    for reason in ("stale", "cancelled", "merge_failed"):
        residuals = two_updates(tmp_path / reason)
        residuals.judged(verdict(2, "rejected", reason), CPU)
        assert now(residuals) == np.float32(0.1)
    residuals = two_updates(tmp_path / "superseded")
    residuals.judged(verdict(2, "superseded"), CPU)
    assert now(residuals) == np.float32(0.1)
    residuals = two_updates(tmp_path / "gone")
    residuals.lost("r", 2, CPU)
    residuals.lost("r", 2, CPU)  # only once
    assert now(residuals) == np.float32(0.1)


def test_verdicts_on_older_updates_change_nothing(tmp_path: Path) -> None:
    residuals = two_updates(tmp_path)
    residuals.judged(verdict(1, "accepted"), CPU)
    residuals.judged(verdict(1, "rejected", "stale"), CPU)
    residuals.judged(verdict(2, "checking"), CPU)
    assert now(residuals) == np.float32(0.2)


def parts_of_one_task(path: Path, said: list[str]) -> Residuals:
    """Three parts of task 2 wait to be handed in; task 1 was accepted."""
    residuals = Residuals(path, said.append)
    carried = residuals.of("r", "cpu")
    encode(carried, 1, 0.1)
    residuals.judged(verdict(1, "accepted"), CPU)
    for part in range(3):
        encode(carried, 2, 0.2 + part, part=part)
    return residuals


def test_of_several_lost_updates_nothing_is_carried_and_that_is_said(tmp_path: Path) -> None:
    said: list[str] = []
    residuals = parts_of_one_task(tmp_path, said)
    for part in range(3):
        residuals.lost("r", 2, CPU, result(2, part))
    assert now(residuals) is None
    assert len(said) == 1
    assert "dropped" in said[0]


def test_the_newest_of_several_updates_may_be_lost_alone(tmp_path: Path) -> None:
    said: list[str] = []
    residuals = parts_of_one_task(tmp_path, said)
    residuals.judged(verdict(2, "accepted"), CPU, result(2, 0))
    residuals.judged(verdict(2, "accepted"), CPU, result(2, 1))
    assert now(residuals) == np.float32(2.2)
    residuals.lost("r", 2, CPU, result(2, 2))
    assert now(residuals) == np.float32(1.2)
    residuals.lost("r", 2, CPU, result(2, 1))  # accepted before, and not needed after all
    assert now(residuals) is None


def test_an_update_that_others_were_made_on_only_cannot_be_gone_back_to(tmp_path: Path) -> None:
    said: list[str] = []
    residuals = parts_of_one_task(tmp_path, said)
    residuals.judged(verdict(2, "rejected", "stale"), CPU, result(2, 1))
    assert now(residuals) == np.float32(2.2)  # the third was made with it and may count
    residuals.judged(verdict(2, "accepted"), CPU, result(2, 2))
    assert now(residuals) == np.float32(2.2)
    assert said == []


def test_the_first_update_of_all_is_lost_without_a_word(tmp_path: Path) -> None:
    said: list[str] = []
    residuals = Residuals(tmp_path, said.append)
    encode(residuals.of("r", "cpu"), 1, 0.1)
    residuals.lost("r", 1, CPU)
    assert (now(residuals), said) == (None, [])


def test_a_verdict_that_comes_while_the_next_update_is_encoded_is_not_undone_by_it(
    tmp_path: Path,
) -> None:
    residuals = two_updates(tmp_path)
    carried = residuals.of("r", "cpu")
    carried.residual(SCHEMA, FAR)
    residuals.judged(verdict(2, "rejected", "norm"), CPU)
    carried.next.write_bytes(frame_bytes({"w": np.full(2, 0.3, np.float32)}))
    carried.advance(result(3))
    assert now(residuals) is None
    assert not carried.next.exists()


def moments(value: float) -> InnerState:
    return InnerState({"exp_avg/w": torch.full((2,), value)})


def test_the_optimizers_state_is_there_for_the_next_task_before_it_is_stored(
    tmp_path: Path,
) -> None:
    residuals = Residuals(tmp_path)
    carried = residuals.of("r", "cpu")
    first, second = moments(1.0), moments(2.0)
    carried.lend(first, 10)
    assert residuals.of("r", "cpu").inner() is first
    carried.keep_inner(first)
    carried.lend(second, 20)
    carried.end_lending(first)  # which is not the newest any more
    assert carried.inner() is second
    kept = Residuals(tmp_path).of("r", "cpu").inner()  # as after a crash
    assert kept is not None
    assert torch.equal(kept.tensors["exp_avg/w"], first.tensors["exp_avg/w"])
    carried.keep_inner(second)
    carried.end_lending(second)
    kept = carried.inner()
    assert kept is not None
    assert torch.equal(kept.tensors["exp_avg/w"], second.tensors["exp_avg/w"])


def test_a_state_of_a_base_that_was_set_back_is_neither_used_nor_stored(tmp_path: Path) -> None:
    carried = Residuals(tmp_path).of("r", "cpu")
    state = moments(1.0)
    carried.lend(state, 50)
    carried.drop_if_behind(40)
    assert carried.inner() is None
    carried.keep_inner(state)
    carried.end_lending(state)
    assert carried.inner() is None
    assert not carried.optimizer.exists()


def test_a_base_set_back_forgets_everything(tmp_path: Path) -> None:
    residuals = two_updates(tmp_path)
    residuals.of("r", "cpu").optimizer.write_bytes(b"moments")
    residuals.forget("r", CPU)
    assert now(residuals) is None
    assert not residuals.of("r", "cpu").optimizer.exists()


def test_a_base_set_back_while_nobody_was_here_is_noticed_at_the_next_task(tmp_path: Path) -> None:
    carried = Residuals(tmp_path).of("r", "cpu")
    encode(carried, 1, 0.1, global_step=500)
    carried.optimizer.write_bytes(b"moments")
    restarted = Residuals(tmp_path)
    restarted.of("r", "cpu").drop_if_behind(500)
    assert now(restarted) == np.float32(0.1)
    restarted.of("r", "cpu").drop_if_behind(450)
    assert now(restarted) is None
    assert not carried.optimizer.exists()


def test_a_residual_of_another_model_is_not_used(tmp_path: Path) -> None:
    residuals = two_updates(tmp_path)
    assert residuals.of("r", "cpu").residual((TensorSpec("w", (3,)),), FAR) == {}


def test_runs_and_devices_do_not_share(tmp_path: Path) -> None:
    residuals = two_updates(tmp_path)
    assert residuals.of("r", "cuda:0").residual(SCHEMA, FAR) == {}
    assert residuals.of("r/../r", "cpu").current.parent == tmp_path
