"""SparseLoCo beside DiLoCo at ten million parameters, on a card, in minutes.

    python -m tests.experiments.exp_sparse_card --seconds 450
    ... --quick                                     30 steps of a small model on the processor
    ... --table                                     only the table again

Four workers in one process (`crowd.py`) make 1,200 steps of 16 windows of 256 bytes each. Controls
are data-parallel with the windows of all four and one worker alone, each at its own best of three
rates on validation texts; the ways take the rate of data-parallel. The share of the gain is of test
texts. A finished cell is printed and kept at once, and a rerun goes on; cells that the time cuts
off are left out. Texts are kept in the folder of the results as `text-NAME.gz`, for a machine
without them.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import multiprocessing
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from tests.experiments.cells import Row, read
from tests.experiments.crowd import Crowd, CutOff, Setting, alone
from tests.experiments.learning import TEXTS

MODEL = {"vocab_size": 257, "block_size": 256, "n_layer": 6, "n_head": 6, "n_embd": 384}
SMALL = {"vocab_size": 257, "block_size": 32, "n_layer": 2, "n_head": 2, "n_embd": 64}
END = 256  # token between two texts
BYTES = 16 << 20  # of a text
HELD_OUT = 0.05
RATES = (1.5e-3, 3e-3, 7.5e-4)
CONTROLS = ("data-parallel", "alone")
Table = Mapping[str, Any]
SPARSE: Table = {"preset": "sparseloco"}
WAYS: Mapping[str, Table] = {
    "diloco": {"preset": "diloco"},
    "sparseloco H10 2.5": SPARSE,
    "sparseloco H30 1": {**SPARSE, "local_steps": 30, "lr": 1.0},
    "sparseloco H10 1": {**SPARSE, "lr": 1.0},
    "sparseloco H30 2": {**SPARSE, "local_steps": 30, "lr": 2.0},
    "sparseloco H15 1.5": {**SPARSE, "local_steps": 15, "lr": 1.5},
    "fedavg": {"preset": "fedavg"},
}


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One run: a control, or a way of merging."""

    text: str
    what: str
    rate: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.text} {self.what} {self.rate:g} s{self.seed}"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Folder, time and device of a process that does cells."""

    out: Path
    deadline: float
    device: str
    quick: bool

    @property
    def path(self) -> Path:
        return self.out / f"cells{'-quick' if self.quick else ''}.jsonl"


def text_file(out: Path, name: str) -> Path:
    """Return the file of a text, which is made once from what this machine holds."""
    path = out / f"text-{name}.gz"
    if not path.exists():
        texts = sorted(TEXTS[name](), key=lambda text: digest(text.name))
        kept, size = [], 0
        for text in texts:
            size += len(text.text.encode())
            if size > BYTES:
                break
            kept.append(text.text)
        path.write_bytes(gzip.compress(msgspec.json.encode(kept), mtime=0))
    return path


def digest(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def tokens_of(out: Path, name: str) -> list[torch.Tensor]:
    """Return training, validation and test texts as tokens; held out are whole texts."""
    found = gzip.decompress(text_file(out, name).read_bytes())
    texts = msgspec.json.decode(found, type=list[str])
    held = max(2, round(HELD_OUT * len(texts)))
    parts = texts[held:], texts[0:held:2], texts[1:held:2]
    return [torch.from_numpy(_joined(part)) for part in parts]


def _joined(texts: Sequence[str]) -> np.ndarray[Any, Any]:
    ended = [np.frombuffer(text.encode(), np.uint8).astype(np.int16) for text in texts]
    return np.concatenate([part for text in ended for part in (text, np.array([END], np.int16))])


def setting_of(options: Options, text: str) -> Setting:
    train, validation, test = (part.to(options.device) for part in tokens_of(options.out, text))
    quick = options.quick
    return Setting(
        model={**(SMALL if quick else MODEL), "dropout": 0.0},
        steps=30 if quick else 1200,
        batch=4 if quick else 16,
        workers=4,
        train=train,
        validation=validation,
        test=test,
        device=options.device,
        precision="bfloat16",
        deadline=options.deadline,
        heldout=32 if quick else 1024,
    )


def work(options: Options, cell: Cell) -> Row | None:
    """Do a cell in this process; None if the time is over before its end."""
    torch.set_num_threads(1)
    began = time.monotonic()
    try:
        found = _learn(setting_of(options, cell.text), cell)
    except CutOff:
        return None
    return {"cell": cell.name, **found, "took_s": round(time.monotonic() - began, 1)}


def fast_folder() -> Path | None:
    """Return the folder of files in memory, if it has room for all processes."""
    shared = Path("/dev/shm")
    return shared if shared.is_dir() and shutil.disk_usage(shared).free > 8e9 else None


def _learn(setting: Setting, cell: Cell) -> Row:
    bytes_: Row = {}
    if cell.what in CONTROLS:
        batch = setting.batch * (setting.workers if cell.what == "data-parallel" else 1)
        learner = alone(setting, cell.rate, cell.seed, batch)
    else:
        with tempfile.TemporaryDirectory(dir=fast_folder()) as folder:
            crowd = Crowd(
                setting=setting,
                table=WAYS[cell.what],
                rate=cell.rate,
                seed=cell.seed,
                folder=Path(folder),
            )
            versions = sum(1 for _ in crowd.rounds())
            learner = crowd.measured()
        size = sum(spec.count for spec in setting.schema)
        bytes_ = {"up": round(crowd.up / size, 2), "down": round(crowd.down / size, 2)}
        bytes_ |= {"versions": versions, "parameters": size}
    losses = (learner.loss(text) for text in (setting.validation, setting.test))
    return dict(zip(("loss", "test"), (round(x, 5) for x in losses), strict=True)) | bytes_


def best(done: Mapping[str, Row], text: str, what: str) -> float:
    """Return the rate of a control with the lowest validation loss of seed 0."""
    cells = (Cell(text=text, what=what, rate=rate, seed=0) for rate in RATES)
    known = {cell.rate: done[cell.name]["loss"] for cell in cells if cell.name in done}
    return min(known, key=lambda rate: known[rate], default=RATES[0])


def stages(done: Mapping[str, Row]) -> Iterator[list[Cell]]:
    """Yield the cells of each stage, chosen by what is done before it; the most telling first."""
    text, other = TEXTS
    tuned = [(what, rate) for rate in RATES for what in CONTROLS]
    yield [Cell(text=text, what=what, rate=rate, seed=0) for what, rate in tuned]
    low = best(done, text, "data-parallel")
    yield [Cell(text=text, what=way, rate=low, seed=0) for way in WAYS]
    chosen = [
        "diloco",
        *sorted(sparse(done, text, low), key=lambda way: way != "sparseloco H10 2.5"),
    ]
    yield _again(done, text, 1, chosen)
    yield _again(done, other, 0, chosen, text)
    yield [Cell(text=text, what=chosen[-1], rate=rate, seed=0) for rate in RATES if rate != low]


def sparse(done: Mapping[str, Row], text: str, rate: float) -> set[str]:
    """Return the preset, and the sparse way with the lowest validation loss."""
    cells = [Cell(text=text, what=way, rate=rate, seed=0) for way in WAYS if way.startswith("sp")]
    losses = {cell.what: done[cell.name]["loss"] for cell in cells if cell.name in done}
    return {"sparseloco H10 2.5", min(losses, key=lambda way: losses[way], default=cells[0].what)}


def _again(
    done: Mapping[str, Row], text: str, seed: int, ways: Sequence[str], tuned: str = ""
) -> list[Cell]:
    """Return the controls at their best rates, and some ways at data-parallel's."""
    rates = {what: best(done, tuned or text, what) for what in CONTROLS}
    rates |= dict.fromkeys(ways, rates["data-parallel"])
    return [Cell(text=text, what=what, rate=rate, seed=seed) for what, rate in rates.items()]


def work_off(options: Options, processes: int) -> None:
    """Do all cells that are not done, stage by stage, some at once."""
    done = read(options.path)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=spawn) as pool:
        for cells in stages(done):
            left = [cell for cell in cells if cell.name not in done]
            if time.monotonic() < options.deadline:
                futures = [pool.submit(work, options, cell) for cell in left]
                for future in as_completed(futures):
                    if failed := future.exception():
                        print(f"failed: {failed!r}", flush=True)
                    elif row := future.result():
                        done[row["cell"]] = row
                        print(json.dumps(row), flush=True)
                        with options.path.open("a") as file:
                            file.write(json.dumps(row) + "\n")


def table(done: Mapping[str, Row]) -> Iterator[str]:
    """Yield the lines of a table: losses, shares of the gain, bytes a parameter."""
    yield "| cell | test loss | share of the gain | up, down, bytes a parameter | s |"
    yield "|---|---|---|---|---|"
    text = next(iter(TEXTS))
    for name, row in done.items():
        own, seed = name.partition(" ")[0], int(name.rpartition(" s")[2])
        rates = {what: best(done, own if seed == 0 else text, what) for what in CONTROLS}
        controls = [
            done.get(Cell(text=own, what=what, rate=rate, seed=seed).name)
            for what, rate in rates.items()
        ]
        share = ""
        if controls[0] and controls[1]:
            whole, lone = (control["test"] for control in controls if control)
            share = f"{100 * (lone - row['test']) / (lone - whole):.0f} %"
        sent = f"{row['up']}, {row['down']}" if "up" in row else ""
        yield f"| {name} | {row['test']:.3f} | {share} | {sent} | {row['took_s']:.0f} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=450.0, help="end after so long")
    parser.add_argument("--out", type=Path, default=Path("build/experiments/sparse-card"))
    parser.add_argument("--processes", type=int, default=4, help="cells at once")
    parser.add_argument("--quick", action="store_true", help="the same code in seconds")
    parser.add_argument("--table", action="store_true", help="only write the table again")
    found = parser.parse_args()
    found.out.mkdir(parents=True, exist_ok=True)
    device = "cpu" if found.quick else "cuda"
    if not found.quick and not found.table and not torch.cuda.is_available():
        print("sparse_card: torch finds no card on this machine")
        return 75
    deadline = time.monotonic() + found.seconds
    options = Options(out=found.out, deadline=deadline, device=device, quick=found.quick)
    if not found.table:
        for name in TEXTS:
            text_file(options.out, name)
        work_off(options, found.processes)
    print("\n".join(table(read(options.path))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
