"""Pauses by device and reason (owner, coordinator, policy), applied to the trainers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from shared.sentences import Sentence
from volunteer.agent.lifecycle import Lifecycle
from volunteer.control import events
from volunteer.control.commands import NEXT_LOGIN
from volunteer.control.event_bus import EventBus
from volunteer.machine.policy import Rule
from volunteer.machine.presence import newest_login
from volunteer.training.trainer import Trainer

YOU = "you"
TIME_S = 5.0  # interval of clock checks


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseReason:
    """Reason why a device idles, and the event that ends it."""

    by: str
    message: str
    until: str = ""
    ends_at: float = 0.0  # local time, or NEXT_LOGIN; 0 = until it is resumed
    login: float = 0.0  # time of the newest login when a pause until the next login began


class PauseBoard:
    """Reasons for pauses by device. A trainer passed to `watch` is paused and resumed by them."""

    def __init__(
        self, life: Lifecycle, bus: EventBus, logins: Callable[[], float] = newest_login
    ) -> None:
        self._life = life
        self._bus = bus
        self._logins = logins
        self._reasons: dict[str, dict[str, PauseReason]] = {}  # device ("" = all) -> by -> reason
        self._trainers: dict[str, Trainer] = {}
        self._shares: dict[str, float] = {}  # device ("" = all not named) -> share of working time

    def watch(self, device: str, trainer: Trainer) -> None:
        """Apply pauses and share to this trainer from now on."""
        self._trainers[device] = trainer
        trainer.share = self.share(device)
        self._apply()

    def set_shares(self, shares: Mapping[str, float]) -> None:
        """Set each device's share of working time; "" stands for all devices that are not named."""
        self._shares = dict(shares)
        for device, trainer in self._trainers.items():
            trainer.share = self.share(device)

    def share(self, device: str) -> float:
        """Return a device's share of working time."""
        return self._shares.get(device, self._shares.get("", 1.0))

    def pause(
        self, device: str = "", *, by: str, message: str, until: str, ends_at: float = 0.0
    ) -> None:
        """Pause a device, or all devices if `device` is ""; their tasks stay."""
        self._reasons.setdefault(device, {})[by] = PauseReason(
            by=by,
            message=message,
            until=until,
            ends_at=ends_at,
            login=self._logins() if ends_at == NEXT_LOGIN else 0.0,
        )
        self._apply()
        self._bus.emit(events.Paused(device=device, by=by, message=message, until=until))

    def resume(self, device: str = "", *, by: str, finishing: bool = False) -> bool:
        """Remove a reason from a device, or from all devices if `device` is ""; work continues when
        no reason is left.

        Return False if the reason was not there. `finishing`: the same order also ended `finish`.
        """
        names = list(self._reasons) if not device else [device]
        removed = [self._reasons.get(name, {}).pop(by, None) for name in names]
        was_paused = any(removed)
        self._apply()
        remaining = self.paused(device)
        message = (
            _still_paused(remaining, by if was_paused or not finishing else "") if remaining else ""
        )
        if was_paused or finishing or remaining is None:
            self._bus.emit(events.Resumed(device=device, by=by, message=message))
        return was_paused

    async def keep_time(self) -> None:
        """End each pause at its time, even after the machine slept past it, or when a person logs
        in.
        """
        clock = self._life.clock
        while True:
            for device, by_reason in list(self._reasons.items()):
                for reason in list(by_reason.values()):
                    if self._is_over(reason, clock.now()):
                        del by_reason[reason.by]
                        self._apply()
                        self._bus.emit(events.Resumed(device=device, by=reason.by, by_time=True))
            await clock.sleep(TIME_S)

    def _is_over(self, reason: PauseReason, now: float) -> bool:
        if reason.ends_at == NEXT_LOGIN:
            return self._logins() > reason.login
        return 0.0 < reason.ends_at <= now

    def paused(self, device: str) -> PauseReason | None:
        """Return a reason why a device is paused, None if it is not; for "" a reason that pauses
        all devices.
        """
        for name in ("", device):
            for reason in self._reasons.get(name, {}).values():
                return reason
        return None

    def paused_by(self, device: str, by: str) -> bool:
        """Return True if this is one of the reasons why a device is paused."""
        return any(by in self._reasons.get(name, {}) for name in ("", device))

    def reasons(self) -> frozenset[tuple[str, str]]:
        """Return each reason with its device."""
        return frozenset(
            (name, by) for name, by_reason in self._reasons.items() for by in by_reason
        )

    def _apply(self) -> None:
        for device, trainer in self._trainers.items():
            if self.paused(device):
                trainer.pause()
            else:
                trainer.resume()
        self._life.metered = self.paused_by("", Rule.METERED)
        self._life.notify()


def _still_paused(remaining: PauseReason, by: str) -> Sentence:
    """Return the sentence for a device that stays paused although one pause (or `finish`) ended."""
    pauser, why = Sentence(remaining.by), remaining.message
    if not by:
        return Sentence("no longer finishing, but paused by {still}: {why}", still=pauser, why=why)
    return Sentence(
        "no longer paused by {by}, still by {still}: {why}",
        by=Sentence(by),
        still=pauser,
        why=why,
    )
