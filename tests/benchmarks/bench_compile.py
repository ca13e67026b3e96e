"""`torch.compile` for a task: the seconds that its first steps take more, and those that later ones
take less.

    python -m tests.benchmarks.bench_compile --json compile.json

The forward pass of the workload's own model is compiled, with what autograd makes of it; forward,
backward and fused AdamW on one thread. "another batch" is the first step after the size of the
micro-batch changed, as it does when memory or a pause asks for it. Run it with an empty
TORCHINDUCTOR_CACHE_DIR for a cold start, again for a warm one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shared.workloads.base import load
from shared.workloads.causal_lm.base_model import frozen_of
from shared.workloads.causal_lm.config import CausalConfig
from shared.workloads.causal_lm.model import build as build_causal
from shared.workloads.gpt.config import GptConfig
from shared.workloads.gpt.model import build as build_gpt
from tests.support.workloads import tiny_gpt

BATCH, CONTEXT = 8, 128
TASK_S = 300.0  # the usual size of a task
GPT = {"n_layer": 5, "n_head": 6, "n_embd": 384, "block_size": CONTEXT, "dropout": 0.0}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
}
Loss = Callable[[Tensor], Tensor]


def gpt(data: tiny_gpt.Folder) -> tuple[nn.Module, nn.Module, Loss]:
    """The built-in GPT: its model, the part that is compiled, and its loss."""
    workload = load("gpt")
    config = workload.config(GPT, data.manifest)
    model = build_gpt(GptConfig.from_dict(config), workload.init(config, 3), "cpu")
    return model, model, lambda tokens: model(tokens[:, :-1], tokens[:, 1:])


def causal(data: tiny_gpt.Folder) -> tuple[nn.Module, nn.Module, Loss]:
    """Adapters of rank 8 in a small Llama."""
    workload = load("causal-lm")
    table = {"config": LLAMA, "context": CONTEXT, "train": "lora"}
    raw = workload.config(table, data.manifest)
    config = CausalConfig.from_dict(raw)
    found = build_causal(config, workload.init(raw, 3), frozen_of(config, data), "cpu")
    return found.module, found.module, lambda tokens: found.loss(tokens).loss


def measure(made: tuple[nn.Module, nn.Module, Loss], steps: int, *, compiled: bool) -> list[float]:
    """Return the seconds of each step; the last step has a smaller batch."""
    model, forward, loss = made
    if compiled:
        forward.compile()
    model.train()
    learnt = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(learnt, lr=1e-4, fused=True)
    random = torch.Generator().manual_seed(1)
    took = []
    for step in range(steps + 1):
        batch = BATCH if step < steps else BATCH // 2
        tokens = torch.randint(256, (batch, CONTEXT + 1), generator=random)
        began = time.perf_counter()
        torch.autograd.backward(loss(tokens))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        took.append(time.perf_counter() - began)
    return took


def row(name: str, make: Callable[[], Any], steps: int) -> dict[str, Any]:
    plain = measure(make(), steps, compiled=False)
    torch._dynamo.reset()
    fused = measure(make(), steps, compiled=True)
    step, faster = (statistics.median(each[2:-1]) for each in (plain, fused))
    first = fused[0] + fused[1] - 2 * faster
    saved = step - faster
    return {
        "model": name,
        "step_s": round(step, 4),
        "compiled_step_s": round(faster, 4),
        "gain": round(step / faster, 3),
        "compiling_s": round(first, 1),
        "another_batch_s": round(fused[-1] - faster / 2, 1),
        "pays_after_s": round(first / saved * step) if saved > 0 else None,
        "of_a_task": round((TASK_S - first) / faster * step / TASK_S, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        data = tiny_gpt.sums(Path(folder), documents=400)
        rows = [
            row("gpt", lambda: gpt(data), options.steps),
            row("causal-lm, lora", lambda: causal(data), options.steps),
        ]
    for each in rows:
        print("\n".join(f"{name:18} {value}" for name, value in each.items()))
    if options.json:
        options.json.write_text(json.dumps({"rows": rows}, indent=1))


if __name__ == "__main__":
    main()
