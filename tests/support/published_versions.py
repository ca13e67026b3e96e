"""Versions as a coordinator publishes them, without it: small weights, files, manifests."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from coordinator.plan.plan import plan
from coordinator.runs import publishing
from coordinator.runs.publishing import Publication, PublishedBase
from coordinator.runs.version_files import Content
from shared.proofs.signing import canonical, digest
from shared.protocol.versions import BlobRef, VersionManifest
from shared.tensors.frame import FrameWriter, WrittenFile
from shared.tensors.slices import Array
from shared.tensors.spec import Schema, TensorSpec

SCHEMA: Schema = (
    TensorSpec("w", (200, 50)),
    TensorSpec("mean", (6,), "F32", "buffer"),
    TensorSpec("steps", (), "I64", "counter"),
    TensorSpec("bias", (90,)),
)


class Versions:
    """Every version so far. Blobs lie in a dict and can be damaged or taken away."""

    def __init__(
        self,
        path: Path,
        *,
        downlink: str = "chain",
        snapshot_every: int = 1000,
        schema: Schema = SCHEMA,
    ) -> None:
        path.mkdir()
        self._path = path
        self.schema = schema
        self._rng = np.random.default_rng(5)
        self._plan = plan({"downlink": downlink, "snapshot_every": snapshot_every})
        self.weights: dict[str, Array] = {
            spec.name: np.zeros(spec.shape, np.int64)
            if spec.role == "counter"
            else self._rng.standard_normal(spec.shape).astype("f4")
            for spec in schema
        }
        self.blobs: dict[str, bytes] = {}
        self.contents: list[Content] = []
        if schema is SCHEMA:
            self.publish(scale=0.0)

    def publish(self, scale: float = 1e-3) -> Content:
        """The next version; the weights have moved by so much."""
        for name, array in self.weights.items():
            move = self._rng.standard_normal(array.shape) * scale
            self.weights[name] = array + 1 if name == "steps" else (array - move).astype("f4")
        return self.commit()

    def commit(self) -> Content:
        """The next version, with the weights as they are now."""
        number = len(self.contents)
        master = self._path / f"master-{number}"
        order = Publication(
            plan=self._plan,
            schema=self.schema,
            version=number,
            master=master,
            written=self._write(master, number),
            base=self._base() if number else None,
        )
        prepared = publishing.prepare(order)
        for sha256, path in prepared.files.items():
            self.blobs[sha256] = path.read_bytes()
        publishing.discard(master)
        self.contents.append(prepared.content)
        return prepared.content

    def _write(self, path: Path, number: int) -> WrittenFile:
        with FrameWriter(path, self.schema, {"version": str(number)}) as writer:
            for spec in self.schema:
                writer.write(spec.name, self.weights[spec.name])
            return writer.close()

    def _base(self) -> PublishedBase:
        last = self.contents[-1]
        path = self._path / "base"
        path.write_bytes(self.blobs[last.published_sha256])
        weights = BlobRef(sha256=last.published_sha256, size=last.size)
        return PublishedBase(weights=weights, downlink=last.downlink, path=path)

    def manifest(self, number: int = -1) -> VersionManifest:
        content = self.contents[number]
        return VersionManifest(
            run="r",
            version=self.contents.index(content),
            workload="w",
            workload_version=1,
            config={},
            weights=BlobRef(sha256=content.published_sha256, size=content.size),
            master_sha256=content.master_sha256,
            schema_sha256=digest(canonical(self.schema)),
            dataset="",
            tokenizer_sha256="",
            global_step=0,
            tokens=0,
            created_at=0.0,
            expires_at=0.0,
            downlink=content.downlink,
        )
