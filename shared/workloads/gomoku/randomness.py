"""Randomness of self-play as a function of seeds, the same on every machine and in every release of
NumPy.

The numbers are raw words of Philox 4x64-10 (Salmon et al. 2011), which are fixed by definition,
unlike the distributions of NumPy's generators. A record's seed is enough to check each drawn move
and to search it again.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_WORD = (1 << 64) - 1
_TRIES = 4  # tries of the rejection sampler: each fails in fewer than one case in twenty
# Dirichlet: alpha is this over the number of legal moves (Silver et al. 2017).
_CONCENTRATION = 10.0


def words(seed: int, stream: int, count: int) -> NDArray[np.uint64]:
    """Return the first `count` words of a stream."""
    key = np.array([seed & _WORD, stream & _WORD], np.uint64)
    return np.random.Philox(key=key, counter=0).random_raw(count)


def game_seed(task_seed: int, game: int) -> int:
    """Return the seed of one game of a task."""
    return int(words(task_seed, game, 1)[0])


def fractions(raw: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return words as numbers above 0 and below 1."""
    return ((raw >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def dirichlet(seed: int, ply: int, legal: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Return noise over the legal cells of a root, zero elsewhere, (A,)."""
    cells = len(legal)
    alpha = _CONCENTRATION / max(1, int(legal.sum()))
    raw = words(seed, 2 * ply, cells * (3 * _TRIES + 1)).reshape(3 * _TRIES + 1, cells)
    u = fractions(raw)
    # Marsaglia and Tsang 2000: gamma of shape alpha + 1, then reduced to alpha by a power of a
    # uniform number.
    d = alpha + 1 - 1 / 3
    radius = np.sqrt(-2 * np.log(u[:_TRIES]))
    normal = radius * np.cos(2 * np.pi * u[_TRIES : 2 * _TRIES])
    v = np.maximum(1 + normal / np.sqrt(9 * d), 1e-9) ** 3
    fits = np.log(u[2 * _TRIES : 3 * _TRIES]) < normal**2 / 2 + d - d * v + d * np.log(v)
    first_fit = np.where(fits.any(axis=0), fits.argmax(axis=0), 0)
    gamma = d * v[first_fit, np.arange(cells)] * u[-1] ** (1 / alpha)
    gamma = np.where(legal, gamma, 0.0)
    noise: NDArray[np.float32] = (gamma / max(gamma.sum(), 1e-300)).astype(np.float32)
    return noise


def draw(visits: NDArray[np.int32], seed: int, ply: int, temperature_plies: int) -> int:
    """Return self-play's move after a search: early moves are drawn by visits, later moves
    are the most visited.
    """
    if ply >= temperature_plies:
        return int(visits.argmax())
    total = int(visits.sum())
    at = int(words(seed, 2 * ply + 1, 1)[0]) * total >> 64
    return int(np.searchsorted(np.cumsum(visits), at, side="right"))
