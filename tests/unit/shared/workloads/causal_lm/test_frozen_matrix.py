"""Frozen weights in few bits: what adapters learn beside them, and the memory that they take."""

from __future__ import annotations

import os
import subprocess
import sys
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from typing_extensions import override

from shared.errors import InvalidRunFile, NotFound
from shared.workloads.base import TrainSettings, load
from shared.workloads.causal_lm import frozen_matrix
from shared.workloads.causal_lm.config import BasePrecision, CausalConfig, fixed_bytes, frozen_bytes
from shared.workloads.causal_lm.frozen_matrix import FrozenMatrix
from shared.workloads.causal_lm.train import CausalWork
from tests.support.workloads import tiny_causal, tiny_gpt
from tests.support.workloads.tiny_gpt import Folder, Weights

WORKLOAD = load("causal-lm")
NARROW: tuple[BasePrecision, ...] = ("bfloat16", "int8", "nf4")
NEAR = {"bfloat16": 0.01, "int8": 0.02, "nf4": 0.12}  # of the norm of what comes out


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return tiny_gpt.sums(tmp_path_factory.mktemp("blobs"))


def begun(data: Folder, shape: str, precision: BasePrecision, train: str = "lora") -> CausalWork:
    raw = tiny_causal.table(tiny_causal.SHAPES[shape], train=train, base_precision=precision)
    config = WORKLOAD.config(raw, data.manifest)
    settings = TrainSettings(lr=1e-2, warmup_steps=1)
    job = tiny_gpt.job(config, steps=6, workload="causal-lm", train=settings)
    work = WORKLOAD.begin(job, WORKLOAD.init(config, 0), data, "cpu")
    assert isinstance(work, CausalWork)
    return work


def change(work: CausalWork) -> torch.Tensor:
    """The update of a whole task, as one row."""
    start = WORKLOAD.init(work.job.config, 0)
    ended: Weights = tiny_gpt.finish(work)
    return torch.cat([(ended[name] - start[name]).flatten() for name in start])


@pytest.mark.parametrize("precision", NARROW)
def test_a_product_and_its_gradient_are_near_those_of_float32(precision: BasePrecision) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(96, 64) / 8, torch.randn(96)
    matrix = FrozenMatrix(weight, bias, precision)
    x, out = torch.randn(4, 7, 64, requires_grad=True), torch.randn(4, 7, 96)
    expected = torch.nn.functional.linear(x, weight, bias)
    wanted = torch.autograd.grad(expected, x, out)[0]
    found = matrix(x)
    got = torch.autograd.grad(found, x, out)[0]
    for ours, theirs in ((found, expected), (got, wanted)):
        away = (ours - theirs).detach().norm() / theirs.detach().norm()
        assert float(away) < NEAR[precision]
    with torch.autocast("cpu", torch.bfloat16):
        assert matrix(x).dtype == torch.bfloat16


@pytest.mark.parametrize("shape", ["llama", "gpt2", "qwen2"])
def test_adapters_learn_the_same_beside_few_bits(data: Folder, shape: str) -> None:
    plain = change(begun(data, shape, "float32"))
    for precision, least in zip(NARROW, (0.99, 0.98, 0.8), strict=True):
        narrow = change(begun(data, shape, precision))
        assert float(torch.cosine_similarity(plain, narrow, dim=0)) > least, precision


def test_a_head_learns_beside_few_bits_and_pauses_without_a_trace(data: Folder) -> None:
    work = begun(data, "llama", "nf4", train="head")
    while not work.done:
        work.advance()
        work.suspend()
        work.resume()
    whole = begun(data, "llama", "nf4", train="head")
    assert tiny_gpt.same(tiny_gpt.finish(whole), work.result()[1])


@pytest.mark.parametrize("precision", NARROW)
def test_memory_is_what_the_estimate_says(data: Folder, precision: BasePrecision) -> None:
    work = begun(data, "llama", precision)
    config = CausalConfig.from_dict(work.job.config)
    parts = [part for part in work.model.modules() if isinstance(part, FrozenMatrix)]
    held = sum(value.nbytes for part in parts for value in (part.held, part.scales))
    plain = sum(4 * p.numel() for p in work.model.parameters() if not p.requires_grad)
    largest = max(4 * part.dense(torch.float32).numel() for part in parts)
    assert frozen_bytes(config) == held + plain + largest


class Peak(TorchDispatchMode):
    """The most bytes of tensors that were made and alive at one time."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.most = 0
        self._sizes = {value.untyped_storage()._cdata: 0 for value in known}

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for value in tree_iter(made):
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                if storage._cdata not in self._sizes:
                    self._sizes[storage._cdata] = storage.nbytes()
                    self.live += storage.nbytes()
                    self.most = max(self.most, self.live)
                    weakref.finalize(storage, self._freed, storage._cdata)
        return made

    def _freed(self, key: int) -> None:
        self.live -= self._sizes.pop(key, 0)


WIDE = {"hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 4}
WIDE_OF = {"gpt2": {"n_embd": 256, "n_layer": 4, "n_positions": 256}}


@pytest.mark.parametrize("kind", tiny_causal.SHAPES)
def test_a_window_takes_the_memory_that_is_foreseen(data: Folder, kind: str) -> None:
    shape = {**tiny_causal.SHAPES[kind], **WIDE_OF.get(kind, WIDE)}
    if kind != "gpt2":
        shape["max_position_embeddings"] = 256
    shape |= {key: 256 for key in ("sliding_window",) if key in shape}
    shape |= {
        key: 2 * list(shape[key]) for key in ("layer_types", "no_rope_layers") if key in shape
    }
    table = tiny_causal.table({**shape, "vocab_size": 2000}, context=256, train="lora")
    model = WORKLOAD.config(table, None)
    job = tiny_gpt.job(model, steps=1, batch=1, workload="causal-lm")
    weights = WORKLOAD.init(model, 1)
    work = WORKLOAD.begin(job, weights, data, "cpu")
    assert work.halve() == 1
    assert isinstance(work, CausalWork)
    held = [*work.model.parameters(), *work.model.buffers()]
    with Peak([*held, *weights.values()]) as peak:
        work.measure(0, 1)
    frozen = sum(value.nbytes for value in held if not value.requires_grad)
    foreseen = fixed_bytes(CausalConfig.from_dict(model))
    assert foreseen == pytest.approx(frozen + peak.most, rel=0.15)


@pytest.mark.parametrize("shape", ["llama", "gpt2"])
def test_a_window_that_does_not_fit_is_tried_with_less_memory(data: Folder, shape: str) -> None:
    plain, short = begun(data, shape, "float32"), begun(data, shape, "float32")
    while short.halve() > 1:
        pass
    kept = saved_bytes(short)
    assert short.halve() == 1  # blocks are computed anew from now on
    assert saved_bytes(short) < kept / 2
    with pytest.raises(MemoryError):
        short.halve()
    assert tiny_gpt.close(tiny_gpt.finish(short), tiny_gpt.finish(plain), atol=1e-4)


def saved_bytes(work: CausalWork) -> int:
    """Memory that a sample keeps for the way back inside the blocks of a model."""
    found: list[int] = []

    def keep(value: torch.Tensor) -> torch.Tensor:
        found.append(value.nbytes)
        return value

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        work.measure(0, 1)
    return sum(found)


def test_few_bits_need_a_library(data: Folder) -> None:
    raw = tiny_causal.table(tiny_causal.LLAMA, train="lora")
    assert WORKLOAD.config(raw, data.manifest)["base_precision"] == "float32"
    found = WORKLOAD.config({**raw, "base_precision": "nf4"}, data.manifest)
    assert found["base_precision"] == "nf4"
    assert WORKLOAD.libraries(found) == ("bitsandbytes",)
    assert WORKLOAD.libraries({**found, "base_precision": "bfloat16"}) == ()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"train": "all", "base_precision": "nf4"}, 'train = "all" changes them'),
        ({"train": "lora", "base_precision": "int4"}, "base_precision"),
    ],
)
def test_a_precision_that_makes_no_sense_is_refused(
    data: Folder, changes: dict[str, str], sentence: str
) -> None:
    with pytest.raises(InvalidRunFile, match=sentence):
        WORKLOAD.config(tiny_causal.table(tiny_causal.LLAMA, **changes), data.manifest)


def test_a_machine_without_the_library_says_so(
    data: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frozen_matrix, "LIBRARY", "no_such_library")
    with pytest.raises(NotFound, match="need the library no_such_library"):
        begun(data, "llama", "nf4")


@pytest.mark.slow
def test_the_library_fetches_no_code(tmp_path: Path) -> None:
    """With the package `kernels` it would load compiled code of a hub when it is imported."""
    (tmp_path / "kernels.py").write_text("raise SystemExit('it was asked for')")
    source = "from shared.workloads.causal_lm.frozen_matrix import library; library()"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", source], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
