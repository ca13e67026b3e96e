"""Declaration of a workload: the output of its versions, their teaching and their measure.

Every subject (prompts, games, export, the best version, retention, screens) decides by the
declaration alone, never by a workload's name. This module loads without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, TypeAlias

import msgspec

from shared.sentences import Sentence

Output: TypeAlias = Literal["text", "image", "moves", "none"]
Teaching: TypeAlias = Literal["samples", "experience"]
# Meaning of "loss" in the result of `Workload.evaluate`, which is lower for a better version: a
# held-out loss; the share of problems that is not solved; a loss on positions, while matches decide
# which version is best; a distance of images.
Measure: TypeAlias = Literal["loss", "share solved", "matches", "distance"]
Subject: TypeAlias = Literal["ask", "draw", "generate", "play"]

MEASURES: Mapping[Measure, str] = MappingProxyType(
    {
        "loss": "held-out loss",
        "share solved": "share solved",
        "matches": "tactical loss",
        "distance": "Fréchet distance",
    }
)
_OUTPUTS: Mapping[Subject, tuple[Output, ...]] = MappingProxyType(
    {"ask": ("text",), "draw": ("image",), "generate": ("text", "image"), "play": ("moves",)}
)


class Declaration(msgspec.Struct, frozen=True, kw_only=True):
    """Abilities of a workload: its output, its teaching and its measure."""

    output: Output
    taught_by: Teaching = "samples"  # samples of a dataset, or episodes of its own versions
    measure: Measure = "loss"
    items: str = "tokens"  # unit of datasets, of progress and of [stop] tokens


def refusal(output: Output, subject: Subject, name: str) -> Sentence | None:
    """Return the sentence that refuses a subject to a model, and says what the model can do
    instead; None if the model can do it.
    """
    if output in _OUTPUTS[subject]:
        return None
    if output == "text":
        return Sentence('"{name}" writes text: volunteer generate {name}', name=name)
    if output == "image":
        return Sentence('"{name}" draws pictures: volunteer generate {name}', name=name)
    if output == "none":
        return Sentence('"{name}" answers nobody: its organiser exports it', name=name)
    return Sentence('"{name}" plays a game: volunteer play {name}', name=name)
