"""One merge: from the files of a version and of its contributions to the files of the next version.

Streams piece by piece over the fixed grid: aggregate, server optimiser, write. Memory is a few pieces, whatever the number of
contributions and the size of the model. Nothing but the two output files is touched, so a failure leaves no trace.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from coordinator.merge import aggregate
from coordinator.merge.cohort import Cohort, DeltaReader, Floats, Piece, cohort, pieces
from coordinator.merge.optimizer import Push, ServerOptimizer, Tick, server_optimizer, state_schema
from coordinator.merge.plan import Plan
from shared.tensors.frame import Frame, FrameWriter, Written, open_frame, schema_of_file
from shared.tensors.header import render_header
from shared.tensors.quantize import codec
from shared.tensors.spec import Schema, TensorSpec
from shared.tensors.update import sum_squares


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """One accepted contribution."""

    path: Path
    codec: str
    weight: float  # work x staleness x trust
    clip: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """All that a merge needs."""

    plan: Plan  # of the phase that holds
    schema: Schema
    base: Path  # master weights
    state: Path | None  # server-optimiser state of the base, if it has any
    inputs: tuple[Input, ...]
    push: Push = field(default_factory=Push)
    threads: int = 1
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a merge wrote."""

    weights: Written
    state: Written | None
    update_norm: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Clipped:
    """A contribution whose parameters are scaled to the size of its cohort."""

    reader: DeltaReader
    factor: np.float32
    parameters: frozenset[str]

    def read(self, name: str, start: int, stop: int) -> Floats:
        found = self.reader.read(name, start, stop)
        return found * self.factor if name in self.parameters else found


class _State:
    """Server-optimiser state of the next version: begun from the old one (or zero), changed in place, hashed once.

    The file is mapped, so that several slots can be written at once without a model's worth of memory.
    """

    def __init__(self, path: Path, schema: Schema, old: Frame | None) -> None:
        header = render_header(schema)
        size = len(header) + sum(spec.nbytes for spec in schema)
        self._file = path.open("x+b")
        self._file.write(header)
        self._file.truncate(size)
        self._file.flush()
        self._map = mmap.mmap(self._file.fileno(), size)
        self._arrays: dict[str, Floats] = {}
        start = len(header)
        for spec in schema:
            self._arrays[spec.name] = np.frombuffer(self._map, np.float32, spec.count, start)
            start += spec.nbytes
            if old is not None and spec.name in old:
                np.copyto(self._arrays[spec.name], old.array(spec.name).reshape(-1))

    def counters(self, optimizer: ServerOptimizer) -> dict[str, float]:
        return {name: float(self._arrays[f"count/{name}"][0]) for name in optimizer.counters}

    def slots(self, optimizer: ServerOptimizer, piece: Piece) -> dict[str, Floats]:
        return {
            slot: self._arrays[f"{slot}/{piece.spec.name}"][piece.start : piece.stop]
            for slot in optimizer.slots
        }

    def close(self, tick: Tick) -> Written:
        """Note the counters, make the file durable and hash it."""
        for name, value in tick.counters.items():
            self._arrays[f"count/{name}"][0] = value
        self._arrays.clear()
        size = len(self._map)
        self._map.flush()
        self._map.close()
        os.fsync(self._file.fileno())
        self._file.seek(0)
        sha256 = hashlib.file_digest(self._file, "sha256").hexdigest()
        self._file.close()
        return Written(sha256=sha256, size=size)


def run(order: Order, weights: Path, state: Path) -> Outcome:
    """Write the weights and, where the optimiser has one, the state of the next version.

    Raises NotFinite naming the contributions to leave out, InvalidFrame, StorageFull.
    """
    with ExitStack() as files:
        base = files.enter_context(open_frame(order.base, order.schema))
        gathered = cohort(
            [_reader(files, order, item) for item in order.inputs],
            [item.weight for item in order.inputs],
        )
        optimizer = server_optimizer(order.plan)
        kept = _open_state(files, order, optimizer, state)
        tick = optimizer.begin(kept.counters(optimizer) if kept else {}, order.push)
        writer = files.enter_context(FrameWriter(weights, order.schema, order.metadata))
        norm = _Walk(order, gathered, base, writer, optimizer, kept, tick).run()
        written = writer.close()
    return Outcome(weights=written, state=kept.close(tick) if kept else None, update_norm=norm)


def _reader(files: ExitStack, order: Order, item: Input) -> DeltaReader:
    update = files.enter_context(codec(item.codec).decode(item.path, order.schema))
    if item.clip == 1.0:
        return update
    parameters = frozenset(spec.name for spec in order.schema if spec.role == "parameter")
    return _Clipped(reader=update, factor=np.float32(item.clip), parameters=parameters)


def _open_state(
    files: ExitStack, order: Order, optimizer: ServerOptimizer, path: Path
) -> _State | None:
    schema = state_schema(optimizer, order.schema)
    if not schema:
        return None
    old = (
        files.enter_context(open_frame(order.state, schema_of_file(order.state)))
        if order.state
        else None
    )
    return _State(path, schema, old)


@dataclass(frozen=True, slots=True)
class _Walk:
    """The walk over the model in canonical order."""

    order: Order
    gathered: Cohort
    base: Frame
    writer: FrameWriter
    optimizer: ServerOptimizer
    state: _State | None
    tick: Tick

    def run(self) -> float:
        """Write every tensor; returns the L2 norm of the aggregated update, summed over the fixed grid."""
        rule = aggregate.aggregator(self.order.plan)
        grid = [piece for piece in pieces(self.order.schema) if piece.spec.role != "counter"]
        factors = aggregate.prepare(rule, self.gathered, grid, self.order.threads)
        merged = aggregate.merge(rule, self.gathered, factors, grid, self.order.threads)
        squares, waiting = 0.0, iter(grid)
        for spec in self.order.schema:
            if spec.role == "counter":
                self._counter(spec)
                continue
            left = spec.count
            while left > 0:
                piece, values = next(waiting), next(merged).values
                left -= piece.size
                if spec.role == "parameter":
                    squares += sum_squares(values)
                    values = self._step(piece, values)
                self.writer.write(spec.name, values)
        return float(np.sqrt(squares))

    def _step(self, piece: Piece, update: Floats) -> Floats:
        flat = self.base.array(piece.spec.name).reshape(-1)
        params: Floats = flat[piece.start : piece.stop].copy()
        slots = self.state.slots(self.optimizer, piece) if self.state else {}
        self.optimizer.step(params, update, slots, self.tick)
        return params

    def _counter(self, spec: TensorSpec) -> None:
        values = [reader.read(spec.name, 0, spec.count) for reader in self.gathered.readers]
        largest = aggregate.merge_counters([*values, self.base.array(spec.name).reshape(-1)])
        self.writer.write(spec.name, largest.astype(self.base.array(spec.name).dtype))
