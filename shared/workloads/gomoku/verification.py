"""Verification that the named network really played the games: rules, randomness, and repeated
searches.

Every move gets the cheap checks (see `records.check`). Then a few positions of every game, chosen
by the checker after submission, are searched again with the same network, noise and number of
simulations. An honest search gives the same visits: the trunk of a player gives the same bits on
every device (`fixed_point`), and only the last bits of the heads differ, which seldom diverts a
simulation. Invented visits, or another network's, differ nearly everywhere. Measured (6 x 6, 64
simulations): noise of 1e-4 in the network's output moves less than 1 % of positions by more than
APART, the previous or next version 90 % of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from shared.workloads.base import Job
from shared.workloads.gomoku.randomness import dirichlet, game_seed, words
from shared.workloads.gomoku.records import GameRecord, InvalidGame, Manner, check, counts
from shared.workloads.gomoku.rules import BoardRules, Boards, empty
from shared.workloads.gomoku.search import Evaluator, Search, SearchSettings

BATCH = 64  # positions searched together
FIRST = 2  # positions of each game that are searched again
MORE = 8  # further positions that are searched if one of them differs
APART = 0.05  # total variation above which two distributions of visits are from different searches
AGREE = 0.8  # share of a game's searched positions that must agree
# Share, plus a number, of a file's first-searched positions that may differ: honest files have at
# most 1 %, while a few invented moves in every game add up to more.
DIFFER, DIFFER_MIN = 0.04, 3


class Bench(msgspec.Struct, frozen=True, kw_only=True):
    """Rules of the games, and the versions that may have played, with their networks."""

    rules: BoardRules
    manner: Manner
    # hashes of the published weights of each version that may have played
    hashes: Mapping[int, str]
    player: Callable[[int], Evaluator]
    seed: int  # secret until the games are submitted: chooses the positions
    share: float = 0.0  # share of a game's positions to search again, at least `FIRST`


class Spot(msgspec.Struct, frozen=True, kw_only=True):
    """Position whose search is repeated."""

    record: GameRecord
    ply: int
    player: int  # version that moves


def examine(records: Sequence[GameRecord], bench: Bench) -> dict[int, str]:
    """Return the fault of each faulty record, by its place in the file."""
    complaints: dict[int, str] = {}
    for place, record in enumerate(records):
        try:
            _check_version(record, bench)
            check(record, bench.rules, bench.manner)
        except InvalidGame as error:
            complaints[place] = error.message
    looked = {
        place: max(FIRST, round(bench.share * len(record.visits)))
        for place, record in enumerate(records)
        if place not in complaints
    }
    first = [
        (place, spot)
        for place, many in looked.items()
        for spot in _spots(records[place], bench, 0, many)
    ]
    gaps = _compare(first, bench)
    doubtful = [place for place, distances in gaps.items() if max(distances) > APART]
    differ = sum(gap > APART for distances in gaps.values() for gap in distances)
    too_many = differ > DIFFER_MIN + DIFFER * len(first)
    more = [
        (place, spot)
        for place in doubtful
        for spot in _spots(records[place], bench, looked[place], looked[place] + MORE)
    ]
    for place, distances in _compare(more, bench).items():
        gaps[place] += distances
    for place in doubtful:
        same = sum(gap <= APART for gap in gaps[place])
        if too_many or same < AGREE * len(gaps[place]):
            record = records[place]
            complaints[place] = (
                f"game {record.game}: searched again by version {record.version}, {same} of"
                f" {len(gaps[place])} positions gave the visits that it shows"
            )
    return complaints


def numbering(records: Sequence[GameRecord], job: Job, *, match: bool) -> dict[int, str]:
    """Return the fault of each record with a wrong number, seed or version, and of each game that
    the file contains twice, by place in the file.
    """
    complaints: dict[int, str] = {}
    numbers: set[int] = set()
    for place, record in enumerate(records):
        seed = 0 if match else game_seed(job.seed, record.game)
        if not job.start <= record.game < job.stop:
            complaints[place] = f"game {record.game} is not one of {job.start} to {job.stop - 1}"
        elif record.game in numbers:
            complaints[place] = f"game {record.game} is in the file twice"
        elif record.seed != seed:
            complaints[place] = f"game {record.game} was not played with its own seed"
        elif match and record.version != job.base_version:
            complaints[place] = (
                f"game {record.game} measures version {record.version}, not the one asked for"
            )
        numbers.add(record.game)
    return complaints


def gap(one: NDArray[np.int32], other: NDArray[np.int32]) -> float:
    """Return the total variation between two distributions of visits, 0 ... 1."""
    return float(np.abs(one / one.sum() - other / other.sum()).sum()) / 2


def _check_version(record: GameRecord, bench: Bench) -> None:
    weights = bench.hashes.get(record.version)
    if weights is None:
        raise InvalidGame(
            f"game {record.game}: version {record.version} may not play here (any more)"
        )
    if weights != record.weights:
        raise InvalidGame(
            f"game {record.game}: version {record.version} has other weights than the record says"
        )
    if bench.manner.match and record.against not in bench.hashes:
        raise InvalidGame(
            f"game {record.game}: version {record.against} was not the one to play against"
        )


def _spots(record: GameRecord, bench: Bench, first: int, last: int) -> list[Spot]:
    """Return the positions number `first` to `last` - 1 of a game, in a random order that only the
    checker knows.
    """
    searched = len(record.visits)
    order = np.argsort(words(bench.seed, record.game, max(1, searched)), kind="stable")[:searched]
    plies = (order[first:last] + record.opening).tolist()
    return [Spot(record=record, ply=ply, player=_player(record, ply, bench)) for ply in plies]


def _player(record: GameRecord, ply: int, bench: Bench) -> int:
    """Return the player to move: in a match the measured version begins the even games."""
    other_side = bench.manner.match and (ply + record.game) % 2 == 1
    return record.against if other_side else record.version


def _compare(spots: Iterable[tuple[int, Spot]], bench: Bench) -> dict[int, list[float]]:
    """Return for each record, by place, how far its visits are from the repeated searches."""
    groups: dict[int, list[tuple[int, Spot]]] = {}
    for place, spot in spots:
        groups.setdefault(spot.player, []).append((place, spot))
    distances: dict[int, list[float]] = {}
    for version, members in groups.items():
        evaluator = bench.player(version)
        for start in range(0, len(members), BATCH):
            batch = members[start : start + BATCH]
            visits = search_again([spot for _, spot in batch], bench, evaluator)
            for (place, spot), row in zip(batch, visits, strict=True):
                counted = spot.record.visits[spot.ply - spot.record.opening]
                distance = gap(counts(counted, bench.rules.cells), row)
                distances.setdefault(place, []).append(distance)
    return distances


def search_again(spots: Sequence[Spot], bench: Bench, evaluator: Evaluator) -> NDArray[np.int32]:
    """Return the visits of each position, (spots, A), by the rules of the task."""
    manner = bench.manner
    boards, movers = _boards(spots, bench.rules)
    noise = None
    if manner.noise > 0:
        rows = zip(spots, boards, strict=True)
        noise = np.stack([dirichlet(s.record.seed, s.ply, b[:-1] == 0) for s, b in rows])
    settings = SearchSettings(simulations=manner.simulations, noise=manner.noise)
    search = Search(bench.rules, settings, len(spots))
    search.start(boards, movers, noise)
    search.run(evaluator)
    return search.visits()


def _boards(spots: Sequence[Spot], rules: BoardRules) -> tuple[Boards, NDArray[np.int8]]:
    boards = empty(rules, len(spots))
    for board, spot in zip(boards, spots, strict=True):
        moves = np.array(spot.record.moves[: spot.ply], np.intp)
        board[moves[0::2]] = 1
        board[moves[1::2]] = -1
    movers = np.array([1 if spot.ply % 2 == 0 else -1 for spot in spots], np.int8)
    return boards, movers
