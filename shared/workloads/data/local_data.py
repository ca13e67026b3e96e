"""Local part of a dataset: chunks and assets as files, found by hash."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from shared.errors import NotFound
from shared.workloads.base import ChunkRef, DatasetManifest


class LocalData:
    """Implementation of `Data`: `files` maps the SHA-256 of a blob to its file. Some files of the
    manifest may be missing, since a worker fetches only its task's chunks. `more` refers to
    further files of the run by asset name.
    """

    def __init__(
        self,
        manifest: DatasetManifest,
        files: Mapping[str, Path],
        more: Mapping[str, ChunkRef] | None = None,
    ) -> None:
        self.manifest = manifest
        self._assets = {**manifest.assets, **(more or {})}
        self._files = files

    def chunk(self, index: int) -> Path:
        try:
            if index < 0:
                raise IndexError(index)
            return self._files[self.manifest.chunks[index].sha256]
        except (IndexError, KeyError):
            raise NotFound(f"chunk {index} of {self.manifest.name} is not here") from None

    def heldout(self) -> LocalData:
        """Return the held-out part as a dataset."""
        split = msgspec.structs.replace(self.manifest, chunks=self.manifest.heldout, heldout=())
        return LocalData(split, self._files, self._assets)

    def asset(self, name: str) -> Path:
        try:
            return self._files[self._assets[name].sha256]
        except KeyError:
            raise NotFound(f'the dataset {self.manifest.name} has no asset "{name}"') from None
