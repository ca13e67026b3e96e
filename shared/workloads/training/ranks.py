"""Ranks: further devices of this machine that compute a part of each step, each in a process of its
own.

Rank 0 is the calling process and has the only optimiser. torch.distributed carries the weights to
the others at the beginning of a step and their gradients back at its end. If a rank dies, nothing
is lost: the remaining ranks repeat the step.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection
from pathlib import Path
from time import sleep
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from shared.files.deletions import delete_folder

if TYPE_CHECKING:
    from multiprocessing.context import SpawnProcess

LIMIT = timedelta(minutes=10)  # longest time of a step of the slowest rank
LOOK_S = 0.005
DYING_S = 1.0  # longest time from the end of a connection to the end of its process


class RankLost(Exception):
    """Error of a step in which a rank died."""


@dataclass(frozen=True, slots=True)
class Part:
    """Samples [start, stop) of a step of `size` samples, in micro-batches of `micro`; with
    `streams` the weights come from, and the gradients go to, the memory of the host.
    """

    start: int
    stop: int
    size: int
    micro: int
    streams: bool = False


class Assistant(Protocol):
    """Work of a rank other than 0."""

    def assist(self, part: Part) -> None: ...

    def listen(self, look: Callable[[], None]) -> None: ...


Begin: TypeAlias = Callable[[str], Assistant]  # begins the task on a device; pickled


@dataclass(frozen=True, slots=True)
class _Rank:
    device: str
    process: SpawnProcess
    pipe: Connection


class Ranks:
    """Ranks 1, 2, ... on `devices`, started when a step needs them, idle while rank 0 is idle."""

    def __init__(self, devices: Sequence[str], *, threads: int = 1) -> None:
        self._devices = self._left = tuple(devices)
        self._threads = threads
        self._task: Begin | None = None
        self._ranks: list[_Rank] = []
        self._folder: Path | None = None  # folder through which the ranks find each other
        self._held: Any = get_context("spawn").RawValue("b", 1)
        self.computing = False  # a part of the present step is being computed

    def begin(self, task: Begin) -> None:
        """Set the task of the next steps."""
        self._task = task
        if self.computing or self._left != self._devices:
            self.stop()
        self._left = self._devices
        try:
            for rank in self._ranks:
                rank.pipe.send(task)
        except OSError:
            self.stop()

    def hold(self, on_hold: bool) -> None:
        """Pause the ranks, or let them continue."""
        self._held.value = int(on_hold)

    def share(self, weights: Iterable[Tensor], whole: Part) -> int:
        """Begin a step: send weights and samples; return where rank 0's samples end. Raises
        RankLost.
        """
        part = whole.size // (len(self._left) + 1)
        if not self._left or not part:
            return whole.stop
        own_start = whole.stop - part * len(self._left)
        try:
            if not self._ranks:
                self._start()
            self.computing = True
            for at, rank in enumerate(self._ranks):
                start = own_start + at * part
                rank.pipe.send(replace(whole, start=start, stop=start + part))
            broadcast(weights)
        except (RuntimeError, OSError) as error:
            raise self._lost() from error
        return own_start

    def collect(self, gradients: Iterable[Tensor], look: Callable[[], None]) -> None:
        """Receive and add the gradients of all ranks, calling `look` many times a second. Raises
        RankLost.
        """
        try:
            for job in [dist.reduce(value, 0, async_op=True) for value in gradients]:
                while not job.is_completed():
                    look()
                    if not all(rank.process.is_alive() for rank in self._ranks):
                        raise RuntimeError("a rank died")
                    sleep(LOOK_S)
                job.wait()
        except RuntimeError as error:
            raise self._lost() from error
        self.computing = False

    def stop(self) -> None:
        """End the processes, which frees their devices; a later step starts them again."""
        for rank in self._ranks:
            rank.process.kill()
            rank.process.join()
            rank.pipe.close()
        self._ranks, self.computing = [], False
        if dist.is_initialized():
            dist.destroy_process_group()
        if self._folder is not None:
            delete_folder(self._folder, "scratch")
            self._folder = None

    def _start(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="ranks"))
        on_gpus = all(device.startswith("cuda") for device in self._left)
        joining: dict[str, Any] = {
            "backend": "cpu:gloo,cuda:nccl" if on_gpus else "gloo",
            "init_method": (self._folder / "meeting").as_uri(),
            "world_size": len(self._left) + 1,
            "timeout": LIMIT,
        }
        spawning = get_context("spawn")
        for number, device in enumerate(self._left, 1):
            near, far = spawning.Pipe()
            process = spawning.Process(
                target=_serve,
                args=(far, device, self._threads, self._held, joining | {"rank": number}),
                name=f"rank {number}",
                daemon=True,
            )
            process.start()
            far.close()  # so that the end of the process is noticed
            self._ranks.append(_Rank(device, process, near))
            near.send(self._task)
        dist.init_process_group(rank=0, **joining)

    def _lost(self) -> RankLost:
        """Stop all ranks, and exclude the dead ranks (all ranks, if no rank is dead) from the task;
        return the error to raise.
        """
        for rank in self._ranks:
            rank.process.join(DYING_S / len(self._ranks))
        alive = tuple(rank.device for rank in self._ranks if rank.process.is_alive())
        self._left = alive if len(alive) < len(self._ranks) else ()
        self.stop()
        return RankLost(f"{len(self._left)} of {len(self._devices)} ranks are left")


def broadcast(weights: Iterable[Tensor]) -> None:
    """Copy the weights of rank 0 to every rank."""
    for job in [dist.broadcast(value, 0, async_op=True) for value in weights]:
        job.wait()


def hand_over(gradients: Iterable[Tensor]) -> None:
    """Send the gradients to rank 0, which adds them."""
    for job in [dist.reduce(value, 0, async_op=True) for value in gradients]:
        job.wait()


def _serve(
    pipe: Connection, device: str, threads: int, on_hold: Any, joining: dict[str, Any]
) -> None:
    """Compute parts of steps until rank 0, or the connection to it, ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 handles the terminal's interrupts
    parent = parent_process()

    def look() -> None:
        while on_hold.value:
            if parent is not None and not parent.is_alive():
                os._exit(1)
            sleep(LOOK_S)

    torch.set_num_threads(threads)
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    try:
        dist.init_process_group(**joining)
        work: Assistant | None = None
        while True:
            message = pipe.recv()
            if isinstance(message, Part):
                assert work is not None
                look()
                work.assist(message)
            else:
                work = message(device)
                work.listen(look)
    except (EOFError, OSError):
        os._exit(0)
