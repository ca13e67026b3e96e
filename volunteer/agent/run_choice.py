"""Runs and kinds of tasks that the owner chose, with consent to the runs' licences."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from shared.errors import BadRequest
from shared.nearest_name import nearest
from shared.protocol import endpoints
from shared.protocol.accounts import RunInfo
from shared.protocol.leases import Lease
from shared.sentences import Sentence, plural
from shared.text import printable
from volunteer.agent.workplace import Workplace
from volunteer.control import events
from volunteer.control.shortage import Shortage, memory_properties, shortage_words, with_shortage
from volunteer.machine.devices import hardware
from volunteer.settings.settings import Settings
from volunteer.settings.work_rules import WorkRules
from volunteer.text import origin_of

ENDED = ("completed", "failed")
LISTED_MAX = 20


class WantedWork(msgspec.Struct, frozen=True):
    """Work that a device may claim."""

    runs: tuple[str, ...]  # () is any run
    kinds: tuple[str, ...]  # kinds of tasks
    short: str = ""  # reason why no run is possible: no run fits the device's memory

    def takes(self, lease: Lease) -> bool:
        """Return True if a lease is of this work; another run has perhaps no consent."""
        return (not self.runs or lease.run in self.runs) and lease.job.kind in self.kinds


class RunChoice:
    """Keeps the choice of runs, and records consent to their licences."""

    def __init__(self, settings: Settings, place: Workplace) -> None:
        self._chosen = settings.runs  # () = any run
        self._rules = settings.rules
        self._any_licence = settings.consent == "all"
        self._place = place

    def choose(self, runs: tuple[str, ...]) -> None:
        """Work only for these runs from the next task on; () = any run."""
        self._chosen = runs
        self._place.life.notify()

    def change_rules(self, rules: WorkRules) -> None:
        """Claim the kinds of tasks that these rules name, from the next task on."""
        self._rules = rules
        self._place.life.notify()

    def runs(self) -> tuple[str, ...] | None:
        """Return the runs that may be claimed: () means any run, None means no run."""
        if self._any_licence:
            return self._chosen
        agreed = self._place.store.home.memory.consents
        runs = tuple(run for run in agreed if not self._chosen or run in self._chosen)
        return runs or None

    def wanted_work(self, device: str) -> WantedWork | None:
        """Return the work that a device may claim; None while the owner agreed to no run."""
        runs, kinds = self.runs(), self._rules.kinds(device)
        if runs is None:
            return None
        short = {shortage.run: shortage for shortage in self._shortages_of(device)}
        if not short:
            return WantedWork(runs, kinds)
        listed = self._place.bus.status.runs
        open_ = tuple(info.name for info in listed if info.state not in ENDED)
        candidates = runs or (open_ if listed else tuple(short))
        candidates_left = tuple(run for run in candidates if run not in short)
        shortage_met = next(
            (shortage for run, shortage in short.items() if run in candidates), None
        )
        return WantedWork(
            candidates_left,
            kinds,
            "" if candidates_left or shortage_met is None else shortage_words(shortage_met),
        )

    def _shortages_of(self, device: str) -> list[Shortage]:
        """Return the known shortages of a device that still hold."""
        status, now = self._place.bus.status, self._place.life.clock.now()
        return [
            shortage
            for shortage in status.shortages
            if shortage.device == device and shortage.stands(status.runs, status.lent_bytes, now)
        ]

    def announce(self) -> None:
        """Announce the models that did not fit a device in earlier starts and probably still do
        not.
        """
        torch = hardware().torch
        for shortage in self._place.store.home.memory.shortages:
            if shortage.torch == torch:
                self._place.bus.emit(events.ShortOfMemory(shortage=shortage, known=True))

    def does_not_fit(self, run: str, device: str, needed_bytes: int) -> None:
        """Store that a run's task ran out of memory on a device: no more tasks of the run are
        claimed for the device until the model, the memory or torch changes.
        """
        status = self._place.bus.status
        shortage = Shortage(
            run=run,
            device=device,
            model=memory_properties(next((info for info in status.runs if info.name == run), None)),
            torch=hardware().torch,
            needed_bytes=needed_bytes,
            had_bytes=status.lent_bytes.get(device, 0),
            fitted=any((step.run, step.device) == (run, device) for step in status.steps),
            at=self._place.life.clock.now(),
        )
        self._place.store.home.remember(
            shortages=with_shortage(self._place.store.home.memory.shortages, shortage)
        )
        self._place.bus.emit(events.ShortOfMemory(shortage=shortage))

    async def consent(self, run: str) -> None:
        """Consent to a run's licence. Raises NotFound, Unreachable."""
        await self._place.remote.api.call(endpoints.CONSENT, {"run": run})
        memory = self._place.store.home.memory
        if run not in memory.consents:
            self._place.store.home.remember(consents=(*memory.consents, run))
        self._place.life.notify()

    async def consent_by_joining(self, run: str) -> None:
        """Send and store the consent to a run, which joining the coordinator implies; announce the
        run's terms. Nothing happens if the consent is stored already.
        """
        if run in self._place.store.home.memory.consents:
            return
        info = next((r for r in self._place.bus.status.runs if r.name == run), None)
        if info is None:
            info = await self._place.remote.api.query(endpoints.RUN, run=run)
        await self._place.remote.api.call(endpoints.CONSENT, {"run": run})
        self._place.store.home.remember(consents=(*self._place.store.home.memory.consents, run))
        samples = self._place.bus.status.own_samples.get(run, 0)
        self._place.bus.notice(_terms(run, info, samples))


def check_run_names(names: Sequence[str], runs: Sequence[RunInfo]) -> None:
    """Check chosen runs. Raises BadRequest, with a list of the runs, if a name is unknown or all
    named runs have ended.
    """
    if not names:
        return
    by_name = {run.name: run for run in runs}
    for name in names:
        if name not in by_name:
            near = nearest(name, by_name)
            listed = _run_list(runs)
            if near:
                raise BadRequest(
                    Sentence(
                        'there is no run "{name}" here (did you mean "{near}"?); {listed}',
                        name=name,
                        near=near,
                        listed=listed,
                    )
                )
            raise BadRequest(
                Sentence('there is no run "{name}" here; {listed}', name=name, listed=listed)
            )
    if all(by_name[name].state in ENDED for name in names):
        quoted_names = " and ".join(f'"{name}"' for name in names)
        raise BadRequest(
            plural(
                "{names} has ended: nothing is left to do; {listed}",
                "{names} have ended: nothing is left to do; {listed}",
                len(names),
                names=quoted_names,
                listed=_run_list(runs),
            )
        )


def _run_list(runs: Sequence[RunInfo]) -> str:
    if not runs:
        return Sentence("the coordinator has no run yet")
    listed_runs = [
        f"{printable(run.name)} ({printable(run.workload)}, {run.state})" for run in runs
    ]
    names, more = ", ".join(listed_runs[-LISTED_MAX:]), len(listed_runs) - LISTED_MAX
    if more > 0:
        return Sentence("the runs are: {names} and {n} more", names=names, n=more)
    return Sentence("the runs are: {names}", names=names)


def _terms(run: str, info: RunInfo, samples: int) -> Sentence:
    """Return the sentence about a run's licences, the samples of own data and its contact."""
    sentence = Sentence(
        'helping "{run}": the model will be published under {licence}',
        run=run,
        licence=info.licence,
    )
    if info.members is not None and samples:
        sentence = plural(
            "{said}, it learns from your own files: {n} piece is prepared",
            "{said}, it learns from your own files: {n} pieces are prepared",
            samples,
            said=sentence,
        )
    elif info.members is not None:
        sentence = Sentence(
            "{said}, it learns from your own files: `volunteer data add {run} PATH`",
            said=sentence,
            run=run,
        )
    elif info.dataset_licence:
        sentence = Sentence(
            "{said}, the data is under {data}", said=sentence, data=info.dataset_licence
        )
    elif info.dataset:
        sentence = Sentence("{said}, no licence of the data is stated", said=sentence)
    if info.origin:
        sentence = Sentence(
            "{said}, it begins from {origin}", said=sentence, origin=origin_of(info)
        )
    if info.contact:
        sentence = Sentence("{said}, questions to {contact}", said=sentence, contact=info.contact)
    return sentence
