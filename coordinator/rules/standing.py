"""Standing of an account: on probation, vetted, suspended; and when its pay is its own. Pure rules.

    probation   until `PASSED_MIN` contributions passed a check; invited accounts begin vetted
    vetted      counts in statistics and in a merge like every other
    suspended   a recompute failed: no leases, what is in escrow is forfeit

Pay waits in escrow until so many later contributions of the account were accepted, or so many days
passed with a check passed since. An invited account is vouched for by the organiser and is paid at
once. An account that vetted itself by honest work still waits: paid at once, honest for ten tasks
and idle afterwards, it would keep what it earns until a check finds it; behind an escrow of
`VEST_AFTER` the mean gain of that is below zero however long it was honest, at a task in two days
and faster (tests/unit/coordinator/rules; at one in ten days, paid by age, half work gains 2 tasks
after 200 honest ones).
"""

from __future__ import annotations

from typing import Literal

import msgspec

from shared.protocol import limits

State = Literal["probation", "vetted", "suspended"]

PASSED_MIN = 10  # checks passed until an account is vetted
UNPROVEN_MAX = 3  # recomputes in a row that it could not prove: not vetted, paid into escrow only
UNCOMPARED_MAX = 3  # ... that differ on a class of device which cannot be compared
TRUST_MIN = 0.3  # below it: no leases and no pay
PROBATION_LEASES = 2  # at once, over all machines
PROBATION_MACHINES = 3
FAILURES_FREE = 3  # in a row, which a machine may have without a fault of its own
REST_S, REST_MAX_S = 10.0, 3600.0
VEST_AFTER = limits.VEST_AFTER  # later accepted contributions
VEST_DAYS = limits.VEST_DAYS  # or so long, with a check passed since
DAY_S = 86_400.0


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """Standing of an account, and the figures it is decided by."""

    state: State
    invited: bool
    passed: int  # checks, in all
    trust: float
    unproven: int = 0  # recomputes in a row that it could not prove


def after_check(account: Account, result: str, kind: str) -> Account:
    """Return the account after a check. Only a failed recompute suspends, and who proves nothing
    stays on probation.
    """
    if result == "failed" and kind == "recompute":
        return msgspec.structs.replace(account, state="suspended", trust=0.0)
    if result != "passed" or account.state == "suspended":
        return account
    passed = account.passed + 1
    enough = passed >= PASSED_MIN and account.unproven < UNPROVEN_MAX
    vetted = account.state == "vetted" or enough
    return msgspec.structs.replace(
        account, passed=passed, state="vetted" if vetted else "probation"
    )


def after_uncompared(account: Account, uncompared: int) -> Account:
    """Return the account after a recompute that differs on a device which cannot be compared, the
    `uncompared`th since one of its checks passed.

    The name of a class is the volunteer's word, so it must not be cheaper than proof: an account
    that nobody vouches for begins its probation again.
    """
    if uncompared < UNCOMPARED_MAX or account.invited or account.state != "vetted":
        return account
    return msgspec.structs.replace(account, state="probation", passed=0)


def rest_s(failures: int) -> float:
    """Return how long a worker gets no work after so many tasks given back as failed in a row: the
    first three cost nothing, then it doubles up to an hour.
    """
    more = failures - FAILURES_FREE
    return 0.0 if more < 1 else min(REST_MAX_S, REST_S * 2.0 ** min(30, more - 1))


def vested(*, invited: bool, accepted_since: int, age_s: float, passed_since: bool) -> bool:
    """Return True if a payment in escrow is earned now."""
    if invited:
        return True
    return accepted_since >= VEST_AFTER or (age_s >= VEST_DAYS * DAY_S and passed_since)
