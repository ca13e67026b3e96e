"""Runs, waiting workers and open tasks as values, for tests of assignments."""

from __future__ import annotations

from typing import Any

from coordinator.rules.dispatch import DispatchResult, Holding, Load, OpenTasks, dispatch
from coordinator.rules.eligibility import Todo, Waiter
from coordinator.rules.placement import NOBODY, DeviceBench
from coordinator.rules.run_file import TaskSettings
from coordinator.rules.task_size import Run


def run_of(id: int = 1, **values: Any) -> Run:
    task = TaskSettings(**values.pop("task", {"local_steps": 10, "batch_size": 4}))
    return Run(
        **{
            "id": id,
            "name": f"run-{id}",
            "workload": "gpt",
            "kind": "train",
            "codec": "int8",
            "memory_bytes": 1000,
            "weight": 1.0,
            "settings": task,
            "local_steps": task.local_steps or 30,
            "passes": 1,
            "step_flops": 1e9,
            "price_micro": 100,
            "seed": 7,
            "pass_no": 1,
            "cursor": 0,
            "samples_total": 1000,
            **values,
        }
    )


def waiter(number: int = 1, volunteer: int | None = None, **values: Any) -> Waiter:
    return Waiter(
        **{
            "claim_id": f"claim-{number}",
            "worker_id": f"worker-{number}",
            "volunteer_id": f"volunteer-{volunteer or number}",
            "device": "cpu",
            "workloads": frozenset({"gpt"}),
            **values,
        }
    )


def ask(
    waiters: list[Waiter],
    runs: list[Run],
    todo: list[Todo] | None = None,
    loads: list[Load] | None = None,
    holdings: list[Holding] | None = None,
    leases_max: int = 64,
    bench: DeviceBench = NOBODY,
) -> DispatchResult:
    back = todo or []
    if loads is None:
        loads = [Load(run_id=task.run_id, open=len(back), price_micro=0) for task in back]
    return dispatch(
        waiters,
        runs,
        OpenTasks(todo=back, loads=loads, holdings=holdings or []),
        leases_max=leases_max,
        bench=bench,
    )


def todo_of(
    id: int,
    start: int,
    stop: int,
    run_id: int = 1,
    failed_by: set[str] | None = None,
    **values: Any,
) -> Todo:
    return Todo(
        id=id,
        run_id=run_id,
        pass_no=1,
        start=start,
        stop=stop,
        failed_by=frozenset(failed_by or ()),
        **values,
    )
