"""Device loops, each made of its parts: claimer, downloads, part runner, encoder, news."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from shared.errors import VolunteerError
from shared.workloads.base import Workload
from shared.workloads.data.local_data import LocalData
from volunteer.account.join import enabled
from volunteer.account.record_check import RecordCheck
from volunteer.agent.base_versions import BaseVersion, BaseVersions
from volunteer.agent.claimer import Claimer
from volunteer.agent.device_loop import FAILURE_WAIT_S, FAILURE_WAIT_S_MAX, DeviceLoop
from volunteer.agent.downloads import Downloads
from volunteer.agent.lease_ends import LeaseEnds
from volunteer.agent.lease_parts import PartRunner
from volunteer.agent.model_steps import ModelSteps
from volunteer.agent.pause_board import PauseBoard
from volunteer.agent.pipeline import Pipeline
from volunteer.agent.run_choice import RunChoice
from volunteer.agent.verdict_news import Verdicts
from volunteer.agent.work_news import WorkNews
from volunteer.agent.workplace import LentDevice, Workplace
from volunteer.net.retry import Backoff
from volunteer.settings.settings import Settings
from volunteer.storage.leases import HeldLease
from volunteer.training.background_thread import BackgroundThread
from volunteer.training.local_task import TaskFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLoops:
    """Makes the loop of a lent device."""

    place: Workplace
    settings: Settings
    load: Callable[[str], Workload]
    snapshot_s: float
    record: Callable[[], RecordCheck]
    pauses: PauseBoard
    choice: RunChoice
    verdicts: Verdicts
    steps: ModelSteps
    loaded_workloads: dict[str, Workload] = field(default_factory=dict)

    def _workloads(self) -> Mapping[str, Workload]:
        """Return the enabled workloads that can be loaded here."""
        for name in enabled(self.settings):
            if name not in self.loaded_workloads:
                try:
                    self.loaded_workloads[name] = self.load(name)
                except (VolunteerError, ImportError):
                    continue  # each task of the workload would fail here
        return self.loaded_workloads

    def loop(self, device: LentDevice) -> DeviceLoop:
        place = self.place
        ends = LeaseEnds(place=place)
        return DeviceLoop(
            device=device,
            claimer=Claimer(device=device, place=place, ends=ends, workloads=self._workloads),
            pipeline=self._pipeline(device),
            pauses=self.pauses,
            life=place.life,
            choice=self.choice,
            news=WorkNews(device=device.id, place=place),
            failures=Backoff(place.timing.rng, FAILURE_WAIT_S, FAILURE_WAIT_S_MAX),
        )

    def _pipeline(self, device: LentDevice) -> Pipeline:
        place = self.place
        downloads = Downloads(place=place, record=self.record(), load=self.load)
        parts = PartRunner(
            device=device,
            downloads=downloads,
            place=place,
            snapshot_s=self.snapshot_s,
            steps=self.steps,
        )
        return Pipeline(
            downloads=downloads,
            bases=BaseVersions(place=place, downloads=downloads),
            parts=parts,
            encoder=BackgroundThread(f"encoder {device.id}", low_priority=True),
            outbox=place.store.outbox,
            verdicts=self.verdicts,
            life=place.life,
            files=partial(self._files, device),
        )

    def _files(
        self, device: LentDevice, stored_lease: HeldLease, base: BaseVersion, data: LocalData
    ) -> TaskFiles:
        lease, store = stored_lease.lease, self.place.store
        return TaskFiles(
            held=stored_lease,
            manifest=base.manifest,
            workload=lambda: self.load(lease.job.workload),
            weights=base.weights,
            data=data,
            snapshot=store.leases.snapshot(lease),
            outbox=store.outbox,
            memory_bytes=device.memory_bytes,
            host_bytes=device.host_bytes,
            ranks=device.trainer.ranks,
            now=self.place.timing.clock.now,
            own_data=store.own_data,
            away=device.trainer.away,
            step=self.steps.recent_step(lease.job, base.manifest.workload_version, device.id),
        )
