"""Figures of all public runs as JSON, for the pages of others: `/figures.json`, with CORS."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from coordinator.pages.views import RunPage


class RunFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one run, unrounded."""

    name: str
    url: str
    state: str
    description: str
    workload: str
    parameters: int
    licence: str
    version: int
    measure: str
    loss: float | None
    loss_first: float | None
    machines: int
    accepted: int
    refused: int
    items: str  # unit of `amount`
    amount: int
    progress: float | None  # 0 to 1
    busy: float | None  # share of its machines' time at training, over the last day
    goodput: float | None  # share of that time at training whose result was merged
    standstill: str  # cause of its standstill; "" if the run goes on


class ServerFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a coordinator's public runs."""

    server: str
    at: float
    runs: Sequence[RunFigures]


def run_figures(page: RunPage, base: str) -> RunFigures:
    """Return the figures of a run's page."""
    info = page.info
    return RunFigures(
        name=info.name,
        url=f"{base}/runs/{info.name}",
        state=info.state,
        description=info.description,
        workload=info.workload,
        parameters=info.parameters,
        licence=info.licence,
        version=info.version,
        measure=info.measure,
        loss=info.loss,
        loss_first=info.loss_first,
        machines=info.workers,
        accepted=page.sums.figures.accepted,
        refused=page.sums.figures.rejected,
        items=info.items,
        amount=info.tokens,
        progress=info.progress,
        busy=None if page.sums.time is None else page.sums.time.busy,
        goodput=None if page.sums.time is None else page.sums.time.goodput,
        standstill="" if info.standstill is None else info.standstill.cause,
    )
