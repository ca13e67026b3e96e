"""A game against a version: keys and mouse lay stones, taking back, other versions, and
trouble as a sentence.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from textual.pilot import Pilot

from shared.errors import NotFound, Unreachable
from shared.workloads.games import BoardAnalysis as Position
from shared.workloads.games import MoveReply, cell_name
from shared.workloads.gomoku.rules import BoardRules
from shared.workloads.gomoku.rules import Position as Game
from tests.tui.engine import screen_text
from tests.tui.pages import SMALL, Snapshot
from volunteer.opponent import SeatedOpponent
from volunteer.tui.appearance import Look
from volunteer.tui.keys import key_name
from volunteer.tui.play.app import PlayApp
from volunteer.tui.text import UNICODE
from volunteer.tui.widgets.board import BoardState, board_lines, field_at


class Friend:
    """Plays the first empty field from above, and finds the last one nearly as good.

    `gate` holds its answers back.
    """

    def __init__(self, size: int = 6, win: int = 4, newest: int = 7) -> None:
        self.rules = BoardRules(size, win)
        self.newest = newest
        self.gate = asyncio.Event()
        self.gate.set()
        self.asked: list[tuple[tuple[int, ...], int]] = []
        self.refuses: Exception | None = None
        self.breaks: Exception | None = None  # the end of the reply that is under way

    async def sit(self, version: int | None = None) -> SeatedOpponent:
        if self.refuses is not None:
            raise self.refuses
        if version == 3:
            raise NotFound("version 3 is not kept")
        chosen = self.newest if version is None else version
        rules = self.rules
        return SeatedOpponent(
            run="six", version=chosen, newest=self.newest, size=rules.size, win=rules.win
        )

    def look(self, moves: Sequence[int]) -> Position:
        game = Game(self.rules, moves)
        board = tuple(game.board[0, :-1].tolist())
        return Position(board=board, over=game.over, winner=game.winner, row=game.row())

    async def reply(self, moves: Sequence[int], level: int) -> MoveReply:
        self.asked.append((tuple(moves), level))
        gate = self.gate
        await gate.wait()
        if self.breaks is not None and gate is not self.gate:
            raise self.breaks
        free = [field for field, stone in enumerate(self.look(moves).board) if not stone]
        return MoveReply(move=free[0], value=0.2)


@asynccontextmanager
async def at_the_board(
    friend: Friend, *, size: tuple[int, int] = (80, 24), version: int | None = None
) -> AsyncIterator[tuple[PlayApp, Pilot[int]]]:
    app = PlayApp(friend, "six", version=version)
    async with app.run_test(size=size) as pilot:
        await settle(pilot)
        yield app, pilot


async def settle(pilot: Pilot[int]) -> None:
    """Wait until the rival has answered and everything is drawn."""
    await pilot.app.workers.wait_for_complete()
    await pilot.pause()


async def press(pilot: Pilot[int], *keys: str) -> None:
    for key in keys:
        await pilot.press(key)
        await settle(pilot)


def names(app: PlayApp) -> list[str]:
    return [cell_name(move, app.game.size) for move in app.game.moves]


async def test_stones_are_laid_by_keys_and_the_version_answers() -> None:
    friend = Friend()
    async with at_the_board(friend) as (app, pilot):
        assert "your turn" in screen_text(app)
        assert "arrow keys or mouse choose a field" in screen_text(app)
        await press(pilot, "enter", "up", "left", "space")
        assert "arrow keys" not in screen_text(app)
        assert names(app) == ["d3", "a6", "c4", "b6"]
        assert friend.asked == [((21,), 1), ((21, 0, 14), 1)]
        assert "its guess   60 % for itself" in screen_text(app)
        await press(pilot, "enter")  # a stone lies there
        assert len(app.game.moves) == 4


async def test_stones_are_laid_by_the_mouse_also_where_only_a_part_of_the_board_is_seen() -> None:
    async with at_the_board(Friend()) as (app, pilot):
        await pilot.click("#board", offset=(2 + 3 + 2 * 4, 1 + 2))  # border, padding, label
        await settle(pilot)
        assert names(app)[0] == "e4"
    async with at_the_board(Friend(size=15, win=5), size=(30, 10)) as (app, pilot):
        rows = screen_text(app).splitlines()
        y = next(n for n, row in enumerate(rows) if "[" in row)
        await pilot.click(offset=(rows[y].index("["), y - 1))
        await settle(pilot)
        assert names(app)[0] == "h9"  # above the middle


async def test_a_move_is_taken_back_even_while_the_version_thinks() -> None:
    friend = Friend()
    async with at_the_board(friend) as (app, pilot):
        await press(pilot, "enter", "u")
        assert app.game.moves == ()
        friend.gate.clear()
        await pilot.press("enter")
        await pilot.pause()
        assert "version 7 is thinking" in screen_text(app)
        await pilot.press("enter")  # nothing happens while it thinks
        await pilot.press("u")
        friend.gate.set()
        await settle(pilot)
        assert app.game.moves == ()  # the answer came too late
        assert "your turn" in screen_text(app)


async def test_the_error_of_a_move_that_was_taken_back_is_not_shown() -> None:
    friend = Friend()
    async with at_the_board(friend) as (app, pilot):
        friend.gate.clear()
        await pilot.press("enter", "u")
        outdated, friend.gate = friend.gate, asyncio.Event()
        friend.breaks = Unreachable("the coordinator does not answer")
        await pilot.press("enter")
        await pilot.pause()
        assert len(friend.asked) == 2
        outdated.set()
        while len(app.workers) > 1:
            await pilot.pause()
        assert "version 7 is thinking" in screen_text(app)
        assert "does not answer" not in screen_text(app)
        friend.gate.set()
        await settle(pilot)
        assert len(app.game.moves) == 2
        assert "your turn" in screen_text(app)


async def test_swapping_lets_the_version_begin() -> None:
    async with at_the_board(Friend()) as (app, pilot):
        await press(pilot, "c")
        assert names(app) == ["a6"]
        assert "O, second" in screen_text(app)
        await press(pilot, "enter", "n")
        assert names(app) == ["a6"]


async def test_a_game_is_won_lost_or_drawn() -> None:
    async with at_the_board(Friend()) as (app, pilot):
        await press(pilot, "enter", "right", "enter", "right", "enter")
        assert "your turn" in screen_text(app)
        await press(pilot, "left", "left", "left", "enter")
        assert "you have won" in screen_text(app)
        await press(pilot, "right", "enter")
        assert len(app.game.moves) == 7
    async with at_the_board(Friend()) as (app, pilot):
        for key in ("enter", "down", "enter", "right", "enter", "down", "enter"):
            await press(pilot, key)
        assert "version 7 has won" in screen_text(app)
    async with at_the_board(Friend(size=3, win=3)) as (app, pilot):
        for move in (4, 2, 3, 7, 8):
            app._cursor = move
            await press(pilot, "enter")
        assert "a draw" in screen_text(app)


async def test_levels_and_versions_are_chosen_at_the_board() -> None:
    friend = Friend()
    async with at_the_board(friend, version=4) as (app, pilot):
        assert "version 4 of 7" in screen_text(app)
        await press(pilot, "3", "enter")
        assert friend.asked[-1][1] == 2
        await press(pilot, "l")
        assert "easy" in screen_text(app)
        await press(pilot, "right_square_bracket")
        assert "version 5 of 7" in screen_text(app)
        assert len(app.game.moves) == 2  # the game goes on
        await press(pilot, "left_square_bracket", "left_square_bracket")
        assert "version 3 is not kept" in screen_text(app)
        assert app.game.version == 4
        await press(pilot, "enter", "up", "enter")
        assert len(app.game.moves) == 4


async def test_without_a_version_there_is_a_sentence_and_a_way_out() -> None:
    friend = Friend()
    friend.refuses = Unreachable("the coordinator does not answer")
    async with at_the_board(friend) as (app, pilot):
        assert "the coordinator does not answer" in screen_text(app)
        await press(pilot, "enter", "up", "u", "n", "c", "right_square_bracket")
        await pilot.press("q")
        await pilot.pause()
    assert app.return_code == 0


@pytest.mark.parametrize(("x", "y", "field"), [(3, 0, 0), (4, 0, 1), (5, 0, 1), (13, 5, 35)])
def test_every_place_has_its_field(x: int, y: int, field: int) -> None:
    laid = BoardState(size=6, stones=(0,) * 36)
    assert field_at(laid, x, y, 20, 10) == field


@pytest.mark.parametrize(("x", "y"), [(0, 0), (3, 6), (3, -1), (30, 0)])
def test_beside_the_board_is_no_field(x: int, y: int) -> None:
    assert field_at(BoardState(size=6, stones=(0,) * 36), x, y, 20, 10) == -1


def test_the_cursor_is_in_brackets_and_the_last_stone_in_others() -> None:
    laid = BoardState(size=3, stones=(0, 1, 0, 0, -1, 0, 0, 0, 0), cursor=8, last=4)
    lines = ["".join(text for text, _ in line) for line in board_lines(laid, 20, 9, UNICODE)]
    assert lines == [" 3 · X · ", " 2 ·(O)· ", " 1 · ·[·]", "   a b c"]


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("left_square_bracket,minus", "["),
        ("right_square_bracket", "]"),
        ("ctrl+p", "^p"),
        ("left", "←"),
        ("n", "n"),
    ],
)
def test_a_key_is_written_as_it_stands_on_the_keyboard(key: str, says: str) -> None:
    assert key_name(key) == says


def drawn(compare: Snapshot, size: tuple[int, int], *, ascii: bool = False) -> bool:
    app = PlayApp(Friend(size=15, win=5), "five-in-a-row", look=Look(ascii=ascii))

    async def play(pilot: Pilot[int]) -> None:
        await settle(pilot)
        await press(pilot, "enter", "up", "right", "enter", "left", "enter", "down")

    return compare(app, terminal_size=size, run_before=play)


@pytest.mark.parametrize("size", [(80, 24), (120, 36), SMALL], ids=str)
def test_screen(text_compare: Snapshot, size: tuple[int, int]) -> None:
    assert drawn(text_compare, size)


def test_screen_in_seven_bits(text_compare: Snapshot) -> None:
    assert drawn(text_compare, (80, 24), ascii=True)


def test_picture(snap_compare: Snapshot) -> None:
    assert drawn(snap_compare, (120, 36))


async def test_what_is_fetched_is_said_on_the_board_and_the_keys_are_told() -> None:
    friend, arrived = Friend(), asyncio.Event()
    sit = friend.sit

    async def slowly(version: int | None = None) -> SeatedOpponent:
        await arrived.wait()
        return await sit(version)

    friend.sit = slowly  # type: ignore[method-assign]
    app = PlayApp(friend, "six")
    async with app.run_test(size=(80, 24), notifications=True) as pilot:
        await pilot.pause()
        assert screen_text(app).count("downloading the version") == 2  # state and board
        await pilot.press("question_mark")
        await pilot.pause()
        assert "The arrow keys move." in screen_text(app)
        arrived.set()
        await pilot.pause()
        assert "downloading" not in screen_text(app)
