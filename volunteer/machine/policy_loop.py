"""Loop that applies the rules of `policy.py` every few seconds and pauses or resumes the agent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol, TypeAlias

import msgspec

from shared.clock import Clock
from shared.sentences import Sentence
from volunteer.machine.policy import Decision, Hold, MachineFacts, decide, lift
from volunteer.settings.work_rules import WorkRules

LOOK_S = 5.0

Read: TypeAlias = Callable[[WorkRules, Sequence[str]], MachineFacts]


class Pausing(Protocol):
    """Interface through which the policy pauses work: `PauseBoard` in the program."""

    def pause(self, device: str = "", *, by: str, message: str, until: str) -> None: ...

    def resume(self, device: str = "", *, by: str) -> object: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyInputs:
    """Inputs of the policy loop, read again each time."""

    read: Read  # runs in a thread
    devices: Callable[[], tuple[str, ...]]
    # Receives the share of working time by device; "" stands for all other devices.
    share: Callable[[Mapping[str, float]], None]
    say: Callable[[str], None]  # sends the owner a sentence
    clock: Clock


class PolicyGuard:
    """Applies the policy in a loop: reads facts, decides, pauses or resumes."""

    def __init__(self, rules: WorkRules, inputs: PolicyInputs, pausing: Pausing) -> None:
        self.rules = rules
        self.decision = Decision()
        self._inputs = inputs
        self._pausing = pausing
        self._facts = MachineFacts()
        self._announced: set[str] = set()

    async def run(self) -> None:
        """Apply the policy until cancelled."""
        while True:
            await self._inputs.clock.sleep(LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Read the facts and act on them."""
        devices = self._inputs.devices()
        self._facts = await asyncio.to_thread(self._inputs.read, self.rules, devices)
        self._decide()

    def change(self, rules: WorkRules) -> None:
        """Replace the rules."""
        self.rules = rules
        self._decide()

    def lift_holds(self) -> None:
        """Lift the holds that a person may lift, each until its condition has ended once."""
        before = self.decision
        state, remaining = lift(before)
        self.decision = msgspec.structs.replace(before, state=state)
        for hold in before.holds:
            if hold not in remaining:
                self._inputs.say(
                    Sentence(
                        "working although {message}, until {until}",
                        message=hold.message,
                        until=hold.until,
                    )
                )
        for hold in remaining:
            self._inputs.say(
                Sentence(
                    "still paused: {message}, until {until}", message=hold.message, until=hold.until
                )
            )
        self._decide()

    def _decide(self) -> None:
        before = self.decision
        now = datetime.fromtimestamp(self._inputs.clock.now(), tz=UTC).astimezone()
        self.decision = decide(
            self.rules,
            self._facts,
            now.replace(tzinfo=None),  # the local wall clock
            self._inputs.devices(),
            before.state,
        )
        self._act(before)

    def _act(self, before: Decision) -> None:
        old = {_key(hold): hold for hold in before.holds}
        new = {_key(hold): hold for hold in self.decision.holds}
        for key, hold in old.items():
            if key not in new:
                self._pausing.resume(hold.device, by=hold.rule.value)
        for key, hold in new.items():
            # A hold is sent again if its end changes, not for new numbers in its message.
            if key not in old or old[key].until != hold.until:
                self._pausing.pause(
                    hold.device, by=hold.rule.value, message=hold.message, until=hold.until
                )
        self._inputs.share(self.decision.shares)
        for sentence in self.decision.unknown:
            if sentence not in self._announced:
                self._announced.add(sentence)
                self._inputs.say(sentence)


def _key(hold: Hold) -> tuple[str, str]:
    return hold.rule.value, hold.device
