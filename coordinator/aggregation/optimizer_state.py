"""Server-optimiser state in files, one for the whole model or one for each shard. A merge can read
the files of another division into shards.

The files hold flat float32 arrays "slot/tensor" (or "slot/tensor[start:stop]" for a part of a
tensor), and the counters as "count/name" with one element, which every shard has.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from coordinator.aggregation.cohort import Floats, TensorPiece
from coordinator.aggregation.server_optimizer import ServerOptimizer, StepTerms, state_schema
from coordinator.aggregation.shards import Layout, file_name
from shared.errors import InvalidFrame
from shared.files.deletions import delete_file
from shared.tensors.frame import WrittenFile, open_frame, schema_of_file
from shared.tensors.header import render_header


class OldState:
    """Server-optimiser state before a merge, in one file or several; the first merge has no
    state.
    """

    def __init__(self, files: ExitStack, paths: Sequence[Path]) -> None:
        self._arrays: dict[str, Floats] = {}
        for path in paths:
            frame = files.enter_context(open_frame(path, schema_of_file(path)))
            self._arrays |= {name: frame.array(name).reshape(-1) for name in frame}
        self._slots = {name.partition("/")[0] for name in self._arrays}

    def counter(self, name: str) -> float | None:
        values = self._arrays.get(f"count/{name}")
        return None if values is None else float(values[0])

    def piece(self, slot: str, piece: TensorPiece) -> Floats | None:
        """Return a slot's values for a piece, (N,); None if the last merge had no such slot. Raises
        InvalidFrame if the files lack the piece.
        """
        if slot not in self._slots:
            return None
        whole = self._arrays.get(f"{slot}/{piece.spec.name}")
        if whole is not None and len(whole) == piece.spec.count:
            return whole[piece.start : piece.stop]
        values = self._arrays.get(f"{slot}/{file_name(piece)}")
        if values is None or len(values) != piece.size:
            raise InvalidFrame(
                f"the server-optimiser state lacks {slot} of {file_name(piece)}: "
                "roll back to a version whose files are complete"
            )
        return values


class NewState:
    """Server-optimiser state of the next version: a new file, copied from the old state or zero,
    changed in place and hashed at the end.

    The file is memory-mapped, so a merge needs no memory for the state of a whole model. When
    `files` is closed, an unfinished file is deleted.
    """

    def __init__(
        self,
        files: ExitStack,
        path: Path,
        layout: Layout,
        optimizer: ServerOptimizer,
        old: OldState,
    ) -> None:
        schema = state_schema(optimizer, layout.schema)
        header = render_header(schema)
        size = len(header) + sum(spec.nbytes for spec in schema)
        self._layout = layout
        self._optimizer = optimizer
        self._path = path
        self._file = path.open("x+b")
        files.callback(self._abort)
        self._file.write(header)
        self._file.truncate(size)
        self._file.flush()
        self._map = mmap.mmap(self._file.fileno(), size)
        self._arrays: dict[str, Floats] = {}
        start = len(header)
        for spec in schema:
            self._arrays[spec.name] = np.frombuffer(self._map, np.float32, spec.count, start)
            start += spec.nbytes
        self._begin(old)

    def _begin(self, old: OldState) -> None:
        for name in self._optimizer.counters:
            self._arrays[f"count/{name}"][0] = old.counter(name) or 0.0
        for piece in self._layout.pieces:
            if piece.spec.role == "parameter":
                for slot, values in self.slots(piece).items():
                    before = old.piece(slot, piece)
                    if before is not None:
                        np.copyto(values, before)

    def slots(self, piece: TensorPiece) -> dict[str, Floats]:
        """Return the writable part of each slot for a piece, (N,)."""
        name, start = self._layout.place(piece)
        return {
            slot: self._arrays[f"{slot}/{name}"][start : start + piece.size]
            for slot in self._optimizer.slots
        }

    def close(self, terms: StepTerms) -> WrittenFile:
        """Write the counters, make the file durable and hash it."""
        for name, value in terms.counters.items():
            self._arrays[f"count/{name}"][0] = value
        self._arrays.clear()
        size = len(self._map)
        self._map.flush()
        self._map.close()
        os.fsync(self._file.fileno())
        self._file.seek(0)
        sha256 = hashlib.file_digest(self._file, "sha256").hexdigest()
        self._file.close()
        return WrittenFile(sha256=sha256, size=size)

    def _abort(self) -> None:
        """Delete the partial file; a no-op after `close`."""
        if not self._file.closed:
            self._file.close()
            delete_file(self._path, "scratch")
