"""Games of gomoku for the coordinator and people: pacing, inspection, sealing, play."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from shared.tensors.frame import torch_tensors
from shared.workloads.base import Config, Job, Weights
from shared.workloads.elo import MatchScore
from shared.workloads.experience import EpisodeChunk, Inspection, KnownVersion, Pacing
from shared.workloads.games import Games, Opponent
from shared.workloads.gomoku.config import GomokuConfig, GomokuOptions, forward_flops, schema
from shared.workloads.gomoku.records import InvalidGame, decode, encode, score
from shared.workloads.gomoku.verification import Bench, examine, numbering

if TYPE_CHECKING:
    from shared.workloads.gomoku.network import NetEvaluator

_FILLED = (
    1 / 4
)  # typical share of cells with a stone at a game's end, for the first estimate of its cost


class GomokuGames(Games):
    """Games of Gomoku; see `Games`."""

    @override
    def plan(self, config: Config, options: Mapping[str, object]) -> Pacing:
        checked, how = GomokuConfig.from_dict(config), GomokuOptions.from_dict(options)
        one = forward_flops(checked)
        return Pacing(
            replay=how,
            match_games=how.match_games,
            match_every=how.match_every,
            episodes=how.games,
            episode_flops=one * how.simulations * max(2 * checked.win, checked.cells * _FILLED),
            evaluation_flops=one,
        )

    @override
    def inspect(
        self,
        job: Job,
        data: bytes,
        versions: Sequence[KnownVersion],
        file: Callable[[int | str], Path],
        secret: int,
        *,
        whole: bool = False,
    ) -> Inspection:
        """Inspect a file of games; see `Experience.inspect`. Valid games among invalid ones are
        kept.
        """
        config, how = GomokuConfig.from_dict(job.config), GomokuOptions.from_dict(job.options)
        match = job.kind == "evaluate"
        try:
            records = decode(data)
        except InvalidGame as error:
            return Inspection(refused=job.stop - job.start, complaint=error.message)
        bench = Bench(
            rules=config.rules,
            manner=how.match_manner() if match else how.manner(),
            hashes={version.number: version.sha256 for version in versions},
            player=_players(config, file),
            seed=secret,
            share=1.0 if whole else how.match_replay if match else 0.0,
        )
        wrong = numbering(records, job, match=match)
        sound = [place for place in range(len(records)) if place not in wrong]
        complaints = examine([records[place] for place in sound], bench)
        wrong |= {sound[at]: complaint for at, complaint in complaints.items()}
        kept_records = [record for place, record in enumerate(records) if place not in wrong]
        searched = sum(len(record.visits) for record in kept_records)
        match_score = score(kept_records) if match else MatchScore()
        return Inspection(
            data=encode(kept_records) if kept_records else b"",
            episodes=len(kept_records),
            samples=searched,
            evaluations=searched * (bench.manner.simulations + 1),
            refused=len(wrong),
            complaint=next(iter(wrong.values()), ""),
            wins=match_score.wins,
            draws=match_score.draws,
            losses=match_score.losses,
        )

    @override
    def seal(self, files: Sequence[bytes]) -> EpisodeChunk:
        records = [record for data in files for record in decode(data)]
        positions = sum(len(record.visits) for record in records)
        return EpisodeChunk(data=encode(records), samples=positions)

    @override
    def opponent(self, config: Config, weights: Weights) -> Opponent:
        from shared.workloads.gomoku.network_opponent import GomokuOpponent

        return GomokuOpponent(GomokuConfig.from_dict(config), weights)

    @override
    def rules(self, config: Config) -> tuple[int, int]:
        checked = GomokuConfig.from_dict(config)
        return checked.size, checked.win


def _players(config: GomokuConfig, weights: Callable[[int], Path]) -> Callable[[int], NetEvaluator]:
    """Return networks by version, each loaded on first use."""
    from shared.workloads.gomoku.network import NetEvaluator

    loaded: dict[int, NetEvaluator] = {}

    def player(number: int) -> NetEvaluator:
        if number not in loaded:
            tensors = torch_tensors(weights(number), schema(config))
            loaded[number] = NetEvaluator(config, tensors, "cpu")
        return loaded[number]

    return player
