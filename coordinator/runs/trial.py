"""Trial of a run on this machine: a few steps or games, in a process of its own."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import msgspec

from coordinator.compute import Compute, Stop
from coordinator.database.runs import RunRow
from coordinator.rules.sizing import memory_bytes
from coordinator.runs.datasets import heldout
from coordinator.runs.definition import definition
from coordinator.storage.blobs import BlobStore
from shared.errors import VolunteerError
from shared.local_data import LocalData
from shared.machine_limits import free_memory_bytes
from shared.tensors.quantize import codec
from shared.tensors.update import delta
from shared.workloads.base import DatasetManifest, Job, Weights, Work, load

STEPS = 2  # two, since the first is slower: it allocates memory
SAMPLES = 4  # most samples of a step (the time of a full batch follows from it), or games
MOST_S = 60.0  # the work ends after this time
NO_DATA = DatasetManifest(name="none", kind="none", licence="", source="", chunks=())
BYTES_A_COUNT = 1 if sys.platform == "darwin" else 1024  # unit of ru_maxrss


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """Cost of a run's work on this machine; size and time are 0 if the work took too long."""

    memory_bytes: int  # most memory of the process, PyTorch included
    update_bytes: int
    step_s: float
    counted: str = ""  # unit of the work if it makes no steps, such as "games"


def attempt(stop: Stop, job: Job, data: LocalData, codec_name: str) -> Trial:
    """Do the steps of a job from new weights and encode the result; runs in a process of its own,
    whose memory is measured.
    """
    import resource

    workload = load(job.workload)
    base = workload.init(job.config, job.seed)
    work = workload.begin(job, base, data, "cpu", None)
    begun = began = time.monotonic()
    done, counted = 0, ""
    while not (work.done or stop() or time.monotonic() - begun > MOST_S):
        now = work.advance()
        counted = now.counted
        if done < now.step < job.steps and job.kind == "train":  # games are played side by side
            began, done = time.monotonic(), now.step
    step_s = (time.monotonic() - began) / (job.steps - done) if work.done else 0.0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * BYTES_A_COUNT
    return Trial(
        memory_bytes=peak,
        update_bytes=_encoded(work, job, base, codec_name) if work.done else 0,
        step_s=step_s,
        counted=counted,
    )


def _encoded(work: Work, job: Job, base: Weights, codec_name: str) -> int:
    """Return the size of the result that a worker would submit, in bytes."""
    result, tensors = work.result()
    if job.update == "experience":
        return len(result.experience)
    schema = load(job.workload).schema(job.config)
    with tempfile.TemporaryDirectory(prefix="trial-") as folder:
        file = Path(folder) / "update"
        change = delta(base, tensors, schema) if job.update == "delta" else base
        codec(codec_name).encode(change, schema, file)
        return file.stat().st_size


async def trial(
    run: RunRow, manifest: DatasetManifest | None, blobs: BlobStore, threads: int
) -> Trial | None:
    """Return the cost of a run's work on this machine; None if the run does not fit. The work
    begins with new weights, which cost as much as trained ones.
    """
    about = definition(run)
    file, model = about.file, about.file.model
    needed = memory_bytes(run.parameters, about.workload.fixed_bytes(model))
    if needed > free_memory_bytes():
        return None
    compute = Compute("trial", torch_threads=threads, separate=True)
    try:
        few = msgspec.structs.replace(manifest or NO_DATA, heldout=())
        few = msgspec.structs.replace(few, chunks=few.chunks[:1])
        data = await heldout(few, blobs, about.workload.files(model))
        batch = 1 if about.play else min(SAMPLES, file.task.batch_size)
        most = about.play.episodes if about.play else about.workload.samples(model, few)[0]
        stop = min(SAMPLES if about.play else STEPS * batch, most)
        job = Job(
            run=run.name,
            workload=run.workload,
            kind="selfplay" if about.play else "train",
            update="experience" if about.play else about.plan.update,
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
        found = await compute.run(attempt, job, data, about.plan.codec)
        whole = 1.0 if about.play else file.task.batch_size / batch
        return msgspec.structs.replace(found, step_s=found.step_s * whole)
    except VolunteerError:  # the run may be too large for this machine
        return None
    finally:
        compute.close()
