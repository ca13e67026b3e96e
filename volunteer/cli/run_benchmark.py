"""`volunteer benchmark --run`: some real steps of a run's own model on this machine, before any
task: its weights, its data, its batch. The result is not submitted.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from shared.clock import SystemClock
from shared.errors import Configuration, TooLarge
from shared.protocol.accounts import Device
from shared.sentences import Sentence, figure
from shared.text import printable
from shared.units import GIB
from shared.workloads.base import load
from volunteer.account.join import connector
from volunteer.account.profile import Home, Identity, Profile
from volunteer.account.record_check import RecordCheck
from volunteer.agent.collaborators import RemoteCoordinator, ServerClock, usable_bytes
from volunteer.agent.downloads import Downloads
from volunteer.agent.held_leases import LeaseInWork
from volunteer.agent.model_steps import machine_of, step_of
from volunteer.agent.run_choice import check_chosen
from volunteer.cli.exit_codes import remark
from volunteer.cli.json_output import print_json
from volunteer.cli.start import NOT_JOINED
from volunteer.cli.text_table import table
from volunteer.control.event_bus import EventBus
from volunteer.control.model_step import ModelStep, key_of, newest
from volunteer.control.status import Status
from volunteer.i18n.catalogue import _, shown
from volunteer.i18n.formats import duration_words, size
from volunteer.machine.devices import choose, default_threads, detect, hardware
from volunteer.net.api import Api
from volunteer.net.transfers import Transfers, hub_address
from volunteer.net.weights import Weights
from volunteer.settings import settings as config
from volunteer.settings.settings import Directories, Settings
from volunteer.storage.blob_cache import Cache
from volunteer.storage.carried import Residuals
from volunteer.storage.evidence import EvidenceFiles
from volunteer.storage.leases import HeldLease
from volunteer.storage.outbox import Outbox
from volunteer.storage.receipts import ReceiptBook
from volunteer.training.gradient_sum import Summed
from volunteer.training.job import TrainingJob, TrainingReport
from volunteer.training.local_task import LocalTask, Place, TaskFiles
from volunteer.training.step_meter import StepFigures, StepMeter
from volunteer.training.trainer import Trainer

LIMIT_S = 300.0  # for the steps of one device


def measure_run(directories: Directories, run: str, device: str, *, json: bool) -> int:
    """Measure, print, remember. Returns the exit code.

    Raises Configuration where nothing was joined, a volunteer is at work or the licence was not
    agreed to, BadRequest for a run that is not there, Conflict for one without steps.
    """
    settings = config.load(path=directories.config / "config.toml").settings
    profile = Profile(directories.profile)
    identity = profile.current()
    if identity is None or not identity.registered:
        raise Configuration(NOT_JOINED)
    with profile.lock(), tempfile.TemporaryDirectory() as scratch:
        trial = _Trial(directories, settings, identity, profile.home(identity), Path(scratch))
        steps = asyncio.run(trial.measured(run, device))
    if json:
        print_json(steps)
    else:
        print("\n".join(_lines(steps)))
    return 0


def _lines(steps: list[ModelStep]) -> list[str]:
    rows = [(_("device"), _("a step"), _("memory"), _("pieces"), _("run"))]
    for step in steps:
        memory = size(step.peak_bytes) if step.peak_bytes else _("not known")
        piece = min(step.micro_batch, step.batch_size)
        pieces = _("{done} of {all}", done=piece, all=step.batch_size) if piece else "-"
        took = duration_words(step.step_s)
        rows.append((step.device, took, memory, pieces, printable(step.run, 64)))
    return table(rows)


@dataclass(eq=False)
class _Trial:
    """Trial leases of one account on this machine."""

    directories: Directories
    settings: Settings
    identity: Identity
    home: Home
    scratch: Path

    async def measured(self, run: str, device: str) -> list[ModelStep]:
        """Return a measured step for each chosen device, and remember them."""
        clock = SystemClock()
        api = Api(connector(clock)(self.identity.address, self.identity.token))
        trainer = Trainer("trial", threads=self.settings.threads or default_threads(), clock=clock)
        trainer.start()
        try:
            check_chosen((run,), await api.runs())
            if self.settings.consent != "all" and run not in self.home.memory.consents:
                raise Configuration(
                    Sentence(
                        '"{run}" was not agreed to yet: its licence and data are shown by '
                        "`volunteer` on the page of runs, and `volunteer --no-ui --run {run}` "
                        "agrees to them",
                        run=run,
                    )
                )
            devices = await asyncio.wrap_future(trainer.call(detect))
            downloads = self._downloads(api, clock)
            found = [
                await self._one(run, chosen, trainer, downloads)
                for chosen in choose(device, devices)
            ]
        finally:
            trainer.close()
            await api.client.close()
        kept = (*self.home.memory.steps, *found)
        self.home.remember(steps=newest(kept, clock.now()))
        return found

    def _downloads(self, api: Api, clock: SystemClock) -> Downloads:
        cache = Cache(self.directories.cache, int(self.settings.cache_gb * GIB))
        transfers = Transfers(api, cache, hub_address if self.settings.hub else None)

        book = ReceiptBook(self.home.receipts)
        who = self.identity

        def say(message: str, level: str = "") -> None:
            remark(shown(printable(message)))

        return Downloads(
            remote=RemoteCoordinator(
                identity=self.identity,
                api=api,
                transfers=transfers,
                weights=Weights(transfers, cache, say),
            ),
            cache=cache,
            hub=EventBus(clock, Status()),
            server_clock=ServerClock(clock),
            receipts=book,
            record=RecordCheck(api, book, who.public_key, who.volunteer_id),
            monotonic=clock.monotonic,
            load=lambda name: load(name, self.settings.workloads),
        )

    async def _one(
        self, run: str, device: Device, trainer: Trainer, downloads: Downloads
    ) -> ModelStep:
        lease = await downloads.remote.api.trial(run)
        downloads.server_clock.learn(lease.now)
        held = LeaseInWork(HeldLease(lease=lease, device=device.id, claim_id=""))
        with ExitStack() as stack:
            data = await downloads.data(held, stack)
            manifest, _ = await downloads.newest(lease)
            downloads.check_data(manifest, lease, data.manifest)
            weights = await downloads.held_weights(held, manifest, stack)
            outbox = Outbox(self.scratch / "outbox", print)
            files = TaskFiles(
                held=held.stored,
                manifest=manifest,
                workload=lambda: downloads.load(lease.job.workload),
                weights=weights,
                data=data,
                carried=Residuals(self.scratch / "inner").of(run, device.id),
                evidence=EvidenceFiles(self.scratch / "evidence", outbox.__contains__),
                snapshot=self.scratch / "snapshot",
                outbox=outbox,
                memory_bytes=usable_bytes(device, self.settings.memory_gb),
                now=downloads.server_clock.now,
            )
            measured = await _steps(trainer, device.id, LocalTask(files, Place(), Summed()))
        machine = machine_of(device.id, self.settings, hardware().torch)
        key = key_of(lease.job, manifest.workload_version, machine)
        return step_of(measured, lease.job, device.id, key, SystemClock().now())


async def _steps(trainer: Trainer, device: str, task: LocalTask) -> StepFigures:
    """Train the steps of a trial on the training thread. Raises TooLarge where they take too long,
    and the errors of training.
    """
    found: list[StepFigures] = []
    tty, job = sys.stderr.isatty(), task.files.held.lease.job

    def report(told: TrainingReport) -> None:
        if tty:
            step = _("step {step} of {steps}", step=told.step, steps=told.steps)
            print(f"\r{device}: {step}", end="", file=sys.stderr, flush=True)

    handle = trainer.submit(
        TrainingJob(
            begin=task.begin,
            finish=lambda work, spent: None,
            samples=job.stop - job.start,
            report=report,
            halved=lambda micro: None,
            meter=StepMeter(device, found.append),
        )
    )
    future = asyncio.wrap_future(handle.future)
    try:
        await asyncio.wait({future}, timeout=LIMIT_S)
        handle.stop("the trial is over")
        await future
    finally:
        handle.stop("the trial is over")
        if tty:
            print("\r" + " " * 40 + "\r", end="", file=sys.stderr, flush=True)
    if not found:
        raise TooLarge(
            Sentence(
                "a step of {run} takes longer than {time} on {device}: it is too large for it",
                run=job.run,
                time=figure(duration_words(LIMIT_S)),
                device=device,
            )
        )
    return found[0]
