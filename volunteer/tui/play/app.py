"""`volunteer play`: a game against a version of a run.

The screen never computes moves; the opponent does, on a thread of its own.
"""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from msgspec.structs import replace
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.filter import LineFilter
from typing_extensions import override

from shared.errors import VolunteerError
from shared.workloads.games import LEVELS, BoardAnalysis, MoveReply
from volunteer.i18n.catalogue import _, translated
from volunteer.tui import keys, themes
from volunteer.tui.app import HEIGHTS, WIDTHS
from volunteer.tui.app_exit import handle_end_signals
from volunteer.tui.appearance import Look, apply_theme
from volunteer.tui.play.game import ACTIONS, Game, fact_lines, state_line
from volunteer.tui.terminal.ascii import AsciiFilter
from volunteer.tui.terminal.driver import lasting_driver
from volunteer.tui.text import ASCII, UNICODE, Glyphs, Line
from volunteer.tui.widgets.bars import Bar, key_line
from volunteer.tui.widgets.board import Board, BoardState, width_of
from volunteer.tui.widgets.panel import Panel, Scene, panels

if TYPE_CHECKING:
    from volunteer.opponent import SeatedOpponent


class GameOpponent(Protocol):
    """Interface of an opponent, which `volunteer.opponent.VersionOpponent` implements."""

    async def sit(self, version: int | None = None) -> SeatedOpponent: ...

    def look(self, moves: Sequence[int]) -> BoardAnalysis: ...

    async def reply(self, moves: Sequence[int], level: int) -> MoveReply: ...


class GameBar(Bar):
    """Row with the state of the game."""

    game = Game()

    @override
    def lines(self, scene: Scene, width: int, height: int) -> Sequence[Line]:
        return (state_line(self.game, width, scene.glyphs.ellipsis),)


class GameFacts(Panel):
    """Facts of a game next to the board: version, level, moves, hint."""

    game = Game()

    @override
    def lines(self, scene: Scene, width: int, height: int) -> Sequence[Line]:
        return fact_lines(self.game, width, height)

    @override
    def heading(self, scene: Scene) -> tuple[str, str]:
        return self.game.run, ""


class GameKeys(Bar):
    """Footer with the keys of the game."""

    @override
    def lines(self, scene: Scene, width: int, height: int) -> Sequence[Line]:
        line, self.hits = key_line(scene, width, ACTIONS)
        return (line,)


class PlayApp(App[int]):
    """Terminal application for playing against a version."""

    TITLE = "volunteer"
    CSS_PATH = "../app.tcss"
    CSS = """
    #game { height: 1fr; }
    #facts { width: 1fr; min-width: 30; }
    .-tiny #facts, .-narrow #facts { display: none; }
    .-flat #state, .-flat #keys, .-low #keys { display: none; }
    """
    ENABLE_COMMAND_PALETTE = False
    HORIZONTAL_BREAKPOINTS = WIDTHS
    VERTICAL_BREAKPOINTS = HEIGHTS
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(c.key, c.action, c.short, show=False) for c in ACTIONS),
        Binding("up,k", "move(-1,0)", "up", show=False),
        Binding("down,j", "move(1,0)", "down", show=False),
        Binding("left,h", "move(0,-1)", "left", show=False),
        Binding("right", "move(0,1)", "right", show=False),
        *(Binding(str(n + 1), f"level({n})", word, show=False) for n, word in enumerate(LEVELS)),
        Binding("escape,ctrl+q,ctrl+c", "leave", "quit", show=False),
    ]

    def __init__(
        self,
        opponent: GameOpponent,
        run: str,
        *,
        version: int | None = None,
        level: int = 1,
        look: Look | None = None,
    ) -> None:
        super().__init__(driver_class=lasting_driver())
        look = look or Look()
        self.game = Game(run=run, level=level)
        self.glyphs: Glyphs = ASCII if look.ascii else UNICODE
        self._opponent = opponent
        self._version = version
        self._cursor = 0
        self._requests = 0  # number of the newest request; replies to older requests are dropped
        self._ascii = AsciiFilter(enabled=look.ascii)
        apply_theme(self, look)
        self.set_class(look.ascii, "-ascii")

    @override
    def compose(self) -> ComposeResult:
        yield GameBar(id="state")
        with Horizontal(id="game"):
            yield Board()
            yield GameFacts(id="facts", classes="card")
        yield GameKeys(id="keys")

    def on_mount(self) -> None:
        handle_end_signals(self.action_leave, self.action_leave)
        self.call_after_refresh(self._draw)
        self._run(self._sit(self._version))

    @override
    def get_theme_variable_defaults(self) -> dict[str, str]:
        return themes.DARK if self.current_theme.dark else themes.LIGHT

    @override
    def get_line_filters(self) -> Sequence[LineFilter]:
        filters = super().get_line_filters()
        return [*filters, self._ascii] if self._ascii.enabled else filters

    # --------------------------------------------------------------------------- the game

    async def _sit(self, version: int | None) -> None:
        """Load a version as opponent; the game continues if the version plays by the same rules."""
        seated = await self._opponent.sit(version)
        same = (seated.size, seated.win) == (self.game.size, self.game.win)
        self.game = replace(
            self.game,
            version=seated.version,
            newest=seated.newest,
            size=seated.size,
            win=seated.win,
            value=None,
        )
        self.query_one(Board).styles.width = width_of(seated.size)
        if same:
            self._request_move()
        else:
            self._begin(self.game.mine)

    def _begin(self, colour: int) -> None:
        """Start a new game."""
        self._requests += 1
        self._cursor = self.game.size * (self.game.size // 2) + self.game.size // 2
        self.game = replace(self.game, mine=colour, value=None, thinking=False)
        self._place(())

    def _place(self, moves: tuple[int, ...]) -> None:
        """Set the position after the legal `moves`."""
        position = self._opponent.look(moves)
        self.game = replace(self.game, moves=moves, position=position, trouble="")
        self._request_move()

    def _request_move(self) -> None:
        """Request a move if it is the opponent's turn, and draw."""
        game = self.game
        if game.size and not game.position.over and not game.my_turn:
            self.game = replace(game, thinking=True)
            self._requests += 1
            self._run(self._play_reply(self._requests))
        self._draw()

    async def _play_reply(self, request: int) -> None:
        reply = await self._opponent.reply(self.game.moves, self.game.level)
        if request == self._requests:
            self.game = replace(self.game, value=reply.value, thinking=False)
            self._place((*self.game.moves, reply.move))

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run the newest call of the opponent. A VolunteerError is shown as a sentence and leaves
        the game unchanged; that of an outdated call is dropped.
        """
        request = self._requests

        async def run_and_report() -> None:
            try:
                await work
            except VolunteerError as error:
                if request == self._requests:
                    trouble = translated(error.message)
                    self.game = replace(self.game, trouble=trouble, thinking=False)
                    self._draw()

        self.run_worker(run_and_report(), group="game", exit_on_error=True)

    def _draw(self) -> None:
        """Redraw all panels, which are small."""
        game, scene = self.game, Scene(glyphs=self.glyphs)
        self.query_one(GameBar).game = self.query_one(GameFacts).game = game
        board = self.query_one(Board)
        board.state = BoardState(
            size=game.size,
            stones=game.position.board,
            cursor=self._cursor,
            last=game.moves[-1] if game.moves else -1,
            row=game.position.row,
        )
        for panel in panels(self.screen):
            panel.show(scene, at_once=True)

    # --------------------------------------------------------------------------- actions

    def on_board_chosen(self, event: Board.Chosen) -> None:
        self._cursor = event.field
        self.action_lay()

    def action_move(self, down: int, right: int) -> None:
        """Move the cursor to another field."""
        size = self.game.size
        if size:
            row, column = divmod(self._cursor, size)
            self._cursor = (row + down) % size * size + (column + right) % size
            self._draw()

    def action_lay(self) -> None:
        """Place a stone on the field under the cursor."""
        game = self.game
        if game.my_turn and not game.thinking and not game.position.board[self._cursor]:
            self._requests += 1
            self._place((*game.moves, self._cursor))
        else:
            self._draw()

    def action_take_back(self) -> None:
        """Take back the user's last stone and the moves after it."""
        moves = self.game.moves
        moves_of_person = [n for n in range(len(moves)) if (n % 2 == 0) == (self.game.mine == 1)]
        if moves_of_person:
            self._requests += 1
            self.game = replace(self.game, thinking=False, value=None)
            self._place(moves[: moves_of_person[-1]])

    def action_new(self) -> None:
        """Start a new game."""
        if self.game.size:
            self._begin(self.game.mine)

    def action_colour(self) -> None:
        """Start a new game with the other stones."""
        if self.game.size:
            self._begin(-self.game.mine)

    def action_level(self, level: int | None = None) -> None:
        """Set the opponent's search depth, from its next move on."""
        next_level = (self.game.level + 1) % len(LEVELS) if level is None else level
        self.game = replace(self.game, level=next_level)
        self._draw()

    def action_version(self, by: int) -> None:
        """Continue the game against a neighbouring version."""
        version = self.game.version + by
        if self.game.size and not self.game.thinking and 0 <= version <= self.game.newest:
            self._requests += 1
            self.game = replace(self.game, trouble="")
            self._run(self._sit(version))

    def action_help(self) -> None:
        """Show the help of the keys, until the next key."""
        sentences = [f"{keys.key_name(command.key)}  {_(command.help)}" for command in ACTIONS]
        self.clear_notifications()
        self.notify("\n".join([_("The arrow keys move."), *sentences]), timeout=30, markup=False)

    def action_leave(self) -> None:
        self.exit(0)
