"""Trial of an author's model on this machine: dataset, training and evaluation, as in a run."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec

from shared.errors import InvalidRunFile
from shared.programs.machine_limits import threads
from shared.workloads.base import DatasetManifest, DatasetWanted, Job, TrainSettings, Workload
from shared.workloads.data.image_dataset import build_images
from shared.workloads.data.local_data import LocalData
from shared.workloads.data.text_dataset import build_text

_BATCH = 16


class Trial(NamedTuple):
    """Losses on held-out samples, before and after some steps."""

    before: float
    after: float
    skipped: tuple[str, ...]  # sentences about the files that were not read


def trial(
    workload: Workload,
    paths: Iterable[Path],
    *,
    steps: int = 100,
    lr: float = 1e-2,
    **model: object,
) -> Trial:
    """Build a dataset of files, train for some steps, and measure. `model` are keys of `[model]`.
    Raises InvalidRunFile.
    """
    import torch

    torch.set_num_threads(max(1, threads() - 1))
    skipped: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        manifest = _dataset(workload, list(paths), Path(folder), skipped)
        data = _local(manifest, Path(folder))
        heldout = _local(
            msgspec.structs.replace(manifest, chunks=manifest.heldout, heldout=()), Path(folder)
        )
        config = workload.config(model, manifest)
        samples = sum(workload.samples(config, manifest))
        if samples < _BATCH:
            raise InvalidRunFile(f"{samples} samples are too few for a batch of {_BATCH}")
        weights = workload.init(config, 1)
        before = workload.evaluate(config, weights, heldout, 60, lambda: False)["loss"]
        done, task = 0, 0
        while done < steps:
            count = min(steps - done, samples // _BATCH)
            job = Job(
                run="trial",
                workload=workload.name,
                kind="train",
                update="delta",
                config=config,
                train=TrainSettings(lr=lr, warmup_steps=0),
                order_seed=task,
                start=0,
                stop=count * _BATCH,
                seed=task,
                steps=count,
                batch_size=_BATCH,
                global_step=done,
                total_steps=steps,
            )
            work = workload.begin(job, weights, data, "cpu")
            while not work.done:
                work.advance()
            weights, done, task = work.result()[1], done + count, task + 1
        after = workload.evaluate(config, weights, heldout, 60, lambda: False)["loss"]
    return Trial(before, after, tuple(skipped))


def _local(manifest: DatasetManifest, folder: Path) -> LocalData:
    return LocalData(manifest, {path.name: path for path in folder.iterdir()})


def _dataset(
    workload: Workload, paths: list[Path], folder: Path, skipped: list[str]
) -> DatasetManifest:
    def put(blob: bytes) -> str:
        name = hashlib.sha256(blob).hexdigest()
        (folder / name).write_bytes(blob)
        return name

    if workload.dataset_kinds == ("images",):
        return build_images("trial", paths, put)
    if workload.dataset_kinds == ("tokens",):
        return build_text("trial", paths, put)
    request = DatasetWanted(name="trial", sources=tuple(paths))
    return workload.dataset(request, put, skipped.append)
