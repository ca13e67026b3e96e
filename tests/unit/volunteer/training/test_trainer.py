"""The training thread: it obeys between two micro-batches, and frees the device while it is told to
rest.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
from typing_extensions import override

from shared.workloads.base import Progress, Result
from volunteer.machine.device_memory import out_of_memory
from volunteer.training.job import Finished, Interrupted, TaskSeconds, TrainingJob, TrainingReport
from volunteer.training.step_meter import StepFigures, StepMeter
from volunteer.training.trainer import Handle, ThreadDied, Trainer

WAIT_S = 120.0


class Ticking:
    """A clock that moves on by a fixed time whenever a micro-batch is done."""

    def __init__(self) -> None:
        self.at = 0.0

    def now(self) -> float:
        return self.at

    def monotonic(self) -> float:
        return self.at

    async def sleep(self, seconds: float) -> None:
        self.at += seconds


class Steps:
    """Work that counts: two micro-batches a step, and it stops at `gate` until the test opens
    it.
    """

    def __init__(self, steps: int, clock: Ticking, *, gate: int = -1, micro: int = 8) -> None:
        self.steps = steps
        self.count = 0  # micro-batches done
        self.micro = micro
        self.reached = threading.Event()
        self.open = threading.Event()
        self.on_device = True
        self.moves: list[str] = []
        self.errors: list[Exception] = []  # raised by the next micro-batches
        self._clock = clock
        self._gate = gate

    @property
    def done(self) -> bool:
        return self.count == 2 * self.steps

    def advance(self) -> Progress:
        assert self.on_device
        if self.count == self._gate:
            self.reached.set()
            assert self.open.wait(WAIT_S)
        if self.errors:
            raise self.errors.pop()
        self.count += 1
        self._clock.at += 0.1
        ended = self.count % 2 == 0
        loss = 10.0 / self.count if ended else None
        return Progress(step=self.count // 2, steps=self.steps, samples=self.count, loss=loss)

    def result(self) -> tuple[Result, dict[str, Any]]:
        return Result(steps=self.steps, samples=self.count, loss_first=5.0, loss_last=1.0), {}

    def suspend(self) -> None:
        self.on_device = False
        self.moves.append("off")

    def resume(self) -> None:
        self.on_device = True
        self.moves.append("on")

    def halve(self) -> int:
        if self.micro == 1:
            raise MemoryError("one sample alone does not fit")
        self.micro //= 2
        return self.micro

    def state(self) -> dict[str, Any]:
        return {}

    def snapshot(self) -> dict[str, Any]:
        assert self.count % 2 == 0  # only between steps
        return {}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        raise AssertionError("nothing here restores")


@contextmanager
def training(clock: Ticking) -> Iterator[Trainer]:
    trainer = Trainer("cpu", threads=1, clock=clock)
    trainer.start()
    try:
        yield trainer
    finally:
        assert trainer.close(WAIT_S)


def assignment(work: Steps, **more: Any) -> TrainingJob[int]:
    values: dict[str, Any] = {
        "device": "cpu",
        "begin": lambda: work,
        "finish": lambda done, spent: done.count,
        "samples": 2 * work.steps,
        "report": lambda report: None,
        "halved": lambda micro: None,
    }
    return TrainingJob(**(values | more))


def outcome(handle: Handle[int]) -> Finished[int] | Interrupted:
    return handle.future.result(WAIT_S)


def test_a_task_runs_to_its_end() -> None:
    clock = Ticking()
    reports: list[TrainingReport] = []
    spent: list[TaskSeconds] = []

    def finish(work: Any, used: TaskSeconds) -> int:
        spent.append(used)
        return int(work.count)

    with training(clock) as trainer:
        work = Steps(5, clock)
        handle = trainer.submit(assignment(work, finish=finish, report=reports.append))
        ended = outcome(handle)
        assert isinstance(ended, Finished)
        assert ended.value == 10
        assert spent[0].train_s == pytest.approx(1.0)
        last = reports[-1]
        assert (last.step, last.samples, last.loss, last.eta_s) == (5, 10, 1.0, 0.0)
        assert last.samples_per_s == pytest.approx(10.0)
        assert last.steps_per_s == pytest.approx(5.0)
        assert trainer.resting.wait(WAIT_S)


def test_progress_is_told_at_most_four_times_a_second() -> None:
    clock = Ticking()
    reports: list[TrainingReport] = []
    with training(clock) as trainer:
        outcome(trainer.submit(assignment(Steps(50, clock), report=reports.append)))
    assert 0.25 * 10 * len(reports) <= 100 + 10


def test_pause_frees_the_device_until_resumed() -> None:
    clock = Ticking()
    with training(clock) as trainer:
        work = Steps(4, clock, gate=3)
        handle = trainer.submit(assignment(work))
        assert work.reached.wait(WAIT_S)
        assert not trainer.resting.is_set()
        trainer.pause()
        work.open.set()
        assert trainer.resting.wait(WAIT_S)
        assert (work.count, work.moves) == (4, ["off"])  # the micro-batch under way was the last
        assert not handle.future.done()
        clock.at += 100  # nobody trains meanwhile
        trainer.resume()
        ended = outcome(handle)
        assert isinstance(ended, Finished)
        assert work.moves == ["off", "on"]
        assert ended.spent.paused_s == pytest.approx(100)
        assert ended.spent.train_s == pytest.approx(0.8)


def test_a_paused_device_begins_nothing() -> None:
    clock = Ticking()
    with training(clock) as trainer:
        trainer.pause()
        begun = threading.Event()
        work = Steps(1, clock)

        def begin() -> Steps:
            begun.set()
            return work

        handle = trainer.submit(assignment(work, begin=begin))
        assert trainer.resting.is_set()
        handle.stop("not any more")
        ended = outcome(handle)
        assert ended == Interrupted(reason="not any more")
        assert not begun.is_set()


def test_stop_ends_at_the_next_micro_batch() -> None:
    clock = Ticking()
    with training(clock) as trainer:
        work = Steps(100, clock, gate=7)
        handle = trainer.submit(assignment(work))
        assert work.reached.wait(WAIT_S)
        handle.stop("cancelled")
        work.open.set()
        assert outcome(handle) == Interrupted(reason="cancelled")
        assert work.count == 8


class Looking(Steps):
    """Work of whole steps that looks up twice within each; what a look raises starts it over."""

    look: Callable[[], None]

    def __init__(self, steps: int, clock: Ticking, *, gate: int = -1) -> None:
        super().__init__(steps, clock, gate=gate)
        self.off = threading.Event()

    @override
    def suspend(self) -> None:
        super().suspend()
        self.off.set()

    def listen(self, look: Callable[[], None]) -> None:
        self.look = look

    @override
    def advance(self) -> Progress:
        assert self.count % 2 == 0
        self.look()
        if self.count == self._gate:
            self.reached.set()
            assert self.open.wait(WAIT_S)
            self.look()
        super().advance()
        return super().advance()


@pytest.mark.parametrize(("patience_s", "moves"), [(WAIT_S, []), (0.0, ["off", "on"])])
def test_a_pause_is_obeyed_within_a_micro_batch(
    patience_s: float, moves: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short one only waits; in a longer one memory is given back and the step begins again."""
    monkeypatch.setattr("volunteer.training.trainer.SHORT_PAUSE_S", patience_s)
    clock = Ticking()
    with training(clock) as trainer:
        work = Looking(4, clock, gate=4)
        handle = trainer.submit(assignment(work))
        assert work.reached.wait(WAIT_S)
        trainer.pause()
        work.open.set()
        assert trainer.resting.wait(WAIT_S)
        assert not moves or work.off.wait(WAIT_S)
        assert work.count == 4
        asked = trainer.interject(lambda: work.count)
        trainer.resume()
        ended = outcome(handle)
        assert isinstance(ended, Finished)
        assert ended.value == 8
        assert asked.result(WAIT_S) == 4
        assert work.moves == moves


@pytest.mark.parametrize(("kind", "done"), [(Steps, 8), (Looking, 6)])
def test_stop_with_save_goes_on_to_the_end_of_the_step(kind: type[Steps], done: int) -> None:
    """A save within a micro-batch returns to the end of the step before."""
    clock = Ticking()
    saved: list[int] = []
    with training(clock) as trainer:
        work = kind(100, clock, gate=6)

        def save(work: Any) -> None:
            work.snapshot()
            saved.append(work.count)

        handle = trainer.submit(assignment(work, save=save))
        assert work.reached.wait(WAIT_S)
        handle.stop("saved", save=True)
        work.open.set()
        assert outcome(handle) == Interrupted(reason="saved")
        assert saved == [done]


def test_snapshots_come_between_steps_and_not_too_often() -> None:
    clock = Ticking()
    saved: list[float] = []
    with training(clock) as trainer:

        def save(work: Any) -> None:
            work.snapshot()
            saved.append(clock.at)
            clock.at += 0.05  # it takes a while

        outcome(trainer.submit(assignment(Steps(60, clock), save=save, save_every_s=1.0)))
    gaps = [later - earlier for earlier, later in pairwise(saved)]
    assert len(saved) >= 3
    assert min(gaps) >= 0.05 * 50 - 1e-6  # at most two percent of the time


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("no"),
        RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_out_of_memory_halves_and_goes_on(error: Exception) -> None:
    clock = Ticking()
    halved: list[int] = []
    with training(clock) as trainer:
        work = Steps(3, clock, micro=8)
        work.errors = [error, error]
        ended = outcome(trainer.submit(assignment(work, halved=halved.append)))
        assert isinstance(ended, Finished)
        assert halved == [4, 2]


def test_what_does_not_fit_at_all_fails() -> None:
    clock = Ticking()
    with training(clock) as trainer:
        work = Steps(3, clock, micro=1)
        work.errors = [MemoryError("no")]
        handle = trainer.submit(assignment(work))
        with pytest.raises(MemoryError, match="one sample alone"):
            outcome(handle)
        assert trainer.resting.wait(WAIT_S)


def test_other_errors_are_not_taken_for_want_of_memory() -> None:
    assert not out_of_memory(RuntimeError("size mismatch"))
    assert not out_of_memory(ValueError("out of memory"))
    clock = Ticking()
    with training(clock) as trainer:
        work = Steps(3, clock)
        work.errors = [RuntimeError("size mismatch")]
        with pytest.raises(RuntimeError, match="size mismatch"):
            outcome(trainer.submit(assignment(work)))
        after = trainer.submit(assignment(Steps(1, clock)))  # the thread lives on
        assert isinstance(outcome(after), Finished)


def test_all_torch_work_of_a_device_is_on_one_thread() -> None:
    clock = Ticking()
    with training(clock) as trainer:
        threads: list[int] = []

        def here(then: Any) -> Callable[..., Any]:
            def run(*_: Any) -> Any:
                threads.append(threading.get_ident())
                return then

            return run

        trainer.call(here(None)).result(WAIT_S)
        work = Steps(1, clock)
        outcome(trainer.submit(assignment(work, begin=here(work), finish=here(1))))
        assert len(threads) == 3
        assert set(threads) == {threads[0]} != {threading.get_ident()}


def test_a_call_gives_its_error_to_who_asked() -> None:
    with training(Ticking()) as trainer:
        failed: Future[float] = trainer.call(lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            failed.result(WAIT_S)


def test_closing_ends_a_task_under_way() -> None:
    clock = Ticking()
    trainer = Trainer("cpu", threads=1, clock=clock)
    trainer.start()
    work = Steps(10, clock, gate=3)
    handle = trainer.submit(assignment(work))
    assert work.reached.wait(WAIT_S)
    closed: list[bool] = []
    closing = threading.Thread(target=lambda: closed.append(trainer.close(WAIT_S)))
    closing.start()
    with trainer.changed:
        trainer.changed.wait_for(trainer.away, WAIT_S)
    work.open.set()
    closing.join(WAIT_S)
    assert closed == [True]
    assert isinstance(outcome(handle), Interrupted)


def test_whoever_waits_for_a_thread_that_dies_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # as where its libraries cannot be loaded
    trainer = Trainer("cpu", threads=1)
    asked = [trainer.call(lambda: 1), trainer.call(lambda: 2)]
    trainer.start()
    later = trainer.call(lambda: 3)
    for future in (*asked, later):
        with pytest.raises(ThreadDied, match="the training thread of cpu died"):
            future.result(WAIT_S)
    with pytest.raises(ThreadDied):
        trainer.call(lambda: 4).result(0)  # and whoever comes after that
    assert trainer.close(WAIT_S)


def metered(work: Steps, clock: Ticking) -> list[StepFigures]:
    """Train work with a meter; return what was measured."""
    found: list[StepFigures] = []
    with training(clock) as trainer:
        meter = StepMeter("cpu", found.append)
        outcome(trainer.submit(assignment(work, meter=meter)))
    return found


def test_the_first_steps_of_a_task_are_measured_once() -> None:
    clock = Ticking()
    (measured,) = metered(Steps(9, clock), clock)
    assert measured.step_s == pytest.approx(0.2)  # two micro-batches
    assert (measured.steps, measured.halved) == (3, False)


def test_a_step_that_ran_out_of_memory_counts_from_where_it_started_over() -> None:
    clock = Ticking()
    work = Steps(9, clock)
    work.errors.append(MemoryError("no room"))
    (measured,) = metered(work, clock)
    assert measured.halved
    assert measured.step_s == pytest.approx(0.2)


def test_work_that_goes_on_from_a_snapshot_is_not_measured() -> None:
    clock = Ticking()
    work = Steps(9, clock)
    work.count = 7
    assert metered(work, clock) == []
