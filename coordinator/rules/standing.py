"""Standing of an account: on probation, vetted, suspended. Pure rules.

    probation   until `PROOFS_MIN` draws of different tasks passed; invited accounts begin vetted
    vetted      its contributions count fully in statistics and in a merge
    suspended   a draw failed: no leases, the stake is forfeited

An account that fakes half of its work is vetted with a probability of 2 ** -10, below one in a
thousand. The organiser vouches for an invited account: it is paid at once, but drawn like the
others. Only a recompute moves a standing: no refusal and no failed task does. A machine whose tasks
fail rests.
"""

from __future__ import annotations

from typing import Literal

import msgspec

State = Literal["probation", "vetted", "suspended"]

PROOFS_MIN = 10
PROBATION_LEASES = 2  # most leases at once, over all machines
PROBATION_MACHINES = 3
FAILURES_FREE = 3  # recent failures after which a machine still needs no rest
REST_S, REST_MAX_S = 10.0, 3600.0
PROOF_REST_S, PROOF_REST_MAX_S = 60.0, 86_400.0  # rest after recomputes that proved nothing


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """Standing of an account, and the figures behind it."""

    state: State
    invited: bool
    proofs: int = 0  # passed draws of different tasks since the last failed or unproven draw


def after_draw(account: Account, result: str, *, fresh: bool = True) -> Account:
    """Return the account after a draw; `fresh` is False for a task that was proved before."""
    if account.state == "suspended" or result == "failed":
        return msgspec.structs.replace(account, state="suspended", proofs=0)
    if result == "passed":
        proofs = account.proofs + fresh
        vetted = account.state == "vetted" or proofs >= PROOFS_MIN
        state: State = "vetted" if vetted else "probation"
        return msgspec.structs.replace(account, proofs=proofs, state=state)
    state = "vetted" if account.invited else "probation"
    return msgspec.structs.replace(account, proofs=0, state=state)


def rest_s(failures: int) -> float:
    """Return the rest of a machine after recent failed tasks: none after the first three, then
    doubling up to an hour.
    """
    more = failures - FAILURES_FREE
    return 0.0 if more < 1 else min(REST_MAX_S, REST_S * 2.0 ** min(30, more - 1))


def proof_rest_s(unproven: int) -> float:
    """Return the rest of an account after so many recomputes in a row that proved nothing: a
    minute, then doubling up to a day.
    """
    return min(PROOF_REST_MAX_S, PROOF_REST_S * 2.0 ** min(30, unproven - 1)) if unproven else 0.0
