"""Eight of twenty volunteers are hostile: what every attack does to the model, to the merges and to
the pay, over the rules of an open server.

    make experiments EXPERIMENT=trust                            most of an hour; a rerun goes on
    make experiments EXPERIMENT=trust EXPERIMENT_ARGS='--full'   a DCGAN of digits, and Gomoku
    make experiments EXPERIMENT=trust EXPERIMENT_ARGS='--quick'  the same code in a minute

Four worlds. *open*: an open run as it is by default, all accounts are new. *elsewhere*: the same,
where no recompute is on comparable arithmetic: it frees pay, and never punishes. *sleepers*:
everybody is vetted, the hostile have been honest so far, and no recompute is ever drawn: only the
rules of a merge stand between them and the model. *invited*: the same with the mean and the norm
limit of 3 x the median: the defaults by invitation.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from coordinator.runs.definition import OPEN_RULE, OPEN_TABLES
from tests.experiments.cells import Row, arguments, results, work_off
from tests.experiments.learning import corpus
from tests.experiments.trust_arena import Arena, Cell, Subject
from tests.experiments.trust_attacks import AT_ONCE, ATTACKS, BUFFERS, EVERY, GAMES, MAIN, MIXED
from tests.experiments.trust_dcgan import Dcgan
from tests.experiments.trust_gomoku import Gomoku
from tests.experiments.trust_gpt import Gpt

MODEL = {"block_size": 32, "n_layer": 1, "n_head": 2, "n_embd": 48, "dropout": 0.0}
STEPS = 10
SEEDS, CLEAN_SEEDS = 2, 4
GOMOKU_ROUNDS = 8
DCGAN_LR = 2e-3  # ten times the default: so few steps
OPEN: dict[str, Any] = {"rule": OPEN_RULE, "validation": OPEN_TABLES["validation"]}
WORLDS: dict[str, dict[str, Any]] = {
    "open": OPEN,
    "elsewhere": OPEN | {"comparable": False},
    "sleepers": OPEN | {"vetted": True, "honest_rounds": 3, "recompute": False},
    "invited": {"vetted": True, "honest_rounds": 3, "recompute": False},
}
CONTROLS = ("noise", "x -2.8", "to the edge", "backdoor")
CODECS = ("bf16", "int8", "int4")


def cells(rounds: int, seeds: int) -> Iterator[tuple[str, Cell]]:
    for seed in range(CLEAN_SEEDS if seeds > 1 else 1):
        yield f"mean | clean s{seed}", Cell(seed=seed, rounds=rounds, recompute=False)
        yield f"open | clean s{seed}", Cell(seed=seed, rounds=rounds, **OPEN)
    for seed in range(seeds):
        for codec in CODECS if seed == 0 else ():
            cell = Cell(seed=seed, rounds=rounds, codec=codec, **OPEN)
            yield f"open | clean {codec} s{seed}", cell
        for attack in (*ATTACKS, MIXED, AT_ONCE):
            for world, more in WORLDS.items():
                if world not in ("elsewhere", "invited") or attack in CONTROLS:
                    cell = Cell(attack=attack, seed=seed, rounds=rounds, **more)
                    yield f"{world} | {attack} s{seed}", cell


def cells_of(
    name: str, rounds: int, attacks: Sequence[str], **own: Any
) -> Iterator[tuple[str, Cell]]:
    """Another workload: the attacks that matter to it."""
    own |= {"attacks": attacks, "rounds": rounds}
    for seed in range(SEEDS):
        clean = Cell(seed=seed, rounds=rounds, recompute=False)
        yield f"{name}: mean | clean s{seed}", clean
        yield f"{name}: open | clean s{seed}", Cell(seed=seed, **(OPEN | own))
        for attack in (*attacks, AT_ONCE):
            for world in ("open", "sleepers"):
                more = WORLDS[world] | own
                yield f"{name}: {world} | {attack} s{seed}", Cell(attack=attack, seed=seed, **more)


def others() -> dict[str, tuple[str, Cell]]:
    """Cells of a DCGAN and of Gomoku by their names, each with its workload."""
    clipped = OPEN["validation"] | {"clip_until": 5.0}  # the workload's
    found = {
        "dcgan": cells_of("dcgan", 20, (*MAIN, *BUFFERS), validation=clipped),
        "gomoku": cells_of("gomoku", GOMOKU_ROUNDS, (*MAIN, *GAMES)),
    }
    return {name: (which, cell) for which, listed in found.items() for name, cell in listed}


def play(cell: Cell, subject: Subject) -> Row:
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as folder:
        return Arena(cell, Path(folder), subject).run()


def table(rows: Mapping[str, Row]) -> list[str]:
    """A line for each attack, a column for each world: the loss by the clean one of each seed, the
    hostile share of the merged weight, of the freed pay, and where the backdoor works in how many of the
    contexts, the worst of the seeds.
    """
    lines = [f"| attack | {' | '.join(WORLDS)} |", "|---" * (1 + len(WORLDS)) + "|"]
    for attack in (*EVERY, MIXED, AT_ONCE):
        found = [_cell(rows, _of(rows, f"{world} | {attack}")) for world in WORLDS]
        if any(found):
            lines.append(f"| {attack} | {' | '.join(found)} |")
    return lines


def _of(rows: Mapping[str, Row], start: str) -> dict[int, Row]:
    return {
        int(name.rpartition(" s")[2]): row
        for name, row in rows.items()
        if name.rpartition(" s")[0] == start
    }


def _cell(rows: Mapping[str, Row], found: Mapping[int, Row]) -> str:
    if not found:
        return ""
    clean = _of(rows, "mean | clean")
    ratios = [row["loss"] / clean[seed]["loss"] for seed, row in found.items() if seed in clean]
    shares = [max(row[key] for row in found.values()) for key in ("weight", "pay", "success")]
    said = [", ".join(f"{ratio:.3f}" for ratio in ratios)]
    said += [f"{100 * share:.0f} %" for share in shares[:2]]
    if shares[2] > 0:
        said.append(f"works in {100 * shares[2]:.0f} %")
    return "; ".join(said)


def honest(rows: Mapping[str, Row]) -> list[str]:
    """A line for each way without attackers: the cost of the rules."""
    lines = [
        "| run | loss | to the mean's | updates | norm refused, scaled "
        "| largest norm by the median |",
        "|---|---|---|---|---|---|",
    ]
    clean = _of(rows, "mean | clean")
    for name in ("mean | clean", "open | clean", *(f"open | clean {codec}" for codec in CODECS)):
        found = _of(rows, name)
        if not found:
            continue
        counts = [row["verdicts"]["honest"] for row in found.values()]
        by = [
            f"{100 * (row['loss'] / clean[seed]['loss'] - 1):+.2f}%"
            for seed, row in found.items()
            if seed in clean
        ]
        losses = ", ".join(str(row["loss"]) for row in found.values())
        lines.append(
            f"| {name.replace(' | ', ', ')} | {losses} | {', '.join(by)} "
            f"| {sum(row['updates'] for row in found.values())} "
            f"| {_sum(counts, 'norm')}, {_sum(counts, 'scaled')} "
            f"| {max(row['norms'][-1] for row in found.values())} |"
        )
    punished = sum(row["punished"] for row in rows.values())
    updates = sum(sum(row["verdicts"]["honest"].values()) for row in rows.values())
    lines.append(
        f"\nHonest volunteers suspended: {punished}, over {updates} honest updates in all."
    )
    return lines


def _sum(counts: Sequence[Mapping[str, int]], key: str) -> int:
    return sum(found.get(key, 0) for found in counts)


def main() -> None:
    options = arguments(__doc__ or "")
    lines: list[str] = []
    if options.full:
        made: dict[str, Subject] = {
            "dcgan": Dcgan(options.out / "digits", STEPS, DCGAN_LR),
            "gomoku": Gomoku(options.out / "games", 3 * STEPS),
        }
        done = work_off(options, others(), lambda one: play(one[1], made[one[0]]))
        for which in made:
            start = f"{which}: "
            own = {n.removeprefix(start): r for n, r in done.items() if n.startswith(start)}
            lines += [f"## {which}", "", *table(own), "", *honest(own), ""]
    else:
        gpt = Gpt(corpus(options.out.parent, 24 if options.quick else 0), MODEL, STEPS)
        listed = cells(4, 1) if options.quick else cells(15, SEEDS)
        done = work_off(options, listed, lambda cell: play(cell, gpt))
        lines = [*table(done), "", *honest(done)]
    results(options).with_name("table.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
