"""Leases and claims on disk: what a new process finds of the one before."""

from __future__ import annotations

from pathlib import Path

from shared.protocol.leases import Grant, Lease
from shared.workloads.base import Job, TrainSettings
from volunteer.storage.leases import HeldLease, Leases


def held(task: int, claim_id: str = "c", device: str = "cpu") -> HeldLease:
    job = Job(
        run="r",
        workload="gpt",
        kind="train",
        update="delta",
        config={},
        train=TrainSettings(),
        order_seed=1,
        start=0,
        stop=8,
        seed=1,
        steps=4,
        batch_size=2,
        global_step=0,
        total_steps=0,
    )
    lease = Lease(
        task=task,
        attempt=2,
        run="r",
        job=job,
        dataset="d",
        chunks=(0,),
        renew_by=0.0,
        finish_by=0.0,
        grant=Grant(codec="float32", bytes_max=10),
        price_micro=1,
        now=0.0,
    )
    return HeldLease(lease=lease, device=device, claim_id=claim_id)


def test_leases_are_found_by_the_next_process(tmp_path: Path) -> None:
    leases = Leases(tmp_path)
    leases.keep(held(12))
    leases.keep(held(5))
    assert [found.key for found in Leases(tmp_path).stored()] == [(5, 2), (12, 2)]


def test_a_dropped_lease_takes_its_snapshot_with_it(tmp_path: Path) -> None:
    leases = Leases(tmp_path)
    leases.keep(held(5))
    leases.snapshot(held(5).lease).write_bytes(b"half done")
    leases.drop(held(5).lease)
    assert list(tmp_path.iterdir()) == []


def test_a_new_process_deletes_what_a_killed_one_left_half_written(tmp_path: Path) -> None:
    leases = Leases(tmp_path)
    leases.keep(held(5))
    leases.claim_id("cpu")
    leases.snapshot(held(5).lease).write_bytes(b"half done")
    stays = sorted(tmp_path.iterdir())
    (tmp_path / ".5-2.safetensors.0a1b2c3d.part").write_bytes(b"a model")
    (tmp_path / "4-1.safetensors").write_bytes(b"a snapshot whose lease is gone")
    (tmp_path / "3-1.audit").write_bytes(b"an update")
    Leases(tmp_path)
    assert sorted(tmp_path.iterdir()) == stays


def test_a_claim_keeps_its_id_until_it_brings_a_lease(tmp_path: Path) -> None:
    first = Leases(tmp_path).claim_id("cuda:0")
    leases = Leases(tmp_path)  # the reply was lost with the process
    assert leases.claim_id("cuda:0") == first
    assert leases.claim_id("cuda:1") != first
    leases.keep_claimed(held(5, first, "cuda:0"))
    assert leases.claim_id("cuda:0") != first


def test_a_claim_answered_just_before_the_end_is_not_made_again(tmp_path: Path) -> None:
    leases = Leases(tmp_path)
    claim_id = leases.claim_id("cpu")
    leases.keep(held(5, claim_id))  # and the process died before the claim was forgotten
    again = Leases(tmp_path)
    again.forget_answered_claims(again.stored())
    assert again.claim_id("cpu") != claim_id


def test_a_damaged_lease_is_set_aside(tmp_path: Path) -> None:
    leases = Leases(tmp_path)
    leases.keep(held(5))
    (tmp_path / "5-2.json").write_bytes(b"\xff\xfe")
    assert leases.stored() == ()
    assert (tmp_path / "5-2.json.damaged").exists()
    (tmp_path / "claim.cpu.json").write_bytes(b"[]")
    assert leases.claim_id("cpu")
