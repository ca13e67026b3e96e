"""Number of examples of a test of properties: few by default, all in the thorough profile."""

from __future__ import annotations

import os

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "fast")
EXAMPLES = {"fast": 25, "thorough": 100}  # of a test that names no number


def examples(thorough: int) -> int:
    """Return how many examples to try now of a test that has `thorough` of them in all."""
    return thorough if PROFILE == "thorough" else max(10, thorough // 4)
