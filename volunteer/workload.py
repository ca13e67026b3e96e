"""Public interface for a model of your own; docs/workload.md shows it.

Names of this module stay, and keep their meaning, as long as `API_VERSION` is the same.
"""

from __future__ import annotations

from shared.workloads.declaration import Declaration
from shared.workloads.derived.labelled_pictures import pictures, skip
from shared.workloads.derived.model_code import ModelCode, TrainerLike
from shared.workloads.derived.model_trial import Trial, trial
from shared.workloads.derived.own_model import OwnModel

API_VERSION = 1

__all__ = [
    "API_VERSION",
    "Declaration",
    "ModelCode",
    "OwnModel",
    "TrainerLike",
    "Trial",
    "pictures",
    "skip",
    "trial",
]
