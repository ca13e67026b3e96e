"""Background thread on which a device trains: start, pause, resume, stop, without any network.

All torch work of a device runs on this thread, benchmark and loading included: a second thread that
runs torch after another has done so trains at 0.6-0.7 of the rate (each has its own OpenMP pool).
The daemon thread checks for requests between micro-batches and within long micro-batches, so that a
pause takes effect within half a second. During a short pause within a micro-batch the thread only
waits; a longer pause frees the micro-batch's memory, and the step starts over.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from shared.clock import Clock, SystemClock
from shared.errors import Internal
from shared.programs import gc_freeze
from shared.sentences import Sentence
from shared.workloads.base import Progress, Work
from shared.workloads.training.memory_release import release_memory
from shared.workloads.training.micro_batch import Listening
from volunteer.machine.device_memory import (
    OutOfMemory,
    out_of_memory,
    refused_bytes,
)
from volunteer.machine.policy import rest_after
from volunteer.machine.priority import lower_thread
from volunteer.training.job import Finished, Interrupted, TaskSeconds, TrainingJob, TrainingReport

if TYPE_CHECKING:
    from shared.workloads.training.ranks import Ranks

REPORT_S = 0.25  # shortest interval of progress reports to the event loop
SAVE_SHARE = 0.02  # largest share of the time for snapshots
SHORT_PAUSE_S = 10.0  # longest pause that keeps a micro-batch in memory
STEP_END_S = 1.5  # longest wait of a stop with `save` for the end of a step

log = logging.getLogger(__name__)

T = TypeVar("T")


class Handle(Generic[T]):
    """Handle of a submitted task: its future, its latest report, and requests to it."""

    def __init__(self, trainer: Trainer) -> None:
        self.future: Future[Finished[T] | Interrupted] = Future()
        self.latest: TrainingReport | None = None
        self.stopping = ""  # reason of a requested stop
        self.saving = False
        self.orders: deque[Callable[[Work], None]] = deque()
        self._trainer = trainer

    def tell(self, order: Callable[[Work], None]) -> None:
        """Run an order on the training thread, between two micro-batches."""
        self.orders.append(order)

    def stop(self, reason: str, *, save: bool = False) -> None:
        """Stop at the next micro-batch; with `save`, at the end of the step, with a snapshot."""
        with self._trainer.changed:
            self.stopping = self.stopping or reason or Sentence("stopped")
            self.saving = save
            self._trainer.changed.notify_all()


class ThreadDied(Internal):
    """Error of every call to a training thread that died."""


class _Stop(Exception):
    """Raised on the training thread when the running task has to stop."""


class _LongPause(Exception):
    """Raised within a micro-batch when a pause is too long to keep the micro-batch in memory."""

    def __init__(self, waited_s: float) -> None:
        super().__init__()
        self.waited_s = waited_s


class _Job:
    """Job for the training thread, and the future of its outcome."""

    def __init__(self, run: Callable[[], None], outcome: Future[Any]) -> None:
        self.run = run
        self._outcome = outcome

    def fail(self, error: Exception) -> None:
        with contextlib.suppress(InvalidStateError):
            self._outcome.set_exception(error)


def _outcome_of(function: Callable[[], T]) -> tuple[_Job, Future[T]]:
    """Return a job that calls a function, and the future of its result or error."""
    future: Future[T] = Future()

    def run() -> None:
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

    return _Job(run, future), future


class Trainer:
    """Device and its training thread."""

    def __init__(
        self, device: str, *, threads: int, clock: Clock | None = None, low: bool = False
    ) -> None:
        self.device = device
        self.rank_devices: tuple[str, ...] = ()  # devices of further ranks
        self.share = 1.0  # share of working time
        self.changed = threading.Condition()
        self.resting = threading.Event()  # set while no task trains: none runs, or it is paused
        self.resting.set()
        self._threads = threads
        self._low = low  # low priority, for this thread and torch's own
        self._clock = clock or SystemClock()
        self._paused = False
        self._closing = False
        self._ranks: Ranks | None = None
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._interjected: deque[_Job] = deque()
        self._dead: ThreadDied | None = None
        self._thread = threading.Thread(target=self._main, name=f"trainer {device}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, assignment: TrainingJob[T]) -> Handle[T]:
        """Train a task after the running one; its future gets Finished, Interrupted or an error."""
        handle: Handle[T] = Handle(self)
        self._put(_Job(lambda: self._train(assignment, handle), handle.future))
        return handle

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run other torch work on the same thread."""
        job, future = _outcome_of(function)
        self._put(job)
        return future

    def interject(self, function: Callable[[], T]) -> Future[T]:
        """Run short torch work at the next check of the running task; at once if no task runs."""
        job, future = _outcome_of(function)
        self._interjected.append(job)
        self._put(_Job(self.interlude, future))  # runs at once if there is no job
        return future

    def interlude(self) -> None:
        """Run the interjected jobs, on the training thread, at a check of the running task."""
        while self._interjected:
            self._interjected.popleft().run()

    def ranks(self) -> Ranks | None:
        """Return the further ranks of this device, None without further ranks; call it on the
        training thread.
        """
        if self.rank_devices and self._ranks is None:
            from shared.workloads.training.ranks import Ranks

            self._ranks = Ranks(self.rank_devices, threads=self._threads)
        return self._ranks

    def _put(self, job: _Job) -> None:
        with self.changed:
            dead = self._dead
            if dead is None:
                self._jobs.put(job)
        if dead is not None:
            job.fail(dead)

    def pause(self) -> None:
        """Pause the device at the next check of its task, which stays."""
        with self.changed:
            self._paused = True

    def resume(self) -> None:
        with self.changed:
            self._paused = False
            self.changed.notify_all()

    def away(self) -> bool:
        """Return True if work has to leave the device soon, for a pause or the end."""
        return self._paused or self._closing

    def close(self, timeout_s: float = 2.0) -> bool:
        """Stop all work and wait. Return False if the thread still runs: the process must then
        os._exit.
        """
        with self.changed:
            self._closing = True
            self.changed.notify_all()
        self._jobs.put(None)
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _main(self) -> None:
        """Run queued jobs; an error outside of a job fails all waiting and later calls."""
        if self._low:
            lower_thread()
        try:
            self._run_jobs()
            if self._ranks is not None:
                self._ranks.stop()
        except BaseException as error:
            log.exception("the training thread of %s died", self.device)
            died = ThreadDied(
                Sentence(
                    "the training thread of {device} died ({kind}: {error})",
                    device=self.device,
                    kind=type(error).__name__,
                    error=error,
                )
            )
            died.__cause__ = error
            with self.changed:
                self._dead = died
            while not self._jobs.empty():
                job = self._jobs.get()
                if job is not None:
                    job.fail(died)
            self.resting.set()

    def _run_jobs(self) -> None:
        # The first job imports torch; the thread count belongs to this thread.
        configured = False
        while (job := self._jobs.get()) is not None:
            try:
                if not configured:
                    with gc_freeze.long_lived():
                        import torch

                    torch.set_num_threads(self._threads)
                    configured = True
                job.run()
            except BaseException:
                self._jobs.put(job)  # then the job fails like the waiting jobs
                raise
            del job  # the job holds the work of the last task

    def _train(self, assignment: TrainingJob[T], handle: Handle[T]) -> None:
        if not handle.future.set_running_or_notify_cancel():
            return
        session = _Session(self, assignment, handle, self._clock)
        try:
            outcome = session.run()
        except BaseException as error:
            handle.future.set_exception(error)
        else:
            handle.future.set_result(outcome)
        finally:
            del session
            release_memory(assignment.device)
            self.resting.set()

    def obey(self, handle: Handle[T], work: Work | None, most_s: float | None = None) -> float:
        """Wait while the device is paused, and free it for that time if `work` is given; return the
        seconds waited. Raises _Stop, and _LongPause after `most_s` seconds.
        """
        waited, over = 0.0, True
        resting = self._must_rest(handle)
        if resting:
            began = self._clock.monotonic()
            if work is not None:
                work.suspend()
            self.resting.set()
            with self.changed:
                over = self.changed.wait_for(lambda: not self._must_rest(handle), most_s)
            waited = self._clock.monotonic() - began
        if self._must_stop(handle):
            raise _Stop
        if not over:
            raise _LongPause(waited)
        if resting and work is not None:
            work.resume()
        self.resting.clear()
        return waited

    def rest(self, handle: Handle[T], busy_s: float) -> None:
        """Idle after `busy_s` seconds of work, as `share` demands; a pause or a stop ends it."""
        wait = rest_after(busy_s, self.share)
        if wait > 0:
            with self.changed:
                self.changed.wait_for(lambda: self._paused or self._must_stop(handle), wait)

    def _must_rest(self, handle: Handle[T]) -> bool:
        return self._paused and not self._must_stop(handle)

    def _must_stop(self, handle: Handle[T]) -> bool:
        return self._closing or bool(handle.stopping)


class _Session(Generic[T]):
    """Execution of one job on the training thread."""

    def __init__(
        self, trainer: Trainer, assignment: TrainingJob[T], handle: Handle[T], clock: Clock
    ) -> None:
        self._trainer = trainer
        self._assignment = assignment
        self._handle = handle
        self._clock = clock
        self._paused_s = 0.0
        self._began = clock.monotonic()
        self._meter = _RateMeter()
        self._loss: float | None = None
        self._step = 0
        self._reported = float("-inf")
        self._save_after = clock.monotonic() + assignment.save_every_s
        self._work_began = 0.0  # start of the work since the last rest
        self._away_s = 0.0  # seconds of pauses, rests and interjected jobs in this micro-batch
        self._refused_bytes = 0  # bytes of the last failed allocation

    def run(self) -> Finished[T] | Interrupted:
        """Run the job. Raises OutOfMemory if the task does not fit, and the job's errors."""
        try:
            return self._run_task()
        except Exception as error:
            if isinstance(error, OutOfMemory) or not out_of_memory(error):
                raise
            message = str(error).partition("\n")[0]
            needed = self._peak_bytes() + (refused_bytes(error) or self._refused_bytes)
        raise OutOfMemory(message, needed)  # the traceback would keep the failed tensors alive

    def _peak_bytes(self) -> int:
        return self._assignment.meter.peak_bytes() if self._assignment.meter is not None else 0

    def _run_task(self) -> Finished[T] | Interrupted:
        work: Work | None = None
        try:
            self._paused_s += self._trainer.obey(self._handle, None)
            loading, meter = self._clock.monotonic(), self._assignment.meter
            if meter is not None:
                meter.begin()
            work = self._assignment.begin()
            self._began += self._clock.monotonic() - loading  # loading does not count as training
            if isinstance(work, Listening):
                work.listen(self._check_requests)
            while not work.done:
                self._paused_s += self._trainer.obey(self._handle, work)
                while self._handle.orders:
                    self._handle.orders.popleft()(work)
                self._trainer.interlude()
                self._micro_batch(work)
            value = self._assignment.finish(work, self._spent())
            return Finished(value=value, spent=self._spent())
        except _Stop:
            if work is not None and self._handle.saving:
                self._save_last(work)
            reason = self._handle.stopping or Sentence("the program ends")
            return Interrupted(reason=reason)
        finally:
            if self._assignment.meter is not None:
                self._assignment.meter.close()

    def _micro_batch(self, work: Work) -> None:
        meter, began = self._assignment.meter, self._clock.monotonic()
        self._work_began, self._away_s = began, 0.0
        try:
            progress = self._advance(work)
        except _LongPause as pause:
            self._paused_s += pause.waited_s
            if meter is not None:
                meter.restart_step()
            return
        if meter is not None:
            meter.record(work, progress, self._clock.monotonic() - began - self._away_s)
        self._report_and_save(work, progress)
        self._trainer.rest(self._handle, self._clock.monotonic() - self._work_began)

    def _check_requests(self) -> None:
        """Obey pauses and run interjected jobs in the middle of a micro-batch."""
        began = self._clock.monotonic()
        self._paused_s += self._trainer.obey(self._handle, None, SHORT_PAUSE_S)
        self._trainer.interlude()
        self._trainer.rest(self._handle, began - self._work_began)
        self._work_began = self._clock.monotonic()
        self._away_s += self._work_began - began

    def _advance(self, work: Work) -> Progress:
        """Compute one micro-batch; halve it until it fits the memory."""
        while True:
            try:
                return work.advance()
            except Exception as error:
                if not out_of_memory(error):
                    raise
                self._refused_bytes = refused_bytes(error)
            # Release memory outside of the except block: its traceback keeps failed tensors.
            release_memory(self._assignment.device)
            if self._assignment.meter is not None:
                self._assignment.meter.record_halving()
            self._assignment.halved(work.halve())

    def _report_and_save(self, work: Work, progress: Progress) -> None:
        now = self._clock.monotonic()
        if progress.loss is not None:
            self._loss = progress.loss
        if now - self._reported >= REPORT_S or work.done:
            self._reported = now
            self._report(progress)
        if self._ended_step(progress) and now >= self._save_after and not work.done:
            self._save(work)

    def _ended_step(self, progress: Progress) -> bool:
        """Return True if a step has just ended: only then can a snapshot be taken."""
        before, self._step = self._step, progress.step
        return progress.step > before

    def _report(self, progress: Progress) -> None:
        spent = self._spent()
        rate = self._meter.rate(spent.train_s, progress.samples)
        total = max(1, self._assignment.samples)
        report = TrainingReport(
            step=progress.step,
            steps=progress.steps,
            samples=progress.samples,
            loss=self._loss,
            samples_per_s=rate,
            steps_per_s=rate * progress.steps / total,
            eta_s=max(0, total - progress.samples) / rate if rate > 0 else None,
            train_s=spent.train_s,
            preview=progress.preview,
            counted=progress.counted,
            metrics=progress.metrics,
        )
        self._handle.latest = report
        self._assignment.report(report)

    def _spent(self) -> TaskSeconds:
        whole = self._clock.monotonic() - self._began
        return TaskSeconds(train_s=max(0.0, whole - self._paused_s), paused_s=self._paused_s)

    def _save(self, work: Work) -> None:
        if self._assignment.save is None or self._assignment.save_every_s <= 0:
            return
        began = self._clock.monotonic()
        self._assignment.save(work)
        took = self._clock.monotonic() - began
        self._save_after = began + took + max(self._assignment.save_every_s, took / SAVE_SHARE)

    def _save_last(self, work: Work) -> None:
        """Save at the end of the current step, if that comes soon."""
        if (
            self._trainer.resting.is_set()
        ):  # paused: the device stays idle, the previous snapshot remains
            return
        until = self._clock.monotonic() + STEP_END_S
        while not work.done and self._clock.monotonic() < until:
            try:
                between = self._ended_step(self._advance(work))
            except _Stop:  # raised within a micro-batch: its step has started over
                between = True
            if between:
                self._save(work)
                return


class _RateMeter:
    """Rate in samples a second over the last reports."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int]] = deque(maxlen=40)

    def rate(self, at_s: float, samples: int) -> float:
        if self._marks and samples < self._marks[-1][1]:
            self._marks.clear()  # a step started over
        self._marks.append((at_s, samples))
        first_at, first = self._marks[0]
        return (samples - first) / (at_s - first_at) if at_s > first_at else 0.0
