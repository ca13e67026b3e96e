"""Tasks of `causal-lm` beside a bare loop of transformers and peft: same model, same windows, same
thread, taking turns.

    python -m tests.benchmarks.bench_adapters --json adapters.json
    python -m tests.benchmarks.bench_adapters --pairs 4 --steps 20 --width 768 --layers 12
    python -m tests.benchmarks.bench_adapters --memory --steps 2 --width 768 --layers 12

"bare" is forward, backward, clip, fused AdamW, the loss read every ten steps. Rates are by the
clock, and by the CPU time of the one thread, which other programs disturb less. Also: bytes of an
update of the adapters in int8 for each of their parameters, and beside the whole model. With
`--memory` each side runs alone in a process of its own, from weights in a file, and tells the most
that it held beyond its libraries; ours also to the end of a task, with its update in int8.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import peft
import torch
import transformers

from shared.tensors.codec import codec
from shared.tensors.frame import frame_bytes, open_frame
from shared.tensors.update import Delta
from shared.workloads.base import Job, TrainSettings, Work, load
from shared.workloads.causal_lm.base_model import frozen_of
from shared.workloads.causal_lm.config import CausalConfig
from shared.workloads.causal_lm.model import library_config
from shared.workloads.data.pass_order import PassOrder
from shared.workloads.data.windows import Windows, task_samples, windows_of
from shared.workloads.training.micro_batch import Listening
from tests.support.tensor_samples import count
from tests.support.workloads import tiny_gpt
from volunteer.machine.device_memory import PeakMemory

GOAL, MEMORY_GOAL = 0.95, 1.1
BATCH, CONTEXT = 8, 128
WORKLOAD = load("causal-lm")
Weights = Mapping[str, torch.Tensor]


def model_of(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": options.width,
        "intermediate_size": options.width * 8 // 3 // 8 * 8,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.width // 64,
    }


class Rate(NamedTuple):
    """Tokens a second that a task makes."""

    clock: float
    cpu: float


class Watch:
    """Measures the rate of a task from here on."""

    def __init__(self, task: Job) -> None:
        self._tokens = task.steps * BATCH * CONTEXT
        self._began = time.perf_counter(), time.thread_time()

    def rate(self) -> Rate:
        clock, cpu = self._began
        clock, cpu = time.perf_counter() - clock, time.thread_time() - cpu
        return Rate(self._tokens / clock, self._tokens / cpu)


def bare(task: Job, data: tiny_gpt.Folder, weights: Weights) -> Rate:
    """Train in a plain loop; return tokens a second."""
    config = CausalConfig.from_dict(task.config)
    model = transformers.LlamaForCausalLM(library_config(config.shape))
    frozen = frozen_of(config, data)
    model.load_state_dict(frozen if frozen is not None else weights)
    if config.lora is not None:
        lora = peft.LoraConfig(
            r=config.lora.rank,
            lora_alpha=config.lora.alpha,
            target_modules=list(config.lora.targets),
        )
        model = peft.get_peft_model(model, lora)
    model.train()
    order = PassOrder(windows_of(data.manifest, CONTEXT), task.order_seed)
    rows = task_samples(order, task.start, task.stop, task.steps, task.batch_size)
    windows = Windows(data, CONTEXT, config.shape.vocab_size, rows)
    learnt = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(learnt, lr=1e-3, betas=(0.9, 0.95), fused=True)
    watch = Watch(task)
    for step in range(task.steps):
        tokens = torch.from_numpy(windows.read(step * BATCH, (step + 1) * BATCH))
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), tokens[:, 1:].flatten()
        )
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(learnt, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 10 == 0:
            loss.item()
    return watch.rate()


def ours(task: Job, data: tiny_gpt.Folder, weights: Weights, waits: list[float]) -> Rate:
    """A task; `waits` gets the longest that a pause would have waited, in seconds."""
    work = WORKLOAD.begin(task, weights, data, "cpu")
    watch, looks = Watch(task), [time.perf_counter()]
    listening(work, lambda: looks.append(time.perf_counter()))
    while not work.done:
        work.advance()
        looks.append(time.perf_counter())
    waits.append(max(later - earlier for earlier, later in pairwise(looks)))
    return watch.rate()


def listening(work: Work, look: Callable[[], None]) -> None:
    """Look up within a step, as a volunteer's training thread does."""
    assert isinstance(work, Listening)
    work.listen(look)


def bytes_of_update(config: dict[str, Any], folder: Path) -> dict[str, float]:
    """Bytes of an int8 update of the adapters for each parameter, and of the whole model's."""
    schema = WORKLOAD.schema(config)
    whole = count(WORKLOAD.schema({**config, "train": "all", "lora": None}))
    drawn = torch.Generator().manual_seed(1)
    update = {spec.name: torch.randn(spec.shape, generator=drawn).numpy() for spec in schema}
    codec("int8").encode(update, schema, folder / "update")
    size = (folder / "update").stat().st_size
    return {
        "bytes_a_parameter": round(size / count(schema), 4),
        "share_of_model": round(size / (4 * whole), 5),
    }


def measure(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for train in ("lora", "all"):
        data, task, weights = prepared(options, folder, train)
        config, rates = task.config, []
        waits: list[float] = []
        for turn in range(options.pairs + 1):
            sides: dict[str, Callable[..., Rate]] = {
                "bare": bare,
                "ours": partial(ours, waits=waits),
            }
            names = sorted(sides, reverse=bool(turn % 2))
            rates.append({name: sides[name](task, data, weights) for name in names})
        rates = rates[1:]  # the first warms up
        ratio = statistics.median(each["ours"].cpu / each["bare"].cpu for each in rates)
        row = {
            "train": train,
            "parameters": count(WORKLOAD.schema(config)),
            "pairs": options.pairs,
            **{
                f"{side}_tokens_per_{unit}_s": round(
                    statistics.median(getattr(each[side], unit) for each in rates)
                )
                for unit in ("clock", "cpu")
                for side in ("ours", "bare")
            },
            "ratio_cpu": round(ratio, 3),
            "goal": GOAL,
            "reached": ratio >= GOAL,
            "pause_waits_s": round(max(waits), 3),
        }
        found.append(row | (bytes_of_update(config, folder) if train == "lora" else {}))
    return found


def memory(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Peaks of both sides in processes of their own, in MB."""
    context = multiprocessing.get_context("spawn")
    found: list[dict[str, Any]] = []
    for train in ("lora", "all"):
        row: dict[str, Any] = {"train": train}
        for side in ("bare", "ours", "whole task"):
            with ProcessPoolExecutor(1, mp_context=context) as pool:
                row[side] = round(pool.submit(peak, options, train, side).result() / 1e6)
        ratio = row["ours"] / row["bare"]
        found.append(row | {"ratio": round(ratio, 3), "reached": ratio <= MEMORY_GOAL})
    return found


def peak(options: argparse.Namespace, train: str, side: str) -> int:
    """Bytes that one side takes at the most."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data, task, weights = prepared(options, folder, train)
        schema = WORKLOAD.schema(task.config)
        whole = frame_bytes({key: value.numpy() for key, value in weights.items()})
        (folder / "weights").write_bytes(whole)
        del weights, whole
        bare(tiny_gpt.job(small(data), 1, BATCH, workload="causal-lm"), data, {})  # libraries
        looking = PeakMemory("cpu")
        with open_frame(folder / "weights", schema, copy_on_write=True) as frame:
            loaded = {key: torch.from_numpy(frame.array(key)) for key in frame}
            if side == "bare":
                bare(task, data, loaded)
            else:
                work = WORKLOAD.begin(task, loaded, data, "cpu")
                listening(work, lambda: None)
                while not work.done:
                    work.advance()
                if side == "whole task":
                    ended = {key: value.numpy() for key, value in work.result()[1].items()}
                    update = Delta(frame, ended, schema)
                    codec("int8").encode(update, schema, folder / "update")
        return looking.peak_bytes()


def small(data: tiny_gpt.Folder) -> dict[str, Any]:
    """A model that warms up the libraries."""
    shape = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1}
    config = {**shape, "intermediate_size": 128, "num_attention_heads": 2}
    table = {"config": config, "context": CONTEXT, "train": "lora"}
    return dict(WORKLOAD.config(table, data.manifest))


def prepared(
    options: argparse.Namespace, folder: Path, train: str
) -> tuple[tiny_gpt.Folder, Job, dict[str, torch.Tensor]]:
    """Data, a task, and weights to begin with."""
    data = tiny_gpt.sums(folder, documents=400)
    table = {"config": model_of(options), "context": CONTEXT, "train": train}
    config = WORKLOAD.config(table, data.manifest)
    settings = TrainSettings(lr=1e-3, warmup_steps=0)
    task = tiny_gpt.job(config, options.steps, BATCH, workload="causal-lm", train=settings)
    return data, task, WORKLOAD.init(config, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.memory:
        rows = memory(options)
    else:
        with tempfile.TemporaryDirectory() as folder:
            rows = measure(options, Path(folder))
    for row in rows:
        print("\n".join(f"{name:18} {value}" for name, value in row.items()))
    if options.json:
        options.json.write_text(json.dumps({"rows": rows}, indent=1))


if __name__ == "__main__":
    main()
