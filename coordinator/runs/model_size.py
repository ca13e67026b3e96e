"""Memory of the coordinator's machine: a model that does not fit is refused before it is made, not
killed while it is.
"""

from __future__ import annotations

from collections.abc import Callable

import psutil

from shared.errors import InvalidRunFile

# float32 three times: the file's content, the model built from it, what evaluating it needs
BYTES_A_PARAMETER = 12
GB = 1e9


def _available() -> int:
    return int(psutil.virtual_memory().available)


def check_model(parameters: int, available: Callable[[], int] = _available) -> None:
    """Raises InvalidRunFile when making and evaluating a model of this size needs more than is
    available.
    """
    wanted, free = parameters * BYTES_A_PARAMETER, available()
    if wanted > free:
        raise InvalidRunFile(
            f"a model of {parameters / 1e6:,.0f} million parameters needs about "
            f"{wanted / GB:,.1f} GB of memory to be "
            f"made and evaluated here, and {free / GB:,.1f} GB are available: make [model] "
            "smaller, or give the "
            "coordinator a larger machine"
        )
