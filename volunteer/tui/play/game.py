"""State of a game against a version, its lines of facts, and its keys. Pure."""

from __future__ import annotations

import msgspec

from shared.workloads.games import BoardAnalysis, cell_name
from volunteer.i18n.catalogue import N_, _, number, pgettext
from volunteer.tui.keys import KeyCommand
from volunteer.tui.text import Line, fit, left, paragraph
from volunteer.tui.widgets.board import STONES

MOVES_SHOWN = 6
LEVEL_WORDS = (N_("easy"), N_("middle"), N_("hard"))  # words for `LEVELS`
EMPTY = BoardAnalysis(board=(), over=False)


class Game(msgspec.Struct, frozen=True, kw_only=True):
    """State of a game, from which everything is drawn; `size` 0: no version downloaded yet."""

    run: str = ""
    version: int = 0
    newest: int = 0
    size: int = 0
    win: int = 0
    moves: tuple[int, ...] = ()
    mine: int = 1  # 1 = the person has the first stones, -1 = the second
    level: int = 1
    position: BoardAnalysis = EMPTY
    thinking: bool = False
    value: float | None = None  # the version's own estimate of its last position, -1 to 1
    trouble: str = ""

    @property
    def turn(self) -> int:
        return 1 if len(self.moves) % 2 == 0 else -1

    @property
    def my_turn(self) -> bool:
        return bool(self.size) and not self.position.over and self.turn == self.mine


ACTIONS = (
    KeyCommand(
        key="enter,space",
        action="lay",
        short=N_("lay"),
        help=N_("Lay a stone."),
        rank=50,
    ),
    KeyCommand(
        key="u,backspace",
        action="take_back",
        short=N_("back"),
        help=N_("Take my last stone back."),
        rank=20,
    ),
    KeyCommand(
        key="n",
        action="new",
        short=N_("new"),
        help=N_("A new game."),
        rank=30,
    ),
    KeyCommand(
        key="c",
        action="colour",
        short=N_("swap"),
        help=N_("A new game with the other stones."),
        rank=40,
    ),
    KeyCommand(
        key="l",
        action="level",
        short=N_("level"),
        help=N_("Easy, middle, hard: 1, 2, 3, or the next one."),
        rank=45,
    ),
    KeyCommand(
        key="left_square_bracket,minus",
        action="version(-1)",
        short=N_("older"),
        help=N_("Against the version before."),
        rank=60,
    ),
    KeyCommand(
        key="right_square_bracket,plus",
        action="version(1)",
        short=N_("newer"),
        help=N_("Against the version after."),
        rank=61,
    ),
    KeyCommand(
        key="question_mark,f1",
        action="help",
        short=N_("help"),
        help=N_("What the keys do."),
        rank=15,
    ),
    KeyCommand(key="q", action="leave", short=N_("quit"), help=N_("Leave."), rank=50),
)


def state_words(game: Game) -> tuple[str, str]:
    """Return the state of the game in a few words, and the role that colours them."""
    if game.trouble:
        return game.trouble, "bad"
    if not game.size:
        return _("downloading the version"), "dim"
    if game.position.over:
        if not game.position.winner:
            return _("a draw"), "value"
        won = game.position.winner == game.mine
        return (
            (_("you have won"), "good")
            if won
            else (_("version {version} has won", version=game.version), "warn")
        )
    if game.thinking:
        return _("version {version} is thinking", version=game.version), "dim"
    return _("your turn"), "title"


def state_line(game: Game, cells: int, ellipsis: str) -> Line:
    """Return the row above the board, which even the smallest terminal shows."""
    sentence, role = state_words(game)
    opponent_words = "   " + _(
        "{stones} against version {version}, {level}",
        stones=STONES[game.mine][0],
        version=game.version,
        level=_(LEVEL_WORDS[game.level]),
    )
    text = fit(f" {sentence}", cells, ellipsis)
    return (
        (text, role),
        (fit(opponent_words if game.size else "", cells - len(text), ellipsis), "dim"),
    )


def fact_lines(game: Game, width: int, height: int) -> list[Line]:
    """Return the facts of a game as lines."""
    lines: list[Line] = []
    if game.trouble:
        lines += [*paragraph(game.trouble, width, 6, "bad"), ()]
    if not game.size:
        return lines
    stone, other_stone = STONES[game.mine][0], STONES[-game.mine][0]
    order = pgettext("player", "first") if game.mine == 1 else pgettext("player", "second")
    newest = (
        " " + _("(the newest)")
        if game.version == game.newest
        else " " + _("of {newest}", newest=game.newest)
    )
    rows = [
        (_("you"), f"{stone}, {order}"),
        (
            _("against"),
            _(
                "{theirs}, version {version}{newest}",
                theirs=other_stone,
                version=game.version,
                newest=newest,
            ),
        ),
        (_("level"), f"{_(LEVEL_WORDS[game.level])} (1 2 3)"),
        (_("to win"), _("{win} in a row", win=game.win)),
        (_("moves"), str(len(game.moves))),
    ]
    if game.value is not None:
        rows.append(
            (
                _("its guess"),
                _("{percent} % for itself", percent=number(50 + 50 * game.value, ".0f")),
            )
        )
    names = [cell_name(move, game.size) for move in game.moves[-MOVES_SHOWN:]]
    if names:
        rows.append((_("last moves"), " ".join(names)))
    lines += [((left(name, 12), "dim"), (value, "value")) for name, value in rows]
    if not game.moves and not game.thinking:
        lines += [(), ((_("arrow keys or mouse choose a field"), "dim"),)]
    return lines[:height]
