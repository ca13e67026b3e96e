"""Choice of the codec for the updates of a worker that may lack the codec of the run."""

from __future__ import annotations

from collections.abc import Collection

from coordinator.plan.plan_tables import Plan

# fewest bytes first; every volunteer's program has the last
FALLBACKS = ("int8", "bf16", "float32")


def choose_codec(preferred: str, worker_codecs: Collection[str]) -> str:
    """Return the codec for an update: the run's codec, or else the first of `FALLBACKS` that the
    worker has; "" if the worker has no codec of these.

    A worker that names no codec gets the run's codec.
    """
    if not worker_codecs:
        return preferred
    return next((name for name in (preferred, *FALLBACKS) if name in worker_codecs), "")


def grantable(plan: Plan) -> frozenset[str]:
    """Return every codec that a lease of this run may name.

    The codec that a lease named is not stored, so a submission may use any of these.
    """
    return frozenset({plan.codec, *FALLBACKS})
