"""One merge: from the files of a version and of its contributions to the files of the next version.

    merge_model(order, ...)                                  the whole model at once
    survey_shard ... merge_shard ... assemble        in shards, each on any replica; the same bytes

A merge goes piece by piece over the fixed grid: it aggregates, applies the server optimiser and
writes. It needs memory for a few pieces, whatever the number of contributions and the size of the
model. It writes only its output files, so a failed merge changes nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from coordinator.aggregation import aggregate
from coordinator.aggregation.cohort import (
    Cohort,
    DeltaReader,
    Floats,
    TensorPiece,
    cohort,
    pieces,
)
from coordinator.aggregation.optimizer_state import NewState, OldState
from coordinator.aggregation.private_mean import NoiseTerms
from coordinator.aggregation.robust import Aggregator
from coordinator.aggregation.server_optimizer import (
    Push,
    ServerOptimizer,
    StepTerms,
    server_optimizer,
)
from coordinator.aggregation.shards import (
    Layout,
    Shard,
    file_name,
    reassemble,
    shard_schema,
)
from coordinator.plan.plan_tables import Plan
from shared.tensors.codec import codec
from shared.tensors.frame import Frame, FrameWriter, WrittenFile, open_frame, schema_of_file
from shared.tensors.quantize import SPAN, sum_squares
from shared.tensors.spec import Schema, TensorSpec, grid

STEPS_MAX = 1 << 40
COUNTS_A_STEP = 16  # most that a counter grows in a step: a batch norm counts each forward pass
# Most that a merge moves an element of a buffer, in multiples of (1 + the base's largest value).
BUFFER_REACH = 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """One accepted contribution."""

    path: Path
    codec: str
    weight: float  # work x staleness weight
    clip: float = 1.0  # factor of its parameters, below 1 for an update that is too long
    steps: int = STEPS_MAX  # steps of its task


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeOrder:
    """Complete input of a merge."""

    plan: Plan
    schema: Schema
    base: Path  # master weights
    state: tuple[Path, ...]  # files of the base's server-optimiser state, for any shards; may be ()
    inputs: tuple[Input, ...]
    push: Push = field(default_factory=Push)
    decay: float = 0.0  # weight decay of matrices before the step; the step's rate multiplies it
    clip_norm: float = 0.0  # largest norm of the update; 0 = no limit
    noise: NoiseTerms | None = None  # noise of a merge over members' data with [privacy]
    threads: int = 1
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def rule(self) -> Aggregator:
        """Return the aggregation rule for this number of contributions."""
        return aggregate.aggregator(self.plan, len(self.inputs), self.clip_norm, self.noise)


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeOutput:
    """Files and figures of a finished merge, or of a shard's part of a merge."""

    weights: WrittenFile
    state: WrittenFile | None
    squares: tuple[float, ...]  # squared norm of the update in each piece

    @property
    def update_norm(self) -> float:
        return norm_of(self.squares)


def norm_of(squares: Iterable[float]) -> float:
    """Return the L2 norm of an update from its pieces' squared norms, in any order."""
    return math.sqrt(math.fsum(squares))


def merge_model(order: MergeOrder, weights: Path, state: Path) -> MergeOutput:
    """Write the weights and, if the optimiser has one, the state of the next version.

    Raises NotFinite naming the contributions to leave out, InvalidFrame, StorageFull.
    """
    with ExitStack() as files:
        gathered = _gather(files, order)
        rule = order.rule
        whole = Layout(pieces=pieces(order.schema), schema=order.schema, whole=True)
        factors = aggregate.prepare(rule, gathered, whole.pieces, order.threads)
        return _write(_Opened(files, order, gathered), whole, factors, weights, state)


# --- in shards ---


def survey_shard(order: MergeOrder, shard: Shard, path: Path) -> WrittenFile:
    """Write a shard's survey for the aggregation rule, a float64 tensor for each piece.

    Raises as `merge_model` does.
    """
    with ExitStack() as files:
        gathered = _gather(files, order)
        grid = [piece for piece in shard if piece.spec.role == "parameter"]
        surveys = aggregate.survey(order.rule, gathered, grid, order.threads)
        first = next(surveys, None)
        # shape of the survey, the same for all pieces
        shape = None if first is None else first.shape
        specs = [TensorSpec(file_name(piece), shape, "F64", "buffer") for piece in grid if shape]
        with FrameWriter(path, tuple(specs), order.metadata) as writer:
            for spec, values in zip(specs, itertools.chain([first], surveys), strict=False):
                assert values is not None
                writer.write(spec.name, values)
        assert writer.written is not None
        return writer.written


def merge_shard(
    order: MergeOrder, shard: Shard, surveys: Sequence[Path], weights: Path, state: Path
) -> MergeOutput:
    """Write a shard's part of the next version, from the surveys of all shards. Raises as
    `merge_model` does.
    """
    with ExitStack() as files:
        gathered = _gather(files, order)
        frames = [files.enter_context(open_frame(path, schema_of_file(path))) for path in surveys]
        homes = {name: frame for frame in frames for name in frame}
        names = map(file_name, pieces(order.schema))
        parts = (homes[name].array(name) if name in homes else None for name in names)
        factors = aggregate.merge_factors(order.rule, gathered, parts)
        layout = Layout(pieces=shard, schema=shard_schema(shard), whole=False)
        return _write(_Opened(files, order, gathered), layout, factors, weights, state)


def assemble(
    schema: Schema,
    shards: Sequence[Shard],
    parts: Mapping[int, Path],
    path: Path,
    metadata: Mapping[str, str],
) -> WrittenFile:
    """Join the weights of all shards into the file that `merge_model` would have written. Raises
    InvalidFrame.
    """
    with ExitStack() as files:
        frames = {
            index: files.enter_context(open_frame(part, shard_schema(shards[index])))
            for index, part in parts.items()
        }
        writer = files.enter_context(FrameWriter(path, schema, metadata))
        for piece, index, name in reassemble(schema, shards):
            writer.write(piece.spec.name, frames[index].array(name).reshape(-1))
        return writer.close()


# --- the walk ---


@dataclass(frozen=True, slots=True, kw_only=True)
class _Clipped:
    """Contribution whose parameters are multiplied by `factor`, its `Input.clip`."""

    reader: DeltaReader
    factor: np.float32
    parameters: frozenset[str]

    def read(self, name: str, start: int, stop: int, room: Floats | None = None) -> Floats:
        values = self.reader.read(name, start, stop, room)
        return values * self.factor if name in self.parameters else values


@dataclass(frozen=True, slots=True)
class _Opened:
    """Merge order and its cohort, whose files are open until `files` is closed."""

    files: ExitStack
    order: MergeOrder
    gathered: Cohort


def _gather(files: ExitStack, order: MergeOrder) -> Cohort:
    return cohort(
        [_reader(files, order, item) for item in order.inputs],
        [item.weight for item in order.inputs],
    )


def _reader(files: ExitStack, order: MergeOrder, item: Input) -> DeltaReader:
    update = files.enter_context(codec(item.codec).decode(item.path, order.schema))
    if item.clip == 1.0:
        return update
    parameters = frozenset(spec.name for spec in order.schema if spec.role == "parameter")
    return _Clipped(reader=update, factor=np.float32(item.clip), parameters=parameters)


def _write(
    opened: _Opened, layout: Layout, factors: Floats, weights: Path, state: Path
) -> MergeOutput:
    files, order, gathered = opened.files, opened.order, opened.gathered
    base = files.enter_context(open_frame(order.base, order.schema))
    optimizer = server_optimizer(order.plan)
    old = OldState(files, order.state)
    before = {name: old.counter(name) or 0.0 for name in optimizer.counters}
    terms = optimizer.begin(before, order.push)
    new_state = NewState(files, state, layout, optimizer, old) if optimizer.slots else None
    writer = files.enter_context(FrameWriter(weights, layout.schema, order.metadata))
    walk = _Walk(order, layout, gathered, base, writer, optimizer, new_state, terms)
    squares = walk.run(factors)
    written = writer.close()
    return MergeOutput(
        weights=written,
        state=new_state.close(terms) if new_state else None,
        squares=squares,
    )


@dataclass(frozen=True, slots=True)
class _Walk:
    """Walk over the pieces of a new weights file in canonical order."""

    order: MergeOrder
    layout: Layout
    gathered: Cohort
    base: Frame
    writer: FrameWriter
    optimizer: ServerOptimizer
    state: NewState | None
    terms: StepTerms

    def run(self, factors: Floats) -> tuple[float, ...]:
        """Write every piece; return the squared norm of the aggregated update in each piece of
        parameters.
        """
        rule = self.order.rule
        grid = [piece for piece in self.layout.pieces if piece.spec.role != "counter"]
        merged = aggregate.merge(rule, self.gathered, factors, grid, self.order.threads)
        squares: list[float] = []
        for piece in self.layout.pieces:
            name, _ = self.layout.place(piece)
            if piece.spec.role == "counter":
                self.writer.write(name, self._counter(piece))
                continue
            values = next(merged).values
            if piece.spec.role == "parameter":
                slots = self.state.slots(piece) if self.state else {}
                squares.append(self._step(name, piece, values, slots))
            elif piece.spec.role == "momentum":
                flat: Floats = self.base.array(piece.spec.name).reshape(-1)
                self.writer.write(name, flat[piece.start : piece.start + piece.size] - values)
            else:
                self.writer.write(name, self._bounded(piece, values))
        return tuple(squares)

    def _step(
        self, name: str, piece: TensorPiece, update: Floats, slots: Mapping[str, Floats]
    ) -> float:
        """Write a piece's parameters in cached blocks; return the squared norm of the update."""
        flat: Floats = self.base.array(piece.spec.name).reshape(-1)
        order, square = self.order, 0.0
        decay = order.decay if len(piece.spec.shape) > 1 else 0.0
        retention = np.float32(1 - order.plan.lr * order.push.scale * decay)
        for start, stop in grid(piece.size, SPAN):
            params = self.writer.room(name, stop - start)
            np.multiply(flat[piece.start + start : piece.start + stop], retention, out=params)
            part = {slot: values[start:stop] for slot, values in slots.items()}
            square += sum_squares(update[start:stop])
            self.optimizer.step(params, update[start:stop], part, self.terms)
        return square

    def _counter(self, piece: TensorPiece) -> np.ndarray[tuple[int], np.dtype[np.generic]]:
        name, start, stop = piece.spec.name, piece.start, piece.stop
        values = [reader.read(name, start, stop) for reader in self.gathered.readers]
        before = self.base.array(name).reshape(-1)[start:stop]
        most = COUNTS_A_STEP * max(entry.steps for entry in self.order.inputs)
        return aggregate.merge_counters(before, values, most).astype(before.dtype)

    def _bounded(self, piece: TensorPiece, values: Floats) -> Floats:
        """Return a buffer's values, limited to the range around the base's that honest work can
        reach.
        """
        base: Floats = self.base.array(piece.spec.name).reshape(-1)
        reach = BUFFER_REACH * (1 + np.max(np.abs(base), initial=0))
        here = base[piece.start : piece.stop]
        return np.clip(values, here - reach, here + reach, out=values)
