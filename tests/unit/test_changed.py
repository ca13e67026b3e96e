"""The files that `make test-changed` runs."""

from __future__ import annotations

from tests.support.changed import importers, nearest
from tests.support.sources import ROOT


def test_the_nearest_test_files_come_first_and_far_ones_not_at_all() -> None:
    by_module = {
        "shared.clock": {"tests.unit.test_clock", "coordinator.log"},
        "coordinator.log": {"tests.unit.test_log", "coordinator.cli.main"},
        "coordinator.cli.main": {"tests.e2e.test_everything"},
    }
    changed = ["shared/clock.py", "tests/unit/test_new.py", "coordinator/gone.py"]
    assert nearest(changed, by_module) == {
        "tests/unit/test_new.py": 0,
        "tests/unit/test_clock.py": 1,
        "tests/unit/test_log.py": 2,
    }


def test_imports_inside_functions_and_of_names_count() -> None:
    by_module = importers([ROOT / "tests" / "unit" / "shared" / "tensors"])
    assert "tests.unit.shared.tensors.test_codec" in by_module["shared.tensors.codec"]
    assert "tests.unit.shared.tensors.test_codec" in by_module["torch"]  # within one test
