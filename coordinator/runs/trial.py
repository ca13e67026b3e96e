"""Trial of a run on this machine: two steps and one update, in a process of their own."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import msgspec

from coordinator.compute import Compute, Stop
from coordinator.database.runs import RunRow
from coordinator.runs.datasets import heldout
from coordinator.runs.definition import definition
from coordinator.storage.blobs import BlobStore
from shared.errors import VolunteerError
from shared.local_data import LocalData
from shared.tensors.quantize import codec
from shared.tensors.update import delta
from shared.workloads.base import DatasetManifest, Job, load

STEPS = 2  # the first is slower: it allocates
SAMPLES = 4  # of a step, which tells the time of a larger one
BYTES_A_COUNT = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """Cost of a run's work on this machine."""

    memory_bytes: int  # the most that the process held, PyTorch included
    update_bytes: int
    step_s: float


def attempt(stop: Stop, job: Job, data: LocalData, codec_name: str) -> Trial:
    """Train the steps of a job from fresh weights and encode the update; runs in a process of its
    own, whose memory is measured.
    """
    import resource

    workload = load(job.workload)
    base = workload.init(job.config, job.seed)
    work = workload.begin(job, base, data, "cpu", None)
    began, done = time.monotonic(), 0
    while not (work.done or stop()):
        step = work.advance().step
        if done < step < job.steps:
            began, done = time.monotonic(), step
    step_s = time.monotonic() - began
    schema = workload.schema(job.config)
    with tempfile.TemporaryDirectory(prefix="trial-") as folder:
        file = Path(folder) / "update"
        change = delta(base, work.result()[1], schema) if job.update == "delta" else base
        codec(codec_name).encode(change, schema, file)
        update_bytes = file.stat().st_size
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * BYTES_A_COUNT
    return Trial(memory_bytes=peak, update_bytes=update_bytes, step_s=step_s)


async def trial(
    run: RunRow, manifest: DatasetManifest | None, blobs: BlobStore, threads: int
) -> Trial | None:
    """Return the cost of a run's work here; None for a run that begins with weights of others
    or with games, or that does not fit this machine.
    """
    about = definition(run)
    file, model = about.file, about.file.model
    if manifest is None or about.play or file.train.init_from or about.workload.files(model):
        return None
    few = msgspec.structs.replace(manifest, chunks=manifest.chunks[:1], heldout=())
    batch = min(SAMPLES, file.task.batch_size)
    stop = min(STEPS * batch, about.workload.samples(model, few)[0])
    job = Job(
        run=run.name,
        workload=run.workload,
        kind="train",
        update=about.plan.update,
        config=model,
        train=file.train,
        order_seed=run.seed,
        start=0,
        stop=stop,
        seed=run.seed,
        steps=-(-stop // batch),
        batch_size=batch,
        global_step=0,
        total_steps=0,
        reset_inner=True,
        options=file.task.options,
    )
    compute = Compute("trial", torch_threads=threads, separate=True)
    try:
        data = await heldout(few, blobs, {})
        found = await compute.run(attempt, job, data, about.plan.codec)
        whole = found.step_s * file.task.batch_size / batch
        return msgspec.structs.replace(found, step_s=whole)
    except VolunteerError:  # too large for this machine, for example
        return None
    finally:
        compute.close()
