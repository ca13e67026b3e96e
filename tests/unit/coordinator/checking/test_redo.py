"""Blame where a task cannot be done again."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.checking import redo as module
from coordinator.checking.redo import Files, redo
from shared.errors import BadRequest, Unavailable, VolunteerError
from shared.workloads.base import Progress

FILES = Files(
    weights=Path("w"), update=Path("u"), codec="int8", inner=None, left=None, residual=None
)


class Short:
    """Work that does not fit, in however small portions."""

    done = False

    def advance(self) -> Progress:
        raise MemoryError("not enough")

    def halve(self) -> int:
        raise MemoryError("not even one")


class Impossible(Short):
    """Work that cannot have been cut as its machine says."""

    def advance(self) -> Progress:
        raise BadRequest("no machine halves so often")


@pytest.mark.parametrize(("work", "error"), [(Short(), Unavailable), (Impossible(), BadRequest)])
def test_memory_that_is_short_here_is_not_held_against_the_worker(
    work: Short, error: type[VolunteerError], monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = SimpleNamespace(begin=lambda *given: work)
    monkeypatch.setattr(module, "definition", lambda run: SimpleNamespace(workload=workload))
    monkeypatch.setattr(module, "read_weights", lambda path, about: {})
    case: Any = SimpleNamespace(run=None, job=None)
    with pytest.raises(error):
        redo(lambda: False, case, FILES, SimpleNamespace())  # type: ignore[arg-type]
