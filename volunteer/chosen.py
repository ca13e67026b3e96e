"""The runs that the command line names, held against those that the coordinator has."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from shared.errors import BadRequest
from shared.protocol.accounts import RunInfo
from volunteer.wording import printable

ENDED = ("completed", "failed")
LISTED_MAX = 20


def check_chosen(chosen: Sequence[str], runs: Sequence[RunInfo]) -> None:
    """Raises BadRequest, with the runs there are, for a name that is none of them or when all that are named have ended."""
    if not chosen:
        return
    known = {run.name: run for run in runs}
    for name in chosen:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f' (did you mean "{near[0]}"?)' if near else ""
            raise BadRequest(f'there is no run "{name}" here{hint}; {_listed(runs)}')
    if all(known[name].state in ENDED for name in chosen):
        names = " and ".join(f'"{name}"' for name in chosen)
        verb = "has" if len(chosen) == 1 else "have"
        raise BadRequest(f"{names} {verb} ended: nothing is left to do; {_listed(runs)}")


def _listed(runs: Sequence[RunInfo]) -> str:
    if not runs:
        return "the coordinator has no run yet"
    shown = [f"{printable(run.name)} ({printable(run.workload)}, {run.state})" for run in runs]
    more = f" and {len(shown) - LISTED_MAX} more" if len(shown) > LISTED_MAX else ""
    return f"the runs are: {', '.join(shown[-LISTED_MAX:])}{more}"
