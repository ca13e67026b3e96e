"""Every deletion of the product states the reason that permits it: none is left to an absence."""

from __future__ import annotations

from shared.files.deletions import REASONS
from tests.support.deletions import deletions, outside, table


def test_nothing_is_deleted_past_the_functions_that_take_a_reason() -> None:
    assert [*outside()] == []


def test_every_deletion_states_a_reason_that_exists() -> None:
    assert [str(each) for each in deletions() if not each.reason] == []


def test_blobs_are_deleted_only_by_name_let_go_or_on_demand() -> None:
    blobs = {
        (each.module, each.function): each.reason
        for each in deletions()
        if each.target in ("name", "sha", "sha256")
    }
    assert blobs == {
        ("coordinator.merging.shard_jobs", "Parts.discard"): "let go",
        ("coordinator.storage.staging", "Staging.try_calls"): "scratch",
        ("coordinator.upkeep.stored_backups", "StoredBackups.prune"): "asked",
        ("coordinator.upkeep.upkeep", "Upkeep.sweep"): "let go",
    }


def test_the_table_lists_each_deletion_below_its_reason() -> None:
    page = table()
    for each in deletions():
        if each.reason in REASONS:
            below = page.partition(f"## {each.reason}: ")[2].partition("\n## ")[0]
            assert f"| `{each.module}` | `{each.function}` | `{each.target}` |" in below
