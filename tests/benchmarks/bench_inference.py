"""Answers of the built-in engine beside bare PyTorch loops that keep keys and values.

    make bench BENCH=inference
    python -m tests.benchmarks.bench_inference --json inference.json --threads 1

The engine is the server's: its own process, frames over a socket, sampling in float64, a piece for
each token on this side's event loop. The bare loops are the same model in this process, one text,
or as many as there are streams in step, sampled with `torch.multinomial`. All take turns and do the
same number of tokens on the same number of threads; a ratio is the median of those of the turns.
There is no HTTP there and no tokenizer: prompts are numbers. The library transformers loads the
exported version, and takes its turn with `generate` and with its continuous batching; tokens a
second of CPU do not depend on who else uses the cores. At last a
`coordinator serve` answers sixteen streams over HTTP, metered, beside heartbeats and claims.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from coordinator.inference.inference_engine import Generation, ModelVersion
from coordinator.inference.process_messages import ModelFiles
from coordinator.runs.definition import Definition, of_file
from coordinator.runs.version_files import write_weights
from shared.workloads.generation import batch
from shared.workloads.gpt.config import GptConfig
from shared.workloads.gpt.model import Gpt, build
from tests.benchmarks import answering_side, serving_side
from tests.benchmarks.serving_side import FixedEngine
from tests.benchmarks.transformers_side import Library

STREAMS = 16
PROMPT = 64
PROMPTS = [[*range(seed, seed + PROMPT)] for seed in range(STREAMS)]
SIZES: dict[str, tuple[dict[str, Any], int]] = {  # the model, and tokens a text
    "10 M": ({"n_layer": 6, "n_head": 6, "n_embd": 384, "vocab_size": 512}, 96),
    "10 M Llama": (
        {
            **{"architecture": "llama", "n_layer": 6, "n_head": 6, "n_kv_head": 2},
            **{"n_embd": 384, "vocab_size": 512},
        },
        96,
    ),
    "124 M": ({"n_layer": 12, "n_head": 12, "n_embd": 768, "vocab_size": 50257}, 24),
}
Turn = dict[str, tuple[float, float, float]]  # seconds, until the first token, of CPU
SECONDS, CPU = 0, 2
LIBRARY = ("generate", "batching")
MODEL = ModelVersion(run_id=1, run="bench", version=0)
GOALS = {"one_beside_bare": 0.9, "many_beside_bare": 0.8, "http_beside_engine": 0.9}
GOALS |= {f"{side}_beside_{kind}": 1.0 for side in ("one", "many") for kind in LIBRARY}
GOALS |= {"training_beside_an_answer_a_minute": 0.9}
AT_MOST = {"heartbeat_ratio": 2.0, "claim_ratio": 2.0, "first_token_over_prefill_ms": 15.0}
MANY_BESIDE_ONE = {"10 M": 4.0}  # there is none for 124 M


class TimedEngine(FixedEngine):
    """An engine that answers prompts of numbers, timed."""

    async def answer(self, seed: int, tokens: int) -> float:
        """Generate one text; return the time of its first token."""
        prompt = tuple(range(seed, seed + PROMPT))
        sequence = batch.Sequence(id="bench", prompt=prompt, max_tokens=tokens, seed=seed)
        request = Generation(model=MODEL, sequence=sequence)
        first, made = 0.0, 0
        async for piece in self.generate(request):
            first = first or time.perf_counter()
            made += len(piece.tokens)
        assert made == tokens
        return first

    async def timed(self, streams: int, tokens: int) -> tuple[float, float]:
        """Return the seconds that many texts at once take, and until the first token."""
        began = time.perf_counter()
        firsts = await asyncio.gather(*(self.answer(seed, tokens) for seed in range(streams)))
        return time.perf_counter() - began, min(firsts) - began


@torch.inference_mode()
def bare(model: Gpt, layers: int, streams: int, tokens: int) -> tuple[float, float]:
    """Return the same figures of a loop that only runs the model and draws tokens."""
    began = time.perf_counter()
    kept: list[list[torch.Tensor]] = [[] for _ in range(layers)]
    given = torch.stack([torch.arange(seed, seed + PROMPT) for seed in range(streams)])
    first, start = 0.0, 0
    for _ in range(tokens):
        hidden = _hidden(model, given, kept, start)[:, -1]
        start += given.shape[1]
        given = torch.multinomial(torch.softmax(model.logits(hidden), -1), 1)
        given.tolist()
        first = first or time.perf_counter()
    return time.perf_counter() - began, first - began


def _hidden(
    model: Gpt, given: torch.Tensor, kept: list[list[torch.Tensor]], start: int
) -> torch.Tensor:
    """Return the last layer's output; keys and values are appended to those that are kept."""
    x, turn = model.placed(given, slice(start, start + given.shape[1]))
    blocks: Any = model.blocks
    for block, before in zip(blocks, kept, strict=True):
        q, *new = block.attn.split(block.ln1(x), turn)
        pairs = zip(before, new, strict=True) if before else ()
        before[:] = [torch.cat(pair, dim=2) for pair in pairs] or new
        x = x + block.attn.attend(q, *before, causal=not start)
        x = x + block.mlp(block.ln2(x))
    found: torch.Tensor = model.ln_f(x)
    return found


def written(name: str, folder: Path) -> tuple[Definition, ModelFiles, Gpt]:
    """Return a run of this size, its files, and the model itself."""
    model = {"block_size": 256, "dropout": 0.0} | SIZES[name][0]
    text = json.dumps({"name": "bench", "workload": "gpt", "model": model})
    about = of_file(text)
    weights = about.workload.init(about.file.model, 0)
    path = folder / name
    write_weights(path, about, weights, {})
    files = ModelFiles(key=name, file=text, weights=str(path))
    config = GptConfig.from_dict(about.file.model)
    return about, files, build(config, weights, "cpu").train(False)


async def measure(name: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    about, files, model = written(name, folder)
    layers, tokens = SIZES[name][0]["n_layer"], SIZES[name][1]
    engine = TimedEngine(files, options.threads)
    library = Library(about, files, folder / f"{name} exported") if options.library else None

    def cpu() -> float:
        """Return the CPU seconds of this process and of the engine's."""
        used = time.process_time()
        if engine.pid is not None:
            times = psutil.Process(engine.pid).cpu_times()
            used += times.user + times.system
        return used

    async def turn() -> Turn:
        found: Turn = {}

        async def side(name: str, work: Callable[[], Any]) -> None:
            before, result = cpu(), work()
            seconds, first = await result if asyncio.iscoroutine(result) else result
            found[name] = seconds, first, cpu() - before

        await side("one", lambda: engine.timed(1, tokens))
        await side("bare_one", lambda: bare(model, layers, 1, tokens))
        await side("many", lambda: engine.timed(STREAMS, tokens))
        await side("bare_many", lambda: bare(model, layers, STREAMS, tokens))
        if library is not None:
            for name, prompts in (("one", PROMPTS[:1]), ("many", PROMPTS)):
                await side(f"generate_{name}", partial(library.generate, prompts, tokens))
                await side(f"batching_{name}", partial(library.batched, prompts, tokens))
        return found

    try:
        await turn()  # which loads the version
        with contextlib.suppress(psutil.Error):  # all sides at the same priority
            psutil.Process(engine.pid).nice(psutil.Process().nice())
        turns = [await turn() for _ in range(options.repeats)]
    finally:
        await engine.close()

    def rate(turn: Turn, side: str, clock: int = SECONDS) -> float:
        return tokens * (STREAMS if side.endswith("many") else 1) / turn[side][clock]

    def ratio(over: str, under: str, clock: int = SECONDS) -> float:
        found = (rate(turn, over, clock) / rate(turn, under, clock) for turn in turns)
        return round(statistics.median(found), 2)

    row: dict[str, Any] = {"model": name, "parameters": about.parameters}
    for side in turns[0]:
        row[f"{side}_tokens_per_s"] = round(statistics.median(rate(t, side) for t in turns), 1)
        per_cpu = statistics.median(rate(t, side, CPU) for t in turns)
        row[f"{side}_tokens_per_cpu_s"] = round(per_cpu, 1)
    row["one_beside_bare"] = ratio("one", "bare_one")
    row["many_beside_bare"] = ratio("many", "bare_many")
    row["many_beside_one"] = ratio("many", "one")
    for side in ("one", "many") if library is not None else ():
        for kind in LIBRARY:
            row[f"{side}_beside_{kind}"] = ratio(side, f"{kind}_{side}")
            row[f"{side}_beside_{kind}_cpu"] = ratio(side, f"{kind}_{side}", CPU)
    for side in ("one", "bare_one"):
        row[f"{side}_first_ms"] = round(1e3 * statistics.median(t[side][1] for t in turns), 1)
    return row


async def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    torch.set_num_threads(options.threads)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.sizes:
            rows.append(await measure(name, Path(folder), options))
            _print(rows[-1], GOALS | {"many_beside_one": MANY_BESIDE_ONE.get(name, 0.0)})
        if options.seconds:
            made = await serving_side.measure(Path(folder), options.repeats, options.seconds)
            rows.append({"model": "10 M, served", **made})
            _print(rows[-1], GOALS)
        if options.volunteer:
            found = await answering_side.measure(Path(folder))
            rows.append({"model": "10 M, by a volunteer that trains", **found})
            _print(rows[-1], GOALS)
    return rows


def _print(row: dict[str, Any], goals: dict[str, float]) -> None:
    for key, value in row.items():
        said = ""
        if goals.get(key):
            said = f"  (goal >= {goals[key]}{'' if value >= goals[key] else ', missed'})"
        elif key in AT_MOST:
            said = f"  (goal <= {AT_MOST[key]}{'' if value <= AT_MOST[key] else ', missed'})"
        print(f"{key:28} {value}{said}")
    print(flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="*", choices=tuple(SIZES), default=list(SIZES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--no-library", dest="library", action="store_false")
    parser.add_argument("--seconds", type=float, default=8.0, help="of heartbeats; 0 = no server")
    parser.add_argument("--no-volunteer", dest="volunteer", action="store_false")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = asyncio.run(run(options))
    if options.json:
        options.json.write_text(json.dumps({"rows": rows}, indent=1))


if __name__ == "__main__":
    main()
