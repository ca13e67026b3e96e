"""Policy: decides from rules and facts when and how hard this machine works.

Pure: time and facts are arguments. Every pause names its rule, its reason and its end. A fact that
cannot be measured never pauses work; a rule about use, programs or temperature that has no effect
for this reason is reported, so that nobody relies on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from enum import StrEnum

import msgspec

from shared.sentences import Sentence, figure
from shared.units import GIB
from volunteer.i18n.catalogue import N_
from volunteer.settings.schedule import parse_schedule, weekday_words
from volunteer.settings.work_rules import WorkRules

# A hot device resumes this many °C below its ceiling, to avoid frequent switching.
COOL_BY = 5.0
GENTLE = 0.5  # share of working time with `in_use = "gentle"`
WAIT_S_MAX = 2.0  # longest rest between two micro-batches


class Rule(StrEnum):
    """Rule that may pause work; shown after "paused by" on screen, in log and status."""

    SCHEDULE = N_("schedule")
    IN_USE = N_("in use")
    BATTERY = N_("battery")
    PROGRAM = N_("program")
    TEMPERATURE = N_("temperature")
    METERED = N_("metered")
    DISK = N_("disk")


# Rules that a person's "resume" lifts until their reason has ended; heat and a full disk stay.
LIFTABLE = frozenset({Rule.SCHEDULE, Rule.IN_USE, Rule.BATTERY, Rule.PROGRAM, Rule.METERED})


class MachineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about this machine's other activity; None (or a missing device) means unknown."""

    on_battery: bool | None = None
    battery_percent: float | None = None
    unused_s: float | None = None  # since the last key press or mouse movement
    temperatures: dict[str, float] = {}  # °C by device
    programs: tuple[str, ...] | None = None  # names of running programs
    metered: bool | None = None
    disk_free_bytes: int | None = None


class Hold(msgspec.Struct, frozen=True, kw_only=True):
    """Pause of one device, or of all devices when `device` is empty."""

    rule: Rule
    device: str = ""
    message: str
    until: str


class PolicyState(msgspec.Struct, frozen=True, kw_only=True):
    """Part of a decision that the next decision needs."""

    hot: frozenset[str] = frozenset()  # devices still cooling down
    lifted: frozenset[Rule] = frozenset()  # rules lifted by a person's "resume"


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """Decision from the rules and the facts: pauses, shares of working time, unmeasured rules."""

    holds: tuple[Hold, ...] = ()
    shares: dict[str, float] = {}  # share of working time by device; "" = all other devices
    unknown: tuple[str, ...] = ()  # sentences about active rules that cannot be measured here
    state: PolicyState = PolicyState()


def decide(
    rules: WorkRules,
    facts: MachineFacts,
    now: datetime,
    devices: Sequence[str],
    state: PolicyState | None = None,
) -> Decision:
    """Apply the rules to the facts; `now` is the local wall clock, without a zone."""
    state = state or PolicyState()
    checks = [
        _schedule(rules, now),
        _in_use(rules, facts),
        _battery(rules, facts),
        _program(rules, facts),
        _metered(rules, facts),
        _disk(rules, facts),
    ]
    holds = [hold for hold in checks if hold is not None]
    heat = _temperature(rules, facts, devices, state.hot)
    lifted = state.lifted & {
        hold.rule for hold in holds
    }  # a lifted rule whose reason has ended holds again next time
    active = [hold for hold in holds if hold.rule not in lifted]
    return Decision(
        holds=(*active, *heat),
        shares=_shares(rules, facts),
        unknown=_unknown(rules, facts, devices),
        state=PolicyState(hot=frozenset(hold.device for hold in heat), lifted=frozenset(lifted)),
    )


def lift(decision: Decision) -> tuple[PolicyState, tuple[Hold, ...]]:
    """Lift the holds that a person may lift; return the new state and the remaining holds."""
    liftable = {hold.rule for hold in decision.holds} & LIFTABLE
    before = decision.state
    state = msgspec.structs.replace(before, lifted=before.lifted | liftable)
    return state, tuple(hold for hold in decision.holds if hold.rule not in LIFTABLE)


def rest_after(busy_s: float, share: float) -> float:
    """Return the seconds to rest after `busy_s` seconds of work so that work takes `share` (0 to 1)
    of the time; WAIT_S_MAX at most.
    """
    return min(WAIT_S_MAX, busy_s * (1.0 / max(share, 0.01) - 1.0)) if share < 1.0 else 0.0


# The rules, one function each.


def _schedule(rules: WorkRules, now: datetime) -> Hold | None:
    hours = parse_schedule(rules.schedule)
    if hours.allows(now):
        return None
    begins = hours.changes(now)
    return Hold(
        rule=Rule.SCHEDULE,
        message=Sentence("outside of your hours ({hours})", hours=", ".join(rules.schedule)),
        until=Sentence("never") if begins is None else weekday_words(begins, now),
    )


def _in_recent_use(rules: WorkRules, facts: MachineFacts) -> bool:
    return facts.unused_s is not None and facts.unused_s < rules.idle_minutes * 60


def _in_use(rules: WorkRules, facts: MachineFacts) -> Hold | None:
    if rules.in_use != "pause" or not _in_recent_use(rules, facts):
        return None
    return Hold(
        rule=Rule.IN_USE,
        message=Sentence("this computer is in use"),
        until=Sentence(
            "keyboard and mouse rest for {n} min",
            n=figure(f"{rules.idle_minutes:g}"),
        ),
    )


def _battery(rules: WorkRules, facts: MachineFacts) -> Hold | None:
    if rules.on_battery or not facts.on_battery:
        return None
    charge = Sentence("on battery")
    if facts.battery_percent is not None:
        charge = Sentence("on battery ({n} %)", n=f"{facts.battery_percent:.0f}")
    return Hold(
        rule=Rule.BATTERY,
        message=charge,
        until=Sentence("it is plugged in"),
    )


def _program(rules: WorkRules, facts: MachineFacts) -> Hold | None:
    programs = {_comparable_name(name): name for name in rules.programs}
    running = next(
        (name for name in facts.programs or () if _comparable_name(name) in programs), None
    )
    if running is None:
        return None
    name = programs[_comparable_name(running)]
    return Hold(
        rule=Rule.PROGRAM,
        message=Sentence("{name} is running", name=name),
        until=Sentence("{name} ends", name=name),
    )


def _metered(rules: WorkRules, facts: MachineFacts) -> Hold | None:
    if rules.metered == "work" or not facts.metered:
        return None
    return Hold(
        rule=Rule.METERED,
        message=Sentence("the network connection is metered"),
        until=Sentence("the connection is not metered"),
    )


def _disk(rules: WorkRules, facts: MachineFacts) -> Hold | None:
    least = rules.disk_free_gb * GIB
    if facts.disk_free_bytes is None or facts.disk_free_bytes >= least:
        return None
    return Hold(
        rule=Rule.DISK,
        message=Sentence(
            "only {n} GiB of disk are free",
            n=figure(f"{facts.disk_free_bytes / GIB:.1f}"),
        ),
        until=Sentence("{n} GiB are free", n=figure(f"{rules.disk_free_gb:g}")),
    )


def _temperature(
    rules: WorkRules, facts: MachineFacts, devices: Sequence[str], hot: frozenset[str]
) -> list[Hold]:
    ceiling = rules.temperature_max
    holds = []
    for device in devices if ceiling else ():
        degrees = facts.temperatures.get(device)
        if degrees is None or degrees <= (ceiling - COOL_BY if device in hot else ceiling):
            continue
        holds.append(
            Hold(
                rule=Rule.TEMPERATURE,
                device=device,
                message=Sentence(
                    "{device} is at {degrees} °C, your limit is {ceiling} °C",
                    device=device,
                    degrees=figure(f"{degrees:.0f}"),
                    ceiling=figure(f"{ceiling:g}"),
                ),
                until=Sentence(
                    "it is below {ceiling} °C", ceiling=figure(f"{ceiling - COOL_BY:g}")
                ),
            )
        )
    return holds


def _shares(rules: WorkRules, facts: MachineFacts) -> dict[str, float]:
    gentle = GENTLE if rules.in_use == "gentle" and _in_recent_use(rules, facts) else 1.0
    duty = {"": rules.duty_percent, **rules.device_duty}
    shares = {device: percent / 100 * gentle for device, percent in duty.items()}
    return {device: share for device, share in shares.items() if device or share < 1.0}


def _unknown(rules: WorkRules, facts: MachineFacts, devices: Sequence[str]) -> tuple[str, ...]:
    notes = []
    if rules.in_use != "work" and facts.unused_s is None:
        notes.append(
            Sentence(
                "use of keyboard and mouse cannot be measured on this system: in_use = "
                '"{in_use}" has no effect',
                in_use=rules.in_use,
            )
        )
    if rules.programs and facts.programs is None:
        notes.append(
            Sentence("running programs cannot be listed on this system: programs has no effect")
        )
    unmeasured = [device for device in devices if device not in facts.temperatures]
    if rules.temperature_max and unmeasured:
        notes.append(
            Sentence(
                "the temperature of {devices} cannot be read here: temperature_max has no "
                "effect on it",
                devices=", ".join(unmeasured),
            )
        )
    return tuple(notes)


def _comparable_name(program: str) -> str:
    """Return a program's name for comparison: lower case, without `.exe`."""
    return program.strip().lower().removesuffix(".exe")
