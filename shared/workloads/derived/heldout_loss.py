"""Loss of an author's model on held-out samples, and their pictures for people."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from time import monotonic

import numpy as np
import torch
from torch import Tensor

from shared.errors import BadRequest, InvalidRunFile
from shared.workloads.base import Config, Data, Sample, Weights
from shared.workloads.data.image_chunks import to_pixels
from shared.workloads.data.image_files import Pixels, write_png
from shared.workloads.data.resize import tile
from shared.workloads.data.windows import spread
from shared.workloads.derived.built_model import BuiltModel, SampleBatches
from shared.workloads.derived.derived_facts import CodePlace, derived_of, sample_counts
from shared.workloads.derived.model_code import load_code
from shared.workloads.derived.seeded_draws import InitialDraws, SampleDraws, SeededDraws

_EVAL_FLOPS = 3e11  # ten seconds on a slow core
_LEAST, _MOST = 64, 4096  # samples
_AT_ONCE = 32
_SHOWN, _ROW = 32, 8
_SIDE_MIN = 4  # least pixels of a picture's side


@torch.no_grad()
def heldout_loss(
    place: CodePlace,
    config: Config,
    weights: Weights,
    heldout: Data,
    budget_s: float,
    stop: Callable[[], bool],
) -> dict[str, float]:
    """Return the mean loss of held-out samples; `budget_s` and `stop` only end the measurement
    early.
    """
    most = int(_EVAL_FLOPS / max(1.0, derived_of(config).flops / 3))
    built, batches, count = _opened(place, config, weights, heldout, max(_LEAST, min(_MOST, most)))
    ends = monotonic() + budget_s
    total, measured = 0.0, 0
    for start in range(0, count, _AT_ONCE):
        if measured and (stop() or monotonic() > ends):
            break
        end = min(count, start + _AT_ONCE)
        total += float(_loss(built, batches, start, end)) * (end - start)
        measured = end
    return {
        "loss": total / max(1, measured),
        "samples": float(measured),
        "complete": float(measured == count),
    }


@torch.no_grad()
def shown(
    place: CodePlace, config: Config, weights: Weights, data: Data | None, draw_seed: str
) -> Sample:
    """Return pictures that the model draws, or held-out samples from the lowest loss to the
    highest.
    """
    if data is None or load_code(place.code).draw is not None:
        return _drawn(BuiltModel(place.code, config, weights=weights), draw_seed)
    built, batches, count = _opened(place, config, weights, data, _SHOWN)
    losses = [float(_loss(built, batches, index, index + 1)) for index in range(count)]
    order = sorted(range(count), key=lambda index: (losses[index], index))
    low, high = losses[order[0]], losses[order[-1]]
    title = f"{count} held-out samples, from loss {low:.3g} to {high:.3g}"
    for values in batches.fields(0, count).values():
        pixels = _pixels(values)
        if pixels is not None:
            return Sample(kind="png", title=title, data=write_png(tile(pixels[order], _ROW)))
    lines = [f"{n}: sample {index}, loss {losses[index]:.4g}" for n, index in enumerate(order, 1)]
    return Sample(kind="text", title=title, text="\n".join(lines))


def _drawn(built: BuiltModel, seed: str) -> Sample:
    """Return pictures that the author's `draw` makes. Raises BadRequest for code without `draw`,
    InvalidRunFile for pictures of a wrong shape.
    """
    code = built.code
    if code.draw is None:
        raise BadRequest(f"{code.file} draws nothing: give ModelCode a `draw(model, count)`")
    number = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "little") >> 1
    with SeededDraws(InitialDraws(number)):
        images = code.draw(built.model.eval(), _SHOWN).float().clamp(-1, 1)
    if images.ndim != 4 or images.shape[1] not in (1, 3):
        raise InvalidRunFile(
            f"{code.file}: {code.draw.__name__}() returned the shape {tuple(images.shape)}: return"
            " pictures (N, 1 or 3, height, width) from -1 to 1"
        )
    sheet = write_png(tile(to_pixels(images.numpy()), _ROW))
    return Sample(kind="png", title=f"{len(images)} pictures", data=sheet)


def _opened(
    place: CodePlace, config: Config, weights: Weights, data: Data, most: int
) -> tuple[BuiltModel, SampleBatches, int]:
    built = BuiltModel(place.code, config, weights=weights)
    built.model.eval()
    rows = spread(sample_counts(place.data, config, data.manifest), most)
    return built, SampleBatches(built, place.data, config, data, rows), len(rows)


def _loss(built: BuiltModel, batches: SampleBatches, start: int, stop: int) -> Tensor:
    with SeededDraws(SampleDraws(0, 0, start, stop - start)):
        return built.loss(batches.read(start, stop, "cpu"))


def _pixels(values: Tensor) -> Pixels | None:
    """Return pictures (N, C, H, W) of a field, or None if it has no pictures."""
    pictures = values[:, None] if values.ndim == 3 else values
    fits = (
        pictures.ndim == 4 and pictures.shape[1] in (1, 3) and min(pictures.shape[2:]) >= _SIDE_MIN
    )
    if not fits:
        return None
    if pictures.dtype == torch.uint8:
        return np.asarray(pictures)
    floats = pictures.float()
    low, high = floats.min(), floats.max()
    unit = (floats - low) / (high - low).clamp(min=1e-9)
    return to_pixels((unit * 2 - 1).numpy())
