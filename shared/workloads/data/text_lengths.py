"""Lengths of the texts of a dataset."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Meta = dict[str, str | int | float]


def lengths(sizes: Sequence[int], unit: str) -> Meta:
    """Return median, 95th percentile and maximum of lengths in `unit` as metadata; {} without
    lengths.
    """
    if not sizes:
        return {}
    middle, long = np.percentile(sizes, (50, 95))
    return {
        "length_unit": unit,
        "length_median": round(float(middle)),
        "length_95": round(float(long)),
        "length_longest": max(sizes),
    }
