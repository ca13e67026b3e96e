"""Reports of the training thread as the events that a volunteer makes of them."""

from __future__ import annotations

from volunteer.control import events
from volunteer.training.job import TrainingReport


def training(report: TrainingReport) -> events.Training:
    """The event that a volunteer makes of a report."""
    return events.Training(
        task=1,
        run="bench",
        device="cpu",
        step=report.step,
        steps=report.steps,
        samples=report.samples,
        loss=report.loss,
        steps_per_s=report.steps_per_s,
        tokens_per_s=report.samples_per_s,
        eta_s=report.eta_s,
        version=0,
    )
