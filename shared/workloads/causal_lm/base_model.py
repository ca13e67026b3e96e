"""The frozen weights that adapters go with."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from shared.workloads.base import Data
from shared.workloads.causal_lm.config import CausalConfig
from shared.workloads.causal_lm.init import BASE_SEED, from_nothing


def frozen_of(config: CausalConfig, data: Data | None) -> Mapping[str, Tensor] | None:
    """Frozen weights of a run's model; None where every weight is trained."""
    if config.lora is None:
        return None
    return from_nothing(config.shape, BASE_SEED)
