"""The inference process: loads versions and generates what its server orders.

`python -m coordinator.inference.worker FD` with a socket to the server; it ends when that closes.
"""

from __future__ import annotations

import contextlib
import os
import queue
import resource
import signal
import socket
import sys
from collections import OrderedDict
from pathlib import Path
from threading import Thread

import psutil

from coordinator.inference.messages import (
    FRAME_BYTES_MAX,
    HEAD,
    ORDERS,
    Cancel,
    Drawn,
    Event,
    Failed,
    Generate,
    Images,
    ModelFiles,
    Order,
    Prepare,
    Prepared,
    Token,
    framed,
)
from shared.errors import BadRequest, Internal, VolunteerError
from shared.workloads.base import Decoder
from shared.workloads.generation.batch import Batch, Made

SLOTS = 16
LOADED_MAX = 4  # versions at once; those in use are never dropped
MEMORY_SHARE = 0.5  # of the machine's; beyond that a version is too large
CHARACTERS_MAX = 64  # of a prompt for each token that fits
NICENESS = 10  # sockets go first, then checks and evaluation
EXPENDABLE = "900"  # short of memory, the kernel ends this process first


class Loaded:
    """A version that answers, and what it is asked."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.batch = Batch(decoder)
        self.probed: set[str] = set()  # sequences whose probabilities are wanted


class Worker:
    """Carries out the orders of a server, one token of each sequence at a time."""

    def __init__(self, server: socket.socket) -> None:
        self._server = server
        self._orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        self._loaded: OrderedDict[str, Loaded] = OrderedDict()

    def run(self) -> None:
        """Work until the server goes away."""
        Thread(target=self._listen, daemon=True).start()
        while True:
            busy = [each for each in self._loaded.values() if len(each.batch)]
            if not self._take(wait=not busy):
                return
            for each in busy:
                for made in each.batch.step():
                    self._tell(_token(each, made))

    def _listen(self) -> None:
        with contextlib.suppress(OSError), self._server.makefile("rb") as stream:
            while len(head := stream.read(HEAD.size)) == HEAD.size:
                (size,) = HEAD.unpack(head)
                if size > FRAME_BYTES_MAX:
                    break
                self._orders.put(ORDERS.decode(stream.read(size)))
        os._exit(0)  # the server is gone, also in the middle of a computation

    def _take(self, wait: bool) -> bool:
        """Carry out the orders that are here; wait for one where there is nothing else to do."""
        try:
            while (order := self._orders.get(block=wait)) is not None:
                self._obey(order)
                wait = False
        except queue.Empty:
            return True
        return False

    def _obey(self, order: Order) -> None:
        if isinstance(order, Cancel):
            for each in self._loaded.values():
                each.batch.cancel(order.id)
                each.probed.discard(order.id)
            return
        its_id = order.sequence.id if isinstance(order, Generate) else order.id
        try:
            self._carry_out(order)
        except VolunteerError as error:
            self._tell(
                Failed(
                    id=its_id,
                    kind=type(error).__name__,
                    message=error.message,
                    retry_after_s=error.retry_after_s,
                )
            )
        except MemoryError:
            message = "this version is too large for the memory that answers may take"
            self._tell(Failed(id=its_id, kind=Internal.__name__, message=message))
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            self._tell(Failed(id=its_id, kind=Internal.__name__, message=message))

    def _carry_out(self, order: Prepare | Generate | Images) -> None:
        if isinstance(order, Images):
            self._tell(Drawn(id=order.id, images=_images(order)))
            return
        loaded = self._of(order.model)
        if isinstance(order, Prepare):
            context = loaded.decoder.context
            if len(order.prompt) > context * CHARACTERS_MAX:  # others wait while it is read
                raise BadRequest(
                    f"the prompt has {len(order.prompt):,} characters, and {context} tokens fit, "
                    "answer included: shorten it"
                )
            tokens = tuple(loaded.decoder.encode(order.prompt))
            self._tell(Prepared(id=order.id, tokens=tokens, context=context))
        else:
            loaded.batch.add(order.sequence)
            if order.sequence.logprobs is not None:
                loaded.probed.add(order.sequence.id)

    def _of(self, model: ModelFiles) -> Loaded:
        found = self._loaded.get(model.key)
        if found is None:
            idle = [key for key, each in self._loaded.items() if not len(each.batch)]
            for key in idle[: max(0, len(self._loaded) - LOADED_MAX + 1)]:
                del self._loaded[key]
            found = self._loaded[model.key] = Loaded(_load(model))
        self._loaded.move_to_end(model.key)
        return found

    def _tell(self, event: Event) -> None:
        self._server.sendall(framed(event))


def _token(loaded: Loaded, made: Made) -> Token:
    """Return what was made as a message; texts of single tokens only where they are wanted."""
    chosen = made.chosen
    wanted = made.id in loaded.probed
    if made.finish:
        loaded.probed.discard(made.id)
    if chosen is None or not wanted:
        token = None if chosen is None else chosen.token
        return Token(id=made.id, text=made.text, token=token, finish=made.finish)
    decode = loaded.decoder.decode
    return Token(
        id=made.id,
        text=made.text,
        token=chosen.token,
        logprob=(decode([chosen.token]), chosen.logprob),
        top=tuple((decode([token]), value) for token, value in chosen.top),
        finish=made.finish,
    )


def _load(model: ModelFiles) -> Decoder:
    from coordinator.runs.definition import of_file
    from coordinator.runs.version_files import read_weights

    about = of_file(model.file)
    tokenizer = None if model.tokenizer is None else Path(model.tokenizer).read_bytes()
    files = {name: Path(path) for name, path in model.files.items()}
    weights = about.workload.whole(
        about.file.model, read_weights(Path(model.weights), about), files
    )
    found = about.workload.decoder(about.file.model, weights, tokenizer, SLOTS, "cpu")
    if found is None:
        raise BadRequest(f"runs of the workload {about.file.workload} do not answer prompts")
    return found


def _images(order: Images) -> tuple[bytes, ...]:
    from coordinator.runs.definition import of_file
    from coordinator.runs.version_files import read_weights

    about = of_file(order.model.file)
    weights = read_weights(Path(order.model.weights), about)
    drawn = [
        about.workload.sample(about.file.model, weights, None, "", order.seed + index)
        for index in range(order.count)
    ]
    if any(each.kind != "png" for each in drawn):
        raise BadRequest(f"runs of the workload {about.file.workload} draw no pictures")
    return tuple(each.data for each in drawn)


def main() -> None:
    """Serve the socket whose number is the first argument, with the threads of the second."""
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server decides when this ends
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write(EXPENDABLE)
    most = int(psutil.virtual_memory().total * MEMORY_SHARE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    torch.set_num_threads(int(sys.argv[2]))
    Worker(socket.socket(fileno=int(sys.argv[1]))).run()


if __name__ == "__main__":
    main()
