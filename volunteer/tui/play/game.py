"""A game against a version as data: its state, the lines beside the board, and the keys."""

from __future__ import annotations

import msgspec

from shared.workloads.games import LEVELS, Look, Reply, cell_name
from volunteer.tui.keys import Command
from volunteer.tui.text import Line, fit, left, wrap
from volunteer.tui.widgets.board import STONES

BEST = 5  # moves of a hint that are listed
MOVES_SHOWN = 6
EMPTY = Look(board=(), over=False)


class Game(msgspec.Struct, frozen=True, kw_only=True):
    """State of a game, the input of everything that draws."""

    run: str = ""
    version: int = 0
    newest: int = 0
    size: int = 0
    win: int = 0
    moves: tuple[int, ...] = ()
    mine: int = 1  # 1 = I have the first stones
    level: int = 1
    position: Look = EMPTY
    thinking: bool = False
    asking: bool = False  # for a hint
    hint: Reply | None = None
    value: float | None = None  # the version's own estimate of its last position, -1 to 1
    trouble: str = ""

    @property
    def turn(self) -> int:
        return 1 if len(self.moves) % 2 == 0 else -1

    @property
    def my_turn(self) -> bool:
        return bool(self.size) and not self.position.over and self.turn == self.mine


ACTIONS = (
    Command(
        id="lay", key="enter,space", action="lay", short="lay", help="Lay a stone.", place="footer"
    ),
    Command(
        id="hint",
        key="i",
        action="hint",
        short="hint",
        help="Show what the version would play here: tenths of its visits, on the board.",
        place="footer",
        rank=10,
    ),
    Command(
        id="back",
        key="u,backspace",
        action="take_back",
        short="back",
        help="Take my last stone back.",
        place="footer",
        rank=20,
    ),
    Command(
        id="new", key="n", action="new", short="new", help="A new game.", place="footer", rank=30
    ),
    Command(
        id="colour",
        key="c",
        action="colour",
        short="swap",
        help="A new game with the other stones.",
        place="footer",
        rank=40,
    ),
    Command(
        id="level",
        key="l",
        action="level",
        short="level",
        help="Easy, middle, hard: 1, 2, 3, or the next one.",
        place="footer",
        rank=45,
    ),
    Command(
        id="older",
        key="left_square_bracket,minus",
        action="version(-1)",
        short="older",
        help="Against the version before.",
        place="footer",
        rank=60,
    ),
    Command(
        id="newer",
        key="right_square_bracket,plus",
        action="version(1)",
        short="newer",
        help="Against the version after.",
        place="footer",
        rank=61,
    ),
    Command(id="leave", key="q", action="leave", short="quit", help="Leave.", place="footer"),
)


def verdict(game: Game) -> tuple[str, str]:
    """Return the state of the game in a few words, and their role."""
    if game.trouble:
        return game.trouble, "bad"
    if not game.size:
        return "downloading the version", "dim"
    if game.position.over:
        if not game.position.winner:
            return "a draw", "value"
        won = game.position.winner == game.mine
        return ("you have won", "good") if won else (f"version {game.version} has won", "warn")
    if game.thinking:
        return f"version {game.version} is thinking", "dim"
    return "your turn", "title"


def state_line(game: Game, cells: int, ellipsis: str) -> Line:
    """Return the row above the board, which is drawn also in the smallest terminal."""
    said, role = verdict(game)
    rest = f"   {STONES[game.mine][0]} against version {game.version}, {LEVELS[game.level]}"
    text = fit(f" {said}", cells, ellipsis)
    return ((text, role), (fit(rest if game.size else "", cells - len(text), ellipsis), "dim"))


def facts(game: Game, width: int, height: int) -> list[Line]:
    """Return the lines beside the board."""
    lines: list[Line] = []
    if game.trouble:
        lines += [*(((text, "bad"),) for text in wrap(game.trouble, width, 6)), ()]
    if not game.size:
        return lines
    mine, theirs = STONES[game.mine][0], STONES[-game.mine][0]
    newest = " (the newest)" if game.version == game.newest else f" of {game.newest}"
    rows = [
        ("you", f"{mine}, {'first' if game.mine == 1 else 'second'}"),
        ("against", f"{theirs}, version {game.version}{newest}"),
        ("level", f"{LEVELS[game.level]} (1 2 3)"),
        ("to win", f"{game.win} in a row"),
        ("moves", str(len(game.moves))),
    ]
    if game.value is not None:
        rows.append(("its guess", f"{50 + 50 * game.value:.0f} % for itself"))
    names = [cell_name(move, game.size) for move in game.moves[-MOVES_SHOWN:]]
    if names:
        rows.append(("last moves", " ".join(names)))
    lines += [((left(name, 12), "dim"), (value, "value")) for name, value in rows]
    return [*lines, *_hint(game)][:height]


def _hint(game: Game) -> list[Line]:
    if game.asking:
        return [(), (("the version is thinking", "dim"),)]
    if game.hint is None:
        choose = "arrow keys or mouse choose a field"
        return [] if game.moves or game.thinking else [(), ((choose, "dim"),)]
    heat = game.hint.heat
    best = sorted(range(len(heat)), key=lambda field: -heat[field])[:BEST]
    told = [f"{cell_name(field, game.size)} {100 * heat[field]:.0f} %" for field in best]
    return [
        (),
        (("it would play (digits: tenths)", "dim"),),
        *(((text, "mark"),) for text in told if not text.endswith(" 0 %")),
    ]
