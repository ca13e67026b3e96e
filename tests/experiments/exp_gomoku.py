"""A player of 6 x 6, four in a row, taught from nothing by games against itself.

    make experiments EXPERIMENT=gomoku python -m tests.experiments.exp_gomoku --out
    build/experiments/exp_gomoku --recipe '{"rounds": 20}'

Each round plays a task of self-play, learns from the window of the newest games and is written
down, so that a run that was stopped goes on where it was. At the end the last version meets version
0, with both colours of fixed openings, and is asked for the one move that wins or blocks in
positions it has never seen, without any search.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from time import process_time

import msgspec
import torch
from safetensors.torch import load_file, save_file
from typing_extensions import override

from shared.errors import NotFound
from shared.workloads.base import ChunkRef, Data, DatasetManifest, TrainSettings
from shared.workloads.elo import MatchScore
from shared.workloads.gomoku.config import GomokuConfig
from shared.workloads.gomoku.network import NetEvaluator
from shared.workloads.gomoku.records import decode, score
from shared.workloads.gomoku.tactics import EACH, KINDS
from shared.workloads.gomoku.tactics import score as tactics
from tests.support.workloads.tiny_gomoku import WORKLOAD, Window, finish, job

BOARD = {"size": 6, "win": 4}
STATE = "state.json"
MATCH_GAMES = 100
POSITIONS = 256  # of each kind that the last version is asked for
AGAINST_FIRST, SEEN = 0.90, 0.90  # goals: share of the points, share of the positions


class Recipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the training, stored with the state: a run resumes only with the same ones."""

    blocks: int = 3
    channels: int = 32
    rounds: int = 60
    games: int = 256  # a round
    simulations: int = 64
    # random moves before the first search: positions that nobody would choose
    opening_plies: int = 10
    temperature_plies: int = 8
    noise: float = 0.25
    window: int = 16  # newest rounds that are learnt from
    reuse: float = 10.0  # how often a position is learnt from
    batch: int = 128
    lr: float = 4e-3
    weight_decay: float = 1e-3
    seed: int = 1


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a round."""

    games: int
    positions: int
    steps: int  # of learning, since the beginning
    loss: float
    seen: dict[str, float]  # of each kind of the suite, the share that the raw policy gets right
    cpu_s: float


class State(msgspec.Struct, frozen=True, kw_only=True):
    recipe: Recipe
    rounds: tuple[Round, ...] = ()


class Replay(Data):
    """The newest rounds of games, as a learn task reads them."""

    def __init__(self, files: Sequence[tuple[Path, int]]) -> None:
        self._files = [path for path, _ in files]
        self.manifest = DatasetManifest(
            name="replay",
            kind="experience",
            licence="",
            source="self-play",
            chunks=tuple(ChunkRef(sha256="", size=0, items=games) for _, games in files),
        )

    @override
    def chunk(self, index: int) -> Path:
        return self._files[index]

    @override
    def asset(self, name: str) -> Path:
        raise NotFound(name)


class Experiment:
    """The run of one directory."""

    def __init__(self, directory: Path, recipe: Recipe) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        shape = {"blocks": recipe.blocks, "channels": recipe.channels}
        self._model = WORKLOAD.config({**BOARD, **shape}, None)
        self._config = GomokuConfig.from_dict(self._model)
        self._options = WORKLOAD.options(
            {
                "simulations": recipe.simulations,
                "slots": recipe.games,
                "opening_plies": recipe.opening_plies,
                "temperature_plies": recipe.temperature_plies,
                "noise": recipe.noise,
                "match_simulations": recipe.simulations,
            }
        )
        self.recipe = recipe
        self.rounds: tuple[Round, ...] = ()
        self._first = self._weights = WORKLOAD.init(self._model, recipe.seed)
        if (directory / STATE).exists():
            self._load()

    def advance(self) -> Round:
        """Play and learn one more round, which is stored when this returns."""
        began, turn = process_time(), len(self.rounds)
        played = self._play(turn)
        self._games(turn).write_bytes(played)
        records = decode(played)
        positions = sum(len(record.visits) for record in records)
        loss, steps = self._learn(turn, len(records), positions)
        found = self.seen(EACH)
        made = Round(
            games=len(records),
            positions=positions,
            steps=steps,
            loss=loss,
            seen={kind: found[f"tactics_{kind}"] for kind in KINDS},
            cpu_s=process_time() - began,
        )
        self._save(made)
        return made

    def seen(self, each: int) -> dict[str, float]:
        """What the raw policy sees of positions with known answers, `each` of every kind."""
        evaluator = NetEvaluator(self._config, self._weights, "cpu")
        return tactics(self._config.rules, evaluator, each)

    def match(self) -> MatchScore:
        """Play the last version against version 0."""
        with TemporaryDirectory() as path:
            window = Window(Path(path), opponent=self._first)
            task = job("evaluate", self._model, MATCH_GAMES, options=self._options)
            work = WORKLOAD.begin(task, self._weights, window, "cpu")
            return score(decode(finish(work)[0].experience))

    def _play(self, turn: int) -> bytes:
        task = job("selfplay", self._model, self.recipe.games, options=self._options)
        task = msgspec.structs.replace(task, seed=1000 * self.recipe.seed + turn)
        return finish(WORKLOAD.begin(task, self._weights, Replay([]), "cpu"))[0].experience

    def _learn(self, turn: int, games: int, positions: int) -> tuple[float, int]:
        """Learn from the games; return the loss at the end of the round, and the steps so far."""
        recipe = self.recipe
        before = self.rounds[-1].steps if self.rounds else 0
        steps = max(1, round(recipe.reuse * positions / recipe.batch))
        held = [*(one.games for one in self.rounds), games]
        newest = range(max(0, turn + 1 - recipe.window), turn + 1)
        train = TrainSettings(
            lr=recipe.lr,
            warmup_steps=50,
            decay_steps=before + steps * (recipe.rounds - turn),
            min_lr_ratio=0.03,
            beta2=0.99,
            weight_decay=recipe.weight_decay,
        )
        task = job("learn", self._model, 1, seed=turn, train=train, global_step=before)
        task = msgspec.structs.replace(
            task, batch_size=recipe.batch, steps=steps, stop=steps * recipe.batch
        )
        replay = Replay([(self._games(number), held[number]) for number in newest])
        work = WORKLOAD.begin(task, self._weights, replay, "cpu")
        report, self._weights = finish(work)
        return report.loss_last or 0.0, before + steps

    # --- on the disk ---

    def _games(self, turn: int) -> Path:
        return self._directory / f"games-{turn:03d}"

    def _file(self, rounds: int) -> Path:
        return self._directory / f"after-{rounds:03d}.safetensors"

    def _save(self, made: Round) -> None:
        """Store the tensors, then the state, which names only stored tensors."""
        rounds = (*self.rounds, made)
        tensors = {f"weights/{name}": value for name, value in self._weights.items()}
        save_file(tensors, self._file(len(rounds)))
        state = msgspec.json.encode(State(recipe=self.recipe, rounds=rounds))
        draft = self._directory / f"{STATE}.new"
        draft.write_bytes(msgspec.json.format(state))
        draft.replace(self._directory / STATE)
        self._file(len(self.rounds)).unlink(missing_ok=True)
        self.rounds = rounds

    def _load(self) -> None:
        state = msgspec.json.decode((self._directory / STATE).read_bytes(), type=State)
        if state.recipe != self.recipe:
            sys.exit(
                f"{self._directory} holds a run with another recipe: choose another --out, or"
                f" --recipe '{msgspec.json.encode(state.recipe).decode()}'"
            )
        self.rounds = state.rounds
        held = load_file(self._file(len(state.rounds)))
        self._weights = {name[8:]: w for name, w in held.items() if name.startswith("weights/")}


def line(number: int, made: Round) -> str:
    seen = "  ".join(f"{kind} {100 * share:3.0f} %" for kind, share in made.seen.items())
    return (
        f"{number:3d}  {made.games:4d} games {made.positions:6d} positions  step {made.steps:6d}"
        f"  loss {made.loss:.3f}  {seen}  {made.cpu_s:.0f} s CPU"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--recipe", default="{}", help="JSON: what differs from the usual one")
    options = parser.parse_args()
    recipe = msgspec.json.decode(options.recipe, type=Recipe)
    torch.set_num_threads(1)
    run = Experiment(options.out, recipe)
    for number, made in enumerate(run.rounds, 1):
        print(line(number, made))
    while len(run.rounds) < recipe.rounds:
        made = run.advance()
        print(line(len(run.rounds), made), flush=True)
    found, seen = run.match(), run.seen(POSITIONS)
    print(
        f"against version 0: {found.wins} won, {found.draws} drawn, {found.losses} lost:"
        f" {100 * found.points:.0f} % (goal {100 * AGAINST_FIRST:.0f})"
    )
    print(
        f"raw policy, {POSITIONS} positions of each kind: win {100 * seen['tactics_win']:.1f} %,"
        f" block {100 * seen['tactics_block']:.1f} % (goal {100 * SEEN:.0f})"
    )
    reached = (
        found.points >= AGAINST_FIRST and min(seen["tactics_win"], seen["tactics_block"]) >= SEEN
    )
    sys.exit(0 if reached else 1)


if __name__ == "__main__":
    main()
