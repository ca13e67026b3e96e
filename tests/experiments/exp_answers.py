"""Tell answers of a version from those of another: tokens drawn by the seed are compared.

    make experiments EXPERIMENT=answers

One small model learns from the standard library; then machines answer with its weights in other
arithmetic, with an earlier version, with another seed, and with tokens that are merely likely.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from shared.workloads.base import Job, TrainSettings, load
from shared.workloads.generation.batch import Batch
from shared.workloads.generation.batch import Sequence as Wanted
from shared.workloads.generation.sampling import agrees, uniform
from shared.workloads.gpt.config import GptConfig
from shared.workloads.gpt.decoder import GptDecoder
from tests.experiments.cells import Row, arguments, results, work_off
from tests.experiments.learning import PROBE, corpus, local

WORKLOAD = load("gpt")
STEPS = (300, 330)  # of the earlier version, and of the one that is asked
ANSWERS, TOKENS = 40, 48
Weights = Mapping[str, torch.Tensor]
HOW: dict[str, dict[str, Any]] = {
    "temperature 1": {"temperature": 1.0},
    "temperature 0.7, top_p 0.9": {"temperature": 0.7, "top_p": 0.9},
    "greedy": {"temperature": 0.0},
}


def trained(out: Path) -> tuple[GptConfig, Weights, Weights]:
    """Return the config, an earlier version, and the version that answers."""
    dataset = corpus(out.parent)
    config = WORKLOAD.config(PROBE, dataset[0])
    data = local(dataset, dataset[0].chunks)
    found, weights = [], WORKLOAD.init(config, 1)
    for steps in STEPS:
        job = Job(
            run="r",
            workload="gpt",
            kind="train",
            update="delta",
            config=config,
            train=TrainSettings(lr=1e-3, warmup_steps=40),
            order_seed=1,
            start=0,
            stop=steps * 16,
            seed=1,
            steps=steps,
            batch_size=16,
            global_step=0,
            total_steps=STEPS[-1],
        )
        work = WORKLOAD.begin(job, weights, data, "cpu")
        while not work.done:
            work.advance()
        found.append(work.result()[1])
    return GptConfig.from_dict(config), found[0], found[1]


def answers(
    config: GptConfig, weights: Weights, how: Mapping[str, Any], shift: int = 0, slots: int = 1
) -> list[tuple[int, tuple[int, ...], list[int]]]:
    """(seed, prompt, tokens) of some answers."""
    batch = Batch(GptDecoder(config, weights, None, slots, "cpu"))
    asked = {}
    for number in range(ANSWERS):
        prompt = tuple(b"def __init__(self, name%d" % number)[: config.block_size // 4]
        asked[str(number)] = prompt
        batch.add(
            Wanted(id=str(number), prompt=prompt, max_tokens=TOKENS, seed=number + shift, **how)
        )
    made: dict[str, list[int]] = {name: [] for name in asked}
    while len(batch):
        for each in batch.step():
            if each.chosen is not None:
                made[each.id].append(each.chosen.token)
    return [(int(name), asked[name], tokens) for name, tokens in made.items()]


def wrong_share(
    config: GptConfig,
    weights: Weights,
    how: Mapping[str, Any],
    given: Sequence[tuple[int, tuple[int, ...], list[int]]],
) -> tuple[int, int, int]:
    """Tokens compared, wrong ones, and answers that three or more wrong ones give away."""
    decoder = GptDecoder(config, weights, None, 1, "cpu")
    looked = wrong = caught = 0
    for seed, prompt, tokens in given:
        places = [len(prompt) + index - 1 for index in range(len(tokens))]
        rows = decoder.scores([*prompt, *tokens][:-1], places)
        bad = sum(
            not agrees(row, uniform(seed, index), token, **how)
            for index, (row, token) in enumerate(zip(rows, tokens, strict=True))
        )
        looked, wrong = looked + len(tokens), wrong + bad
        caught += bad >= 3 and bad > 0.05 * len(tokens)
    return looked, wrong, caught


def rounded(weights: Weights) -> Weights:
    """The weights as bfloat16 holds them: coarser than any arithmetic that computes with them."""
    return {name: value.bfloat16().float() for name, value in weights.items()}


def main() -> None:
    options = arguments(__doc__ or "")
    torch.manual_seed(0)
    config, before, asked = trained(options.out)
    noise = {
        name: value + 0.02 * value.std() * torch.randn_like(value) for name, value in asked.items()
    }
    machines: dict[str, Any] = {
        "honest, alone": lambda how: answers(config, asked, how),
        "honest, in a batch": lambda how: answers(config, asked, how, slots=16),
        "honest, weights in bfloat16": lambda how: answers(config, rounded(asked), how),
        "weights with 2 % of noise": lambda how: answers(config, noise, how),
        "30 steps earlier": lambda how: answers(config, before, how),
        "another seed": lambda how: answers(config, asked, how, shift=1000),
        "greedy instead": lambda how: answers(config, asked, {"temperature": 0.0}),
    }

    def work(cell: tuple[str, str]) -> Row:
        machine, name = cell
        looked, wrong, caught = wrong_share(config, asked, HOW[name], machines[machine](HOW[name]))
        return {
            "wrong": round(wrong / max(1, looked), 4),
            "tokens": looked,
            "caught": caught,
            "answers": ANSWERS,
        }

    cells = {f"{machine}, {name}": (machine, name) for name in HOW for machine in machines}
    work_off(options, cells, work)
    print(results(options))


if __name__ == "__main__":
    main()
