"""Results wait on disk until the coordinator has answered for them, whatever happens to the
process.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.errors import Configuration
from shared.protocol.contributions import SubmitRequest
from volunteer.storage.outbox import Outbox, QueuedResult


def entry(task: int, at: float = 0.0, attempt: int = 1) -> QueuedResult:
    submit = SubmitRequest(
        attempt=attempt,
        base_version=3,
        codec="float32",
        sha256="0" * 64,
        size=6,
        steps=10,
        samples=80,
        loss_first=3.0,
        loss_last=2.5,
    )
    return QueuedResult(task=task, run="r", device="cpu", submit=submit, price_micro=5, at=at)


def put(outbox: Outbox, task: int, at: float = 0.0) -> QueuedResult:
    made = entry(task, at)
    outbox.payload(made.name).write_bytes(b"update")
    outbox.put(made)
    return made


def test_a_result_outlives_the_process(tmp_path: Path) -> None:
    made = put(Outbox(tmp_path), 7)
    again = Outbox(tmp_path)
    assert again.entries() == (made,)
    assert again.payload(made.name).read_bytes() == b"update"
    assert again.holds(7, 1)
    assert not again.holds(7, 2)


def test_the_oldest_result_comes_first(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path)
    for task, at in ((1, 30.0), (2, 10.0), (3, 20.0)):
        put(outbox, task, at)
    assert [waiting.task for waiting in outbox.entries()] == [2, 3, 1]
    assert [waiting.task for waiting in Outbox(tmp_path).entries()] == [2, 3, 1]


def test_an_answered_result_is_gone_for_good(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path)
    made = put(outbox, 7)
    outbox.drop(made)
    outbox.drop(made)  # nothing happens the second time
    assert len(outbox) == 0
    assert len(Outbox(tmp_path)) == 0
    assert list(tmp_path.iterdir()) == []


def test_death_between_update_and_record_leaves_no_result(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path)
    outbox.payload("7-1-0-0").write_bytes(b"update")
    (tmp_path / ".7-1-0-0.safetensors.ab12.part").write_bytes(b"half")
    assert len(Outbox(tmp_path)) == 0
    assert list(tmp_path.iterdir()) == []


def test_death_between_record_and_update_on_dropping_leaves_no_result(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path)
    made = put(outbox, 7)
    outbox.payload(made.name).unlink()
    assert len(Outbox(tmp_path)) == 0


def test_a_result_without_its_update_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Configuration, match="missing"):
        Outbox(tmp_path).put(entry(7))


def test_a_damaged_record_is_set_aside_and_told(tmp_path: Path) -> None:
    made = put(Outbox(tmp_path), 7)
    (tmp_path / f"{made.name}.json").write_bytes(b"{ not JSON")
    said: list[str] = []
    assert len(Outbox(tmp_path, said.append)) == 0
    assert "is kept in" in said[0]
    assert (tmp_path / f"{made.name}.json.damaged").exists()
    Outbox(tmp_path)
    assert (tmp_path / f"{made.name}.safetensors").exists()


@pytest.mark.parametrize("name", ["", "../7-1-0-0", "7-1-0", "7-1-0-0/x", "-1-1-0-0"])
def test_only_names_of_results_become_paths(tmp_path: Path, name: str) -> None:
    with pytest.raises(Configuration):
        Outbox(tmp_path).payload(name)
