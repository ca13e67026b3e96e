"""Benchmark of a device: matrix products, and a real training step of a small language model.

A benchmark runs on the device's training thread for about 12 seconds, 2 when quick; it can be
cancelled between two measurements.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shared.protocol.accounts import Benchmark
from volunteer.machine.device_memory import synchronize

if TYPE_CHECKING:
    import torch

VOCABULARY = 4096
FULL_S = {"fp32": 3.0, "bf16": 3.0, "step": 6.0}
FIRST_STAGE = "fp32"
QUICK_SHARE = 0.15
REPORT_S = 0.25  # shortest interval of reports: a bf16 product of a small matrix takes 20 us


class BenchmarkCancelled(Exception):
    """Raised when the owner cancels the benchmark, or the agent ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of the benchmark on a kind of device: the model of the training step, the matrices."""

    width: int
    layers: int
    heads: int
    length: int  # T
    batch: int  # B
    matrix: int  # side of the first matrix product


SMALL = Shape(width=256, layers=4, heads=8, length=128, batch=4, matrix=512)
LARGE = Shape(width=768, layers=12, heads=12, length=512, batch=8, matrix=4096)


class _Bench:
    """Timing of one benchmark's stages, with its progress."""

    def __init__(
        self,
        device: str,
        quick: bool,
        report: Callable[[str, float], None],
        stop: Callable[[], bool],
    ) -> None:
        self.device = device
        self.shape = SMALL if device == "cpu" else LARGE
        self._share = QUICK_SHARE if quick else 1.0
        self._report = report
        self._stop = stop
        self._done_s = 0.0
        self._reported_at = float("-inf")

    def measure(self, stage: str, once: Callable[[], None]) -> float:
        """Return the shortest time of `once`, over the tries that fit the stage's time."""
        budget = FULL_S[stage] * self._share
        began = time.perf_counter()
        once()  # warm-up: memory, kernels
        synchronize(self.device)
        best, tries = float("inf"), 0
        while True:
            spent = time.perf_counter() - began
            self._tell(stage, min(spent, budget))
            if tries and spent >= budget:
                self._done_s += budget
                return best
            start = time.perf_counter()
            once()
            synchronize(self.device)
            best, tries = min(best, time.perf_counter() - start), tries + 1

    def _tell(self, stage: str, spent: float) -> None:
        if self._stop():
            raise BenchmarkCancelled
        now = time.perf_counter()
        if now - self._reported_at < REPORT_S:
            return
        self._reported_at = now
        whole = sum(FULL_S.values()) * self._share
        self._report(stage, min(1.0, (self._done_s + spent) / whole))


def benchmark(
    device: str,
    *,
    quick: bool,
    report: Callable[[str, float], None],
    stop: Callable[[], bool],
    now: float = 0.0,
) -> Benchmark:
    """Measure a device at the time `now` (UTC epoch seconds). `report` gets each stage and the
    share done; `stop` returns True to cancel. Raises BenchmarkCancelled.
    """
    import torch

    bench = _Bench(device, quick, report, stop)
    fp32 = _product(bench, "fp32", torch.float32)
    bf16 = _product(bench, "bf16", torch.bfloat16)
    step = _step(bench)
    report("done", 1.0)
    return Benchmark(
        device=device,
        fp32_flops=fp32,
        bf16_flops=bf16,
        step_flops=step,
        at=now,
    )


def _product(bench: _Bench, stage: str, dtype: torch.dtype) -> float:
    """Return operations a second of a square matrix product; bfloat16 on a CPU takes a smaller
    matrix.
    """
    import torch

    side = bench.shape.matrix
    if bench.device == "cpu" and dtype is torch.bfloat16:
        side //= 4  # emulated without hardware support, and a hundred times slower
    a = torch.randn(side, side, device=bench.device, dtype=dtype)  # (S, S)
    b = torch.randn(side, side, device=bench.device, dtype=dtype)  # (S, S)
    out = torch.empty_like(a)

    def once() -> None:
        torch.mm(a, b, out=out)

    seconds = bench.measure(stage, once)
    return 2.0 * side**3 / seconds


def _step(bench: _Bench) -> float:
    """Return operations a second of forward, backward, AdamW on a causal transformer in float32."""
    import torch
    from torch import nn

    from shared.workloads.base import TrainSettings
    from shared.workloads.training.optimizer import InnerOptimizer

    s = bench.shape
    layers = [
        nn.TransformerEncoderLayer(
            s.width, s.heads, 4 * s.width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        for _ in range(s.layers)
    ]
    model = nn.ModuleDict(
        {
            "embed": nn.Embedding(VOCABULARY, s.width),
            "blocks": nn.ModuleList(layers),
            "head": nn.Linear(s.width, VOCABULARY, bias=False),
        }
    ).to(bench.device)
    optimizer = InnerOptimizer(dict(model.named_parameters()), TrainSettings())
    tokens = torch.randint(VOCABULARY, (s.batch, s.length), device=bench.device)  # (B, T)
    mask = nn.Transformer.generate_square_subsequent_mask(
        s.length, torch.device(bench.device)
    )  # (T, T)

    def once() -> None:
        x = model["embed"](tokens)  # (B, T, C)
        for block in layers:
            x = block(x, src_mask=mask, is_causal=True)  # (B, T, C)
        logits = model["head"](x)  # (B, T, V)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step(1e-4)

    seconds = bench.measure("step", once)
    used = sum(p.numel() for p in model.parameters()) - VOCABULARY * s.width  # a look-up is free
    attention = 12 * s.layers * s.length * s.width
    return (6.0 * used + attention) * s.batch * s.length / seconds
