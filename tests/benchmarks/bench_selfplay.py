"""Self-play beside what bounds it: the network alone, a search of one game at a time, and a learner
beside a bare loop.

    python -m tests.benchmarks.bench_selfplay --json selfplay.json
    python -m tests.benchmarks.bench_selfplay --pairs 3 --slice 1

"ours" is `slots` games on 15 x 15 that advance together, 100 simulations a move. "network" is the
same boards in the same batches through the same network, nothing else. "plain" searches one game at
a time with a node an object and a batch of one. All on one thread, taking turns; a ratio is the
median over pairs. Times are of the processor, which others may use as well. Games an hour are moves
an hour over the mean length of games of the same network, so that games that happen to be short do
not flatter; moves an hour stand beside them. A network of the reference's size, 12 x 152, stands
beside the games that the reference system tells of itself.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import torch

from shared.workloads.base import TrainSettings
from shared.workloads.gomoku.arena import Arena, GamePlan
from shared.workloads.gomoku.config import GomokuConfig
from shared.workloads.gomoku.network import NetEvaluator, build
from shared.workloads.gomoku.openings import drawn
from shared.workloads.gomoku.records import Manner
from shared.workloads.gomoku.rules import BoardRules, Boards, Position
from shared.workloads.gomoku.search import Evaluator, Floats, Search, SearchSettings
from shared.workloads.gomoku.train import Batches, losses, window
from shared.workloads.training.optimizer import InnerOptimizer
from tests.support.workloads.tiny_gomoku import WORKLOAD, Weights, Window, job, play, uniform

SIMULATIONS = 100
EQUAL = "12 x 152"  # 5.02 M parameters, as the reference's
# of the network's limit; times the plain one
GOALS = {"2 x 32": (0.7, 2.0), "4 x 64": (0.7, 1.4), EQUAL: (0.7, 1.0)}
EQUAL_SLOTS = 4
SIMULATED_GOAL = 30_000  # simulations a second without a network
LEARNER_GOAL = 0.95
REFERENCE = (20, 30)  # games an hour of a worker, as the reference system tells of itself
EQUAL_GOAL = 50  # games an hour of a core at its size


class Recorder:
    """Passes boards on, and keeps them."""

    def __init__(self, inner: Evaluator) -> None:
        self.batches: list[Boards] = []
        self._inner = inner

    def __call__(self, boards: Boards) -> tuple[Floats, Floats]:
        self.batches.append(boards)
        return self._inner(boards)


def arena(
    rules: BoardRules, player: Evaluator, slots: int, simulations: int = SIMULATIONS
) -> Arena:
    """Play games without end."""
    numbers = iter(range(1 << 30))
    manner = Manner(simulations=simulations, temperature_plies=12, noise=0.25)

    def following() -> GamePlan:
        number = next(numbers)
        opening = drawn(rules, number, 2)
        return GamePlan(game=number, seed=number, players=("one", "one"), opening=opening)

    return Arena(rules, manner, slots, {"one": player}, following)


# ------------------------------------------------------------------------------------------- plain


@dataclass
class Node:
    """A position as an object."""

    prior: float
    visits: int = 0
    total: float = 0.0
    children: dict[int, Node] = field(default_factory=dict)


def plain_move(position: Position, evaluator: Evaluator, simulations: int) -> int:
    """The most visited move after a search of this one game."""
    root = Node(0.0)
    expand(root, position, evaluator)
    for _ in range(simulations):
        node, here, path = root, Position(position.rules, position.moves), [root]
        while node.children:
            move, node = best(node)
            here.play(move)
            path.append(node)
        if here.over:
            value = -1.0 if here.winner else 0.0
        else:
            value = expand(node, here, evaluator)
        for seen in reversed(path):
            seen.visits += 1
            seen.total += value
            value = -value
    return max(root.children, key=lambda move: root.children[move].visits)


def best(node: Node) -> tuple[int, Node]:
    """Return the move with the largest Q + c P sqrt(N) / (1 + n); Q is its value for the mover."""
    reach = 1.5 * math.sqrt(node.visits + 1)

    def score(child: Node) -> float:
        mean = -child.total / child.visits if child.visits else 0.0
        return mean + reach * child.prior / (1 + child.visits)

    return max(node.children.items(), key=lambda item: score(item[1]))


def expand(node: Node, position: Position, evaluator: Evaluator) -> float:
    """Children of a leaf; the value of its position for whoever is to move."""
    board = position.board[:, :-1] * np.int8(position.player)
    logits, values = evaluator(board)
    free = np.flatnonzero(board[0] == 0)
    shares = np.exp(logits[0, free] - logits[0, free].max())
    shares /= shares.sum()
    node.children = {
        int(move): Node(float(share)) for move, share in zip(free, shares, strict=True)
    }
    return float(values[0])


class Plain:
    """One game after the other."""

    def __init__(self, rules: BoardRules, evaluator: Evaluator) -> None:
        self._rules, self._evaluator = rules, evaluator
        self._game = Position(rules)
        self.moves = 0

    def advance(self, limit_s: float) -> None:
        began = process_time()
        while process_time() - began < limit_s:
            self._game.play(plain_move(self._game, self._evaluator, SIMULATIONS))
            self.moves += 1
            if self._game.over:
                self._game = Position(self._rules)


# ---------------------------------------------------------------------------------------- measures


def timed(work: Callable[[], Any]) -> float:
    began = process_time()
    work()
    return process_time() - began


def move(games: Arena) -> int:
    """Make a move in every game; return how many were made."""
    plies = games.plies
    while games.plies == plies:
        games.advance(0.0)
    return games.plies - plies


def selfplay(name: str, length: float, options: argparse.Namespace) -> dict[str, Any]:
    """Self-play with a network of blocks x channels."""
    blocks, channels = map(int, name.split(" x "))
    config = GomokuConfig(size=15, win=5, blocks=blocks, channels=channels)
    weights = opinions(config)
    network = NetEvaluator(config, weights, "cpu")
    recorder = Recorder(network)
    games = arena(config.rules, recorder, EQUAL_SLOTS if name == EQUAL else options.slots)
    plain = Plain(config.rules, network)
    of_limit, times, rates = [], [], []
    for turn in range(options.pairs + 1):
        recorder.batches, made = [], games.plies
        ours = timed(lambda: move(games))
        made = games.plies - made
        batches = recorder.batches
        limit = timed(lambda: [network(batch) for batch in batches])  # noqa: B023 # used at once
        moves = plain.moves
        alone = timed(lambda: plain.advance(options.slice))
        if turn:  # the first pair warms up
            of_limit.append(limit / ours)
            rates.append(made / ours)
            times.append(rates[-1] * alone / (plain.moves - moves))
    moves_per_s = statistics.median(rates)
    goals = GOALS[name]
    ratio, more = statistics.median(of_limit), statistics.median(times)
    games_an_hour = round(3600 * moves_per_s / length, 1)
    beside = {} if name != EQUAL else {"reference": REFERENCE, "goal beside it": EQUAL_GOAL}
    return {
        "network": name,
        "games an hour": games_an_hour,
        **beside,
        "moves an hour": round(3600 * moves_per_s),
        "moves a game": round(length, 1),
        "simulations a second": round(moves_per_s * SIMULATIONS),
        "of the network's limit": round(ratio, 3),
        "goal": goals[0],
        "times the plain search": round(more, 2),
        "goal of that": goals[1],
        "reached": ratio >= goals[0]
        and more >= goals[1]
        and (name != EQUAL or games_an_hour >= EQUAL_GOAL),
    }


def opinions(config: GomokuConfig) -> Weights:
    """Weights of a network that prefers some moves: version 0 finds all equally good."""
    generator = torch.Generator().manual_seed(1)
    found = WORKLOAD.init(config.to_dict(), 0)
    for name in found:
        if name.endswith(("two.weight", "out.weight")):
            found[name] = torch.randn(found[name].shape, generator=generator) * 0.02
    return found


def mean_length() -> float:
    """Moves of a game, from quick games of the small network."""
    config = GomokuConfig(size=15, win=5)
    games = arena(config.rules, NetEvaluator(config, opinions(config), "cpu"), 16, simulations=4)
    lengths: list[int] = []
    while len(lengths) < 16:
        lengths += [len(played.moves) for played in games.advance(1.0)]
    return statistics.mean(lengths)


def simulated(options: argparse.Namespace) -> dict[str, Any]:
    """The search alone: an evaluator that costs nothing."""
    rules = BoardRules(15, 5)
    search = Search(rules, SearchSettings(simulations=SIMULATIONS), options.slots)
    boards = np.concatenate(
        [Position(rules, drawn(rules, seed, 8)).board for seed in range(options.slots)]
    )
    movers = np.array([1 if (board[:-1] != 0).sum() % 2 == 0 else -1 for board in boards], np.int8)

    def once() -> None:
        search.start(boards, movers)
        search.run(uniform)

    times = [timed(once) for _ in range(max(4, 4 * options.pairs))]
    rate = options.slots * SIMULATIONS / statistics.median(times[1:])
    return {
        "search without a network": f"{options.slots} games",
        "simulations a second": round(rate),
        "goal": SIMULATED_GOAL,
        "reached": rate >= SIMULATED_GOAL,
    }


def learner(options: argparse.Namespace) -> dict[str, Any]:
    """A learn task beside forward, backward, clip and step over the same batches."""
    with tempfile.TemporaryDirectory() as directory:
        board = WORKLOAD.config({"size": 15, "win": 5}, None)
        held = Window(Path(directory))
        held.seal(play(opinions(GomokuConfig.from_dict(board)), 8, Path(directory), model=board))
        train = TrainSettings(lr=1e-3, warmup_steps=0)
        task = job("learn", board, options.steps, train=train)
        weights = WORKLOAD.init(board, 0)
        ratios, rates = [], []
        for turn in range(options.pairs + 1):
            plain = timed(lambda: bare(task, held, weights))
            ours = timed(lambda: through(task, held, weights))
            if turn:
                ratios.append(plain / ours)
                rates.append((task.stop - task.start) / ours)
    ratio = statistics.median(ratios)
    return {
        "learner": f"batch {task.batch_size}, 2 x 32",
        "positions a second": round(statistics.median(rates)),
        "of a bare loop": round(ratio, 3),
        "goal": LEARNER_GOAL,
        "reached": ratio >= LEARNER_GOAL,
    }


def bare(task: Any, held: Window, weights: Weights) -> None:
    config = GomokuConfig.from_dict(task.config)
    batches = Batches(window(held, config), config.size, task)
    model = build(config, weights, "cpu").train()
    optimizer = InnerOptimizer(dict(model.named_parameters()), task.train)
    for step in range(task.steps):
        loss, _ = losses(model, *batches.read(step, 0, task.batch_size))
        torch.autograd.backward(loss)
        optimizer.step(task.train.lr)
        float(loss.detach())


def through(task: Any, held: Window, weights: Weights) -> None:
    work = WORKLOAD.begin(task, weights, held, "cpu")
    while not work.done:
        work.advance()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--slice", type=float, default=3.0, help="seconds of each turn")
    parser.add_argument("--slots", type=int, default=32, help="games together")
    parser.add_argument("--steps", type=int, default=20, help="of the learner")
    parser.add_argument("--network", choices=GOALS, help="only play with a network of this size")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    length = mean_length()
    rows: list[dict[str, Any]] = []
    measures: list[Callable[[argparse.Namespace], dict[str, Any]]] = [
        functools.partial(selfplay, name, length)
        for name in GOALS
        if options.network in (None, name)
    ]
    if options.network is None:
        measures = [simulated, *measures, learner]
    for measure in measures:
        rows.append(measure(options))
        lines = [f"{name:30} {value}" for name, value in rows[-1].items()]
        print("\n".join(lines), end="\n\n", flush=True)
    if options.json:
        options.json.write_text(json.dumps({"rows": rows}, indent=1))


if __name__ == "__main__":
    main()
