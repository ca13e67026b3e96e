"""Rollouts beside what bounds them: an actor beside the bare engine, and what the judge spends on a
file of answers beside what its actor spent.

    python -m tests.benchmarks.bench_rollouts --json rollouts.json
    python -m tests.benchmarks.bench_rollouts --pairs 3 --problems 8

The models are those of the demo and of the recipe `reason`, with fresh weights, whose answers are
the longest. "engine" is the same answers in the same batches without groups, records and rewards.
The judge reads some answers of each group again, or all of a drawn file. All on one thread, taking
turns; a ratio is the median over pairs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import tomllib
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from time import process_time
from typing import Any

import torch
from safetensors.torch import save_file

from shared.workloads.base import Job, Result, Weights
from shared.workloads.experience import Inspection, KnownVersion
from shared.workloads.generation.batch import Batch, Sequence
from shared.workloads.rollouts.answer_policy import ByteDecoder
from shared.workloads.rollouts.config import Problems, RolloutsConfig, answer_seed
from shared.workloads.rollouts.problems import encoded
from tests.support.workloads.tiny_rollouts import SHA256, WORKLOAD, Window, finish, job

GOAL = 0.9  # of the engine's rate
RUNS = {
    "demo": ("coordinator.demo", "files/rollouts"),
    "reason": ("coordinator.runs", "recipes/reason"),
}


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds of its core that work takes, and its result."""
    began = process_time()
    found = work()
    return process_time() - began, found


def engine(task: Job, weights: Weights) -> int:
    """Write the answers of a task, nothing else; return how many tokens they have."""
    config = RolloutsConfig.from_dict(task.config)
    problems, group, slots = Problems(config), task.options["group"], task.options["slots"]
    batch = Batch(ByteDecoder(config, weights, slots, "cpu"))
    waiting = list(range(task.start, task.stop))[::-1]
    tokens = 0
    while waiting or len(batch):
        while waiting and len(batch) < slots:
            number = waiting.pop()
            prompt = tuple(encoded(problems.get(number).prompt))
            for sample in range(group):
                batch.add(
                    Sequence(
                        id=f"{number}/{sample}",
                        prompt=prompt,
                        max_tokens=config.answer,
                        seed=answer_seed(task.seed, number, sample),
                        logprobs=0,
                    )
                )
        tokens += sum(1 for _ in batch.step())
    return tokens


def measure(name: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    package, path = RUNS[name]
    table = tomllib.loads((files(package) / f"{path}.toml").read_text(encoding="utf-8"))
    config = WORKLOAD.config(table["model"], None)
    weights, held = WORKLOAD.init(config, 1), Window(folder)
    how = WORKLOAD.options(table["task"]["options"])
    task = job("selfplay", options.problems, config=config, options=how)
    save_file({key: value.contiguous() for key, value in weights.items()}, folder / name)
    known = [KnownVersion(number=0, sha256=SHA256)]

    def judge(data: bytes, whole: bool) -> Inspection:
        return WORKLOAD.experience.inspect(
            task, data, known, lambda _: folder / name, 3, whole=whole
        )

    def once() -> tuple[int, Result, Inspection]:
        made = finish(WORKLOAD.begin(task, weights, held, "cpu"))[0]
        return engine(task, weights), made, judge(made.experience, whole=False)

    ratios, read, drawn, rates = [], [], [], []
    tokens, result, found = once()  # warms up
    assert found.refused == 0
    for _ in range(options.pairs):
        bare_s, _ = timed(lambda: engine(task, weights))
        ours_s, _ = timed(lambda: finish(WORKLOAD.begin(task, weights, held, "cpu")))
        some_s, _ = timed(lambda: judge(result.experience, whole=False))
        all_s, _ = timed(lambda: judge(result.experience, whole=True))
        ratios.append(bare_s / ours_s)
        read.append(some_s / ours_s)
        drawn.append(all_s / ours_s)
        rates.append(tokens / ours_s)
    ratio = statistics.median(ratios)
    rate = statistics.median(rates)
    answers = options.problems * how["group"]
    return {
        "model": name,
        "parameters": sum(value.numel() for value in weights.values()),
        "answers": answers,
        "tokens an answer": round(tokens / answers, 1),
        "actor, tokens a second of a core": round(rate),
        "rollouts an hour of a core": round(3600 * rate * answers / tokens),
        "of the engine's rate": round(ratio, 3),
        "goal": GOAL,
        "reached": ratio >= GOAL,
        "bytes a token up": round(len(result.experience) / tokens, 2),
        "judge beside actor": round(statistics.median(read), 3),
        "judge of a drawn file beside actor": round(statistics.median(drawn), 3),
        "tokens read again": round(found.read / tokens, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--problems", type=int, default=32)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in RUNS:
            rows.append(measure(name, options, Path(folder)))
            lines = [f"{key:36} {value}" for key, value in rows[-1].items()]
            print("\n".join(lines), end="\n\n", flush=True)
    if options.json:
        options.json.write_text(json.dumps({"rows": rows}, indent=1))


if __name__ == "__main__":
    main()
