"""Tell answers of the named version and seed from others: honest machines with other arithmetic,
and those that cheat.

    make experiments EXPERIMENT=rollout_proof

A machine writes answers in a process of its own. A draw reads 32 of them again in one pass. Those
who cheat send the log-probabilities of the right weights, unless a line says otherwise.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shared.workloads.generation.sampling import choose, uniform
from shared.workloads.rollouts.answer_proof import faults, refuted
from tests.experiments.cells import Row, arguments, results, work_off
from tests.experiments.grpo_reference import (
    END,
    PAD,
    Llama,
    Settings,
    problems,
    right,
    taught,
    warmed,
)

SETTINGS = Settings(versions=100)
OLD = {"v99": 99, "v92": 92, "v0": 0}
DRAW = 32  # answers that a draw reads
HONEST, CHEATS = 3008, 640  # answers
LIES = 0.3


def trained(out: Path) -> None:
    """The named version, earlier ones, and a smaller model, as files."""
    if (out / "named.pt").exists():
        return
    model = warmed(SETTINGS, 1)
    torch.save(model.state_dict(), out / "v0.pt")
    for version, _, _ in taught(model, SETTINGS, 1):
        if f"v{version}" in OLD:
            torch.save(copy.deepcopy(model).state_dict(), out / f"v{version}.pt")
    small = warmed(SETTINGS._replace(width=32), 2)
    torch.save(small.state_dict(), out / "small.pt")
    torch.save(model.state_dict(), out / "named.pt")


def loaded(path: Path) -> Llama:
    """Return the model of a file."""
    state = torch.load(path, weights_only=True)
    model = Llama(SETTINGS._replace(width=state["norm.weight"].shape[0]))
    model.load_state_dict(state)
    return model


@torch.no_grad()
def written(model: Llama, asked: torch.Tensor, how: dict[str, Any], shift: int = 0) -> np.ndarray:
    """Answers (N, A) drawn by the seeds of their rows, padded after their end."""
    rows = []
    for start in range(0, len(asked), how["batch"]):
        past: list[list[torch.Tensor]] = [[] for _ in model.blocks]
        tokens = part = asked[start : start + how["batch"]]
        for place in range(part.shape[1]):
            logits = model(tokens, past)[:, -1].float().numpy()
            drawn = [
                choose(row, uniform(start + n + shift, place), temperature=how["heat"]).token
                for n, row in enumerate(logits)
            ]
            tokens = torch.cat([tokens, torch.tensor(drawn)[:, None]], 1)
        rows.append(tokens[:, part.shape[1] :])
    return ended(torch.cat(rows).numpy())


def ended(answers: np.ndarray) -> np.ndarray:
    """Answers with padding after their end."""
    after = np.cumsum(answers == END, 1) - (answers == END)
    return np.where(after > 0, PAD, answers)


def answers_of(cell: dict[str, Any], out: Path) -> np.ndarray:
    """Return the answers of a machine."""
    how: dict[str, Any] = {"batch": 64, "heat": 1.0, "model": "named", "trick": ""}
    how |= cell
    count = how.get("answers", CHEATS)
    asked = problems(count, SETTINGS, torch.Generator().manual_seed(5))
    model = loaded(out / f"{how['model']}.pt")
    with torch.autocast("cpu", torch.bfloat16, enabled=how.get("bfloat16", False)):
        found = written(model, asked, how)
    wanted = right(asked).numpy()
    if how["trick"] == "another seed":
        found = written(model, asked, how, 10**6)
    elif how["trick"] == "best of four":
        for shift in (10**6, 2 * 10**6, 3 * 10**6):
            good = ((found == wanted) | (wanted == PAD)).all(1, keepdims=True)
            found = np.where(good, found, written(model, asked, how, shift))
    elif how["trick"] == "by hand":
        found = wanted
    elif how["trick"] == "early stop":
        found = found.copy()
        found[:, 2] = END
        found = ended(found)
    return found


def work(cell: dict[str, Any], out: Path) -> Row:
    """Answers of a machine, read again by the named version."""
    path = out / "answers.npy"
    environment = {**os.environ, "OMP_NUM_THREADS": str(cell.get("threads", 1))}
    if "capability" in cell:
        environment["ATEN_CPU_CAPABILITY"] = cell["capability"]
    command = [sys.executable, "-m", "tests.experiments.exp_rollout_proof", repr(cell), str(out)]
    subprocess.run(command, check=True, env=environment)
    found = np.load(path)
    asked = problems(len(found), SETTINGS, torch.Generator().manual_seed(5))
    same = answers_of({"answers": len(found)}, out)
    named = loaded(out / "named.pt")
    teller = loaded(out / f"{cell.get('tells', 'named')}.pt")
    with torch.no_grad():
        given = torch.cat([asked, torch.from_numpy(found)[:, :-1]], 1)
        scores = named(given)[:, SETTINGS.length :].numpy()
        told = teller(given)[:, SETTINGS.length :].log_softmax(-1).numpy() + cell.get("lie", 0.0)
    wrong, tokens = [], []
    for row, answer in enumerate(found):
        size = int((answer != PAD).sum())
        said = told[row, range(size), answer[:size]]
        drawn = np.array([uniform(row, place) for place in range(size)])
        wrong.append(int(faults(scores[row, :size], answer[:size], said, drawn).sum()))
        tokens.append(size)
    draws = [slice(at, at + DRAW) for at in range(0, len(found) - DRAW + 1, DRAW)]
    caught = [refuted(sum(wrong[at]), sum(tokens[at])) for at in draws]
    return {
        "tokens": sum(tokens),
        "wrong": round(sum(wrong) / sum(tokens), 5),
        "other answers": round(float((found != same).any(1).mean()), 4),
        "draws": len(caught),
        "caught": sum(caught),
        "all together": refuted(sum(wrong), sum(tokens)),
        "most": max(sum(wrong[at]) for at in draws),
        "alone": sum(refuted(bad, many) for bad, many in zip(wrong, tokens, strict=True)),
    }


def machines() -> dict[str, dict[str, Any]]:
    """Return the honest machines, with so many answers, and the cheating ones."""
    honest: dict[str, dict[str, Any]] = {
        f"honest, {capability}, {threads} threads": {"capability": capability, "threads": threads}
        for capability in ("default", "avx2", "avx512")
        for threads in (1, 4)
    }
    honest |= {f"honest, batch {batch}": {"batch": batch} for batch in (1, 7, 256)}
    honest["honest, bfloat16"] = {"bfloat16": True}
    cheats: dict[str, dict[str, Any]] = {
        "smaller model": {"model": "small"},
        "smaller model, its own log-probabilities": {"model": "small", "tells": "small"},
        "temperature 1.3": {"heat": 1.3},
        "temperature 0.7": {"heat": 0.7},
        "greedy": {"heat": 0.0},
        **{
            each: {"trick": each}
            for each in ("another seed", "best of four", "by hand", "early stop")
        },
        **{f"old version {name}": {"model": name} for name in OLD},
        "log-probabilities 0.3 too high": {"lie": LIES},
    }
    return {name: {**how, "answers": HONEST} for name, how in honest.items()} | cheats


def main() -> None:
    if len(sys.argv) == 3 and sys.argv[1].startswith("{"):
        import ast

        out = Path(sys.argv[2])
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        np.save(out / "answers.npy", answers_of(ast.literal_eval(sys.argv[1]), out))
        return
    options = arguments(__doc__ or "")
    trained(options.out)
    work_off(options, machines(), lambda cell: work(cell, options.out))
    print(results(options))


if __name__ == "__main__":
    main()
