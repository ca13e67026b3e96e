"""Records of games: what is made, what is refused, and how many fakes get through."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from shared.errors import BadRequest
from shared.workloads.base import Job
from shared.workloads.data.jsonl_zst import pack
from shared.workloads.games import cell_name
from shared.workloads.gomoku.config import GomokuConfig, GomokuOptions
from shared.workloads.gomoku.network import NetEvaluator
from shared.workloads.gomoku.openings import drawn
from shared.workloads.gomoku.randomness import draw, game_seed
from shared.workloads.gomoku.records import (
    GameRecord,
    InvalidGame,
    check,
    decode,
    encode,
    flat,
    positions,
)
from shared.workloads.gomoku.rules import BoardRules, Position
from shared.workloads.gomoku.verification import Bench, examine, numbering
from tests.support.workloads.tiny_gomoku import (
    WORKLOAD,
    Weights,
    Window,
    config,
    finish,
    job,
    lively,
    options,
    play,
)

CONFIG = GomokuConfig.from_dict(config())
MANNER = GomokuOptions.from_dict(options()).manner()


@pytest.fixture(scope="module")
def games(tmp_path_factory: pytest.TempPathFactory) -> list[GameRecord]:
    return play(lively(), 12, tmp_path_factory.mktemp("games"))


def test_honest_games_are_in_order(games: list[GameRecord]) -> None:
    assert [record.game for record in games] == list(range(12))
    for record in games:
        check(record, CONFIG.rules, MANNER)
    assert len({record.moves for record in games}) > 8


def test_a_file_comes_back_as_it_was(games: list[GameRecord]) -> None:
    assert decode(encode(games)) == games
    assert decode(encode([])) == []


def changed(record: GameRecord, **changes: Any) -> GameRecord:
    return msgspec.structs.replace(record, **changes)


def with_move(record: GameRecord, ply: int, move: int) -> GameRecord:
    return changed(record, moves=(*record.moves[:ply], move, *record.moves[ply + 1 :]))


def with_visits(record: GameRecord, ply: int, row: tuple[int, ...]) -> GameRecord:
    at = ply - record.opening
    return changed(record, visits=(*record.visits[:at], row, *record.visits[at + 1 :]))


BREAKS = {
    "before its end": lambda r: changed(r, moves=r.moves[:-1], visits=r.visits[:-1]),
    "but the moves end with": lambda r: changed(r, outcome=-r.outcome if r.outcome else 1),
    "its outcome is 2": lambda r: changed(r, outcome=2),
    "searches": lambda r: changed(r, visits=r.visits[:-1]),
    "instead of 32": lambda r: with_visits(r, 6, (r.moves[6], 31)),
    "pairs of a cell and a count": lambda r: with_visits(r, 6, (r.moves[6],)),
    "not on the board": lambda r: with_visits(r, 6, (36, 32)),
    "in order": lambda r: with_visits(r, 6, (5, 16, 5, 16)),
    "has more than 64 bits": lambda r: with_visits(r, 6, (5, 2**63)),
    "not a positive number": lambda r: with_visits(r, 6, (5, -1, 6, 33)),
    "where a stone lies": lambda r: with_visits(r, 6, (r.moves[0], 32)),
    "by its visits and its seed": lambda r: with_move(r, 6, (r.moves[6] + 1) % 36),
    "the opening that it was given": lambda r: with_move(r, 0, (r.moves[0] + 1) % 36),
    "do not make a game": lambda r: changed(r, opening=len(r.moves) + 1),
}


@pytest.mark.parametrize("sentence", BREAKS)
def test_a_broken_game_is_refused_by_name(games: list[GameRecord], sentence: str) -> None:
    record = next(record for record in games if record.opening == 1)
    broken = BREAKS[sentence](record)
    with pytest.raises(InvalidGame, match=f"game {record.game}: .*{sentence}"):
        check(broken, CONFIG.rules, MANNER)


def test_an_illegal_move_is_named_with_its_game(games: list[GameRecord]) -> None:
    taken = games[2].moves[0]
    forged = with_visits(with_move(games[2], 8, taken), 8, (taken, 32))
    with pytest.raises(InvalidGame, match="game 2: the search of move 9 visited"):
        check(forged, CONFIG.rules, MANNER)
    with pytest.raises(BadRequest, match=f"move 9 goes to {cell_name(taken, 6)}"):
        Position(CONFIG.rules, forged.moves)


class Line(msgspec.Struct):
    weights: msgspec.Raw


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "cut off"),
        (b"no zstd at all", "not a compressed file"),
        (encode([])[:-1], "cut off"),
        (encode([]) + b"x", "something follows"),
        (pack([CONFIG]), "line 1 is not a record"),
        (pack([Line(weights=msgspec.Raw(b'"\xff"'))]), "line 1 is not a record"),
    ],
)
def test_what_is_no_file_of_games_is_refused(data: bytes, sentence: str) -> None:
    with pytest.raises(InvalidGame, match=sentence):
        decode(data)


def asked(count: int, **changes: Any) -> Job:
    return job("selfplay", config(), count, **changes)


def test_numbers_and_seeds_are_those_of_the_task(games: list[GameRecord]) -> None:
    assert numbering(games, asked(12), match=False) == {}
    assert set(numbering(games, asked(11), match=False)) == {11}
    assert set(numbering([*games, games[3]], asked(12), match=False)) == {12}
    assert len(numbering(games, asked(12, seed=6), match=False)) == 12


def test_positions_are_seen_by_whoever_is_to_move(games: list[GameRecord]) -> None:
    found = positions(games, CONFIG.rules)
    assert len(found) == sum(len(record.visits) for record in games)
    assert (found.visits.sum(axis=1) == 32).all()
    record = games[0]
    position = Position(CONFIG.rules, record.moves[: record.opening])
    for at, ply in enumerate(range(record.opening, len(record.moves))):
        assert np.array_equal(found.boards[at], position.board[0, :-1] * position.player)
        assert found.results[at] == record.outcome * position.player
        assert flat(found.visits[at].astype(np.int32)) == record.visits[at]
        position.play(record.moves[ply])


# ------------------------------------------------------------------------------------------- fakes


def invented(record: GameRecord, rules: BoardRules, rng: np.random.Generator) -> GameRecord:
    """Moves that anybody can make without a network, with visits from which they would have been
    drawn.
    """
    position = Position(rules, drawn(rules, record.seed, MANNER.opening_plies))
    visits = []
    while not position.over:
        free = np.flatnonzero(position.board[0, :-1] == 0)
        shares = rng.dirichlet(np.full(len(free), 0.3))
        row = np.zeros(rules.cells, np.int32)
        row[free] = rng.multinomial(MANNER.simulations, shares)
        visits.append(flat(row))
        position.play(draw(row, record.seed, len(position.moves), MANNER.temperature_plies))
    return changed(
        record,
        moves=tuple(position.moves),
        visits=tuple(visits),
        outcome=position.winner,
        opening=len(position.moves) - len(visits),
    )


def trained(weights: Weights, records: list[GameRecord], path: Path) -> Weights:
    window = Window(path)
    window.seal(records)
    work = WORKLOAD.begin(job("learn", config(), 20), weights, window, "cpu")
    return finish(work)[1]


@pytest.mark.slow
def test_fakes_are_refused_and_honest_games_are_not(tmp_path: Path) -> None:
    count, rng = 60, np.random.default_rng(3)
    old = lively()
    new = trained(old, play(old, 24, tmp_path), tmp_path)
    honest = play(new, count, tmp_path, base_version=3, base_sha256="new")
    stale = play(old, count, tmp_path, base_version=3, base_sha256="new")
    fakes = {
        "random": [invented(record, CONFIG.rules, rng) for record in honest],
        "truncated": [changed(r, moves=r.moves[:-2], visits=r.visits[:-2]) for r in honest],
        "duplicated": [
            changed(honest[(n + 1) % count], game=n, seed=game_seed(5, n)) for n in range(count)
        ],
        "old model": stale,
        "flipped winner": [changed(r, outcome=-r.outcome if r.outcome else 1) for r in honest],
    }
    player = NetEvaluator(CONFIG, new, "cpu")
    bench = Bench(
        rules=CONFIG.rules, manner=MANNER, hashes={3: "new"}, player=lambda _: player, seed=99
    )
    wrongly, caught = 0, dict.fromkeys(fakes, 0)
    for turn, kind in enumerate(fakes):
        # A quarter of each file is fake.
        mixed = [fakes[kind][n] if n % 4 == turn % 4 else honest[n] for n in range(count)]
        refused = numbering(mixed, asked(count), match=False) | examine(mixed, bench)
        caught[kind] = sum(n % 4 == turn % 4 for n in refused)
        wrongly += sum(n % 4 != turn % 4 for n in refused)
    made = count // 4
    assert sum(caught.values()) >= 0.99 * made * len(fakes), caught
    assert wrongly <= 0.005 * 3 * made * len(fakes)


def test_a_game_of_unknown_or_other_weights_is_refused(games: list[GameRecord]) -> None:
    player = NetEvaluator(CONFIG, lively(), "cpu")
    known: dict[int, str] = {0: "00"}
    bench = Bench(rules=CONFIG.rules, manner=MANNER, hashes=known, player=lambda _: player, seed=1)
    assert examine(games, bench) == {}
    forged = [changed(games[0], version=7), changed(games[1], weights="11")]
    assert "version 7 may not play" in examine(forged, bench)[0]
    assert "other weights" in examine(forged, bench)[1]


def partly_invented(record: GameRecord, share: float, rng: np.random.Generator) -> GameRecord:
    """The same moves, but for a share of them other visits, of which the move could be drawn."""
    visits = list(record.visits)
    position = Position(CONFIG.rules)
    for ply, move in enumerate(record.moves):
        at = ply - record.opening
        if at >= 0 and rng.random() < share:
            free = np.flatnonzero(position.board[0, :-1] == 0)
            for _ in range(100):
                shares = rng.dirichlet(np.full(len(free), 0.3))
                row = np.zeros(CONFIG.rules.cells, np.int32)
                row[free] = rng.multinomial(MANNER.simulations, shares)
                if draw(row, record.seed, ply, MANNER.temperature_plies) == move:
                    visits[at] = flat(row)
                    break
        position.play(move)
    return changed(record, visits=tuple(visits))


@pytest.mark.slow
def test_a_file_with_a_part_of_its_searches_invented_is_refused(tmp_path: Path) -> None:
    """Arithmetic that differs by 1e-4 refuses nothing that the verdict does not tolerate. About
    half of the files with a tenth invented are refused.
    """
    count, turns, rng = 40, 6, np.random.default_rng(7)
    network = NetEvaluator(CONFIG, lively(), "cpu")

    def other(boards: Any) -> Any:
        logits, values = network(boards)
        return (
            logits + 1e-4 * rng.standard_normal(logits.shape).astype(np.float32),
            values + 1e-4 * rng.standard_normal(values.shape).astype(np.float32),
        )

    honest = play(lively(), count, tmp_path, base_version=3, base_sha256="new")
    refused: dict[float, list[int]] = {}
    for share in (0.0, 0.1, 0.2):
        for turn in range(turns):
            bench = Bench(
                rules=CONFIG.rules, manner=MANNER, hashes={3: "new"}, player=lambda _: other,
                seed=turn,
            )  # fmt: skip
            made = [partly_invented(record, share, rng) for record in honest]
            refused.setdefault(share, []).append(len(examine(made, bench)))
    tolerated = int(0.05 * count)
    assert max(refused[0.0]) <= 1, refused
    assert min(refused[0.2]) > tolerated, refused
    assert max(refused[0.1]) > tolerated, refused
