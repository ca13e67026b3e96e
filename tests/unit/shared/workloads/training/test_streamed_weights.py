"""A task whose state stays on the host: its update, and what its device holds meanwhile.

The device "cpu:0" is the processor as a card: its copies of weights are real ones.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from functools import partial
from typing import Any, Literal, cast

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized

from shared.workloads.base import TrainSettings, Weights, Work, load
from shared.workloads.training import step_loop
from shared.workloads.training.step_loop import StepWork
from tests.support.workloads import tiny_causal, tiny_gpt
from tests.support.workloads.tiny_gpt import LLAMA, WORKLOAD, Folder, config, finish, job, same
from tests.unit.shared.workloads.causal_lm.test_frozen_matrix import Peak
from volunteer.machine.device_memory import OutOfMemory
from volunteer.training.job import Finished, TrainingJob
from volunteer.training.trainer import Trainer

CARD = "cpu:0"
CAUSAL = load("causal-lm")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return tiny_gpt.sums(tmp_path_factory.mktemp("blobs"))


def begun(data: Folder, shape: dict[str, Any] | None = None, **changes: Any) -> StepWork:
    model = config(data, **{"dropout": 0.1, **(shape or {})})
    weights = WORKLOAD.init(model, 0)
    return cast(StepWork, WORKLOAD.begin(job(model, **changes), weights, data, CARD))


def causal(data: Folder, kind: str, table: dict[str, Any], **changes: Any) -> StepWork:
    model = CAUSAL.config(tiny_causal.table(tiny_causal.SHAPES[kind], **table), data.manifest)
    task = job(model, workload="causal-lm", **changes)
    return cast(StepWork, CAUSAL.begin(task, CAUSAL.init(model, 1), data, CARD))


def streamed(work: StepWork) -> StepWork:
    assert work.stream(CARD)
    return work


class Copies:
    """Copies of weights on the card, by the block that they belong to."""

    def __init__(self, model: nn.Module, card_bytes: int = 1 << 60) -> None:
        self._made: list[tuple[str, int, StorageWeakRef]] = []
        self._card_bytes = card_bytes
        self.together: set[frozenset[str]] = set()  # blocks whose copies lived at the same time
        for path, part in model.named_modules():
            if isinstance(part, ParametrizationList):
                block = next((name for name in path.split(".") if name.isdigit()), "outer")
                part.register_forward_hook(partial(self._record, block))

    def live(self) -> list[tuple[str, int]]:
        self._made = [
            made
            for made in self._made
            if not made[2].expired()  # type: ignore[no-untyped-call]
        ]
        return [(block, size) for block, size, _ in self._made]

    def _record(self, block: str, module: nn.Module, inputs: object, copy: Tensor) -> None:
        storage = StorageWeakRef(copy.untyped_storage())  # type: ignore[no-untyped-call]
        self._made.append((block, copy.nbytes, storage))
        live = self.live()
        self.together.add(frozenset(name for name, _ in live if name != "outer"))
        if sum(size for _, size in live) > self._card_bytes:
            raise torch.OutOfMemoryError("the card is full")


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "sgd"])
@pytest.mark.parametrize("update", ["delta", "gradient"])
@pytest.mark.parametrize("shape", [{}, {"tie_head": False}, LLAMA, {"bias": True}])
def test_the_update_is_the_same_bit_for_bit(
    data: Folder,
    shape: dict[str, Any],
    update: str,
    optimizer: Literal["adamw", "muon", "sgd"],
) -> None:
    train = TrainSettings(lr=3e-3, warmup_steps=2, optimizer=optimizer, prox_mu=0.1)
    ordinary = begun(data, shape, update=update, train=train)
    work = streamed(begun(data, shape, update=update, train=train))
    assert same(finish(work), finish(ordinary))
    assert work.result()[0] == ordinary.result()[0]


@pytest.mark.parametrize("train", ["all", "lora", "head"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen2", "gemma3_text"])
def test_the_update_of_a_model_of_the_library_is_the_same_bit_for_bit(
    data: Folder, kind: str, train: str
) -> None:
    if train == "head" and kind != "llama":
        pytest.skip("its head is its table of tokens")
    table = {"train": train} | ({"lora": {"dropout": 0.2}} if train == "lora" else {})
    work = streamed(causal(data, kind, table))
    copies = Copies(work.model)
    assert same(finish(work), finish(causal(data, kind, table)))
    assert copies.together == {frozenset(), frozenset("0"), frozenset("1")}


def test_frozen_matrices_of_few_bits_stay_on_the_host(data: Folder) -> None:
    table = {"train": "lora", "base_precision": "bfloat16"}
    work = streamed(causal(data, "llama", table))
    assert is_parametrized(work.model.get_submodule("model.layers.0.mlp.up_proj"), "held")
    assert same(finish(work), finish(causal(data, "llama", table)))


def test_the_card_holds_the_weights_of_one_block_at_a_time(data: Folder) -> None:
    work = streamed(begun(data, {"n_layer": 5}, steps=2, batch=4))
    copies = Copies(work.model)
    while not work.done:
        work.advance()
        assert copies.live() == []  # a pause after a micro-batch frees the card
    assert copies.together == {frozenset(), *(frozenset([str(n)]) for n in range(5))}


WIDE = {"n_embd": 128, "n_layer": 4, "block_size": 128}
WIDE_LLAMA = {"hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 4}


def one_window(data: Folder, kind: str) -> tuple[StepWork, int]:
    """Work on one window, and the memory that is foreseen for it."""
    shapes: dict[str, dict[str, Any]] = {
        "gpt2": {},
        "llama": LLAMA,
        "many tokens": {"vocab_size": 4000},
    }
    if kind in shapes:
        work = begun(data, {**shapes[kind], **WIDE}, steps=1, batch=1)
        return work, WORKLOAD.streamed_bytes(work.job.config)
    shape = {**tiny_causal.LLAMA, **WIDE_LLAMA, "max_position_embeddings": 256}
    model = CAUSAL.config(tiny_causal.table(shape, context=256, train=kind), data.manifest)
    task = job(model, steps=1, batch=1, workload="causal-lm")
    work = cast(StepWork, CAUSAL.begin(task, CAUSAL.init(model, 1), data, CARD))
    return work, CAUSAL.streamed_bytes(model)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "many tokens", "all", "lora"])
def test_a_card_holds_no_more_than_is_foreseen(data: Folder, kind: str) -> None:
    work, foreseen = one_window(data, kind)
    streamed(work)
    weights = list(work.model.parameters())
    for weight in weights:  # gradients of the host are not counted
        weight.grad = torch.zeros_like(weight) if weight.requires_grad else None
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    with Peak([*weights, *gradients, *work.model.buffers()]) as peak:
        torch.autograd.backward(work.measure(0, 1).loss)
    assert 0.4 * foreseen < peak.most < foreseen


def trained(work: StepWork, halved: list[int]) -> Weights:
    """Return the result of a work that a volunteer's training thread does."""
    trainer = Trainer(CARD, threads=1)
    trainer.start()
    task = TrainingJob(
        device=CARD,
        begin=lambda: work,
        finish=lambda done, spent: done.result()[1],
        samples=1,
        report=lambda progress: None,
        halved=halved.append,
    )
    try:
        outcome = trainer.submit(task).future.result(60)
    finally:
        assert trainer.close(20.0)
    assert isinstance(outcome, Finished)
    return outcome.value


def test_a_card_that_is_too_small_for_the_state_is_filled_with_samples(data: Folder) -> None:
    work = begun(data)

    def refuse(block: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """Have room for the activations of four samples, and for one block's weights."""
        if len(inputs[0]) > 4 or not is_parametrized(block.get_submodule("mlp.up"), "weight"):
            raise torch.OutOfMemoryError("the card is full")

    work.model.get_submodule("blocks.1").register_forward_pre_hook(refuse)
    halved: list[int] = []
    learnt = trained(work, halved)
    assert halved == [4, 2, 1, 1, 8, 4]  # then blocks are recomputed, then the state leaves
    expected = begun(data)
    expected.begin_with(4, most=True, room=0)
    assert same(learnt, finish(expected))


def test_a_card_that_is_too_small_for_a_block_gives_the_task_back(data: Folder) -> None:
    work = streamed(begun(data))
    Copies(work.model, card_bytes=10_000)
    with pytest.raises(OutOfMemory, match="one sample alone"):
        trained(work, [])


def halve_on(work: Work) -> None:
    """Save memory for as long as the work goes along."""
    while True:
        work.halve()


def test_the_processor_has_no_other_memory_to_leave_to(data: Folder) -> None:
    model = config(data)
    work = WORKLOAD.begin(job(model), WORKLOAD.init(model, 0), data, "cpu")
    with pytest.raises(MemoryError):
        halve_on(work)
    assert isinstance(work, StepWork)
    assert not is_parametrized(work.model.get_submodule("tok_emb"))


@pytest.mark.parametrize("update", ["delta", "gradient"])
@pytest.mark.parametrize("to_host", [True, False])
def test_a_snapshot_is_that_of_any_other_work(data: Folder, update: str, to_host: bool) -> None:
    expected = finish(begun(data, update=update))
    ordinary, work = begun(data, update=update), streamed(begun(data, update=update))
    before, after = (ordinary, work) if to_host else (work, ordinary)
    before.advance()
    before.advance()
    after.restore(before.snapshot())
    assert same(finish(after), expected)


def test_a_task_goes_on_from_its_last_step_when_its_state_leaves_the_card(data: Folder) -> None:
    expected = finish(begun(data))
    work = begun(data)
    work.advance()
    assert same(finish(streamed(work)), expected)


def test_a_pause_within_a_micro_batch_changes_nothing(
    data: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_loop, "_EVERY_S", 0.0)
    expected = finish(begun(data))
    work = streamed(begun(data))
    copies, looks = Copies(work.model), itertools.count()

    def look() -> None:
        if next(looks) in (5, 40, 90):
            raise InterruptedError

    work.listen(look)
    interrupted = 0
    while not work.done:
        try:
            work.advance()
        except InterruptedError:
            interrupted += 1
        work.suspend()
        assert copies.live() == []
        work.resume()
    assert interrupted == 3
    assert same(work.result()[1], expected)


def test_finished_work_leaves_the_memory_without_a_garbage_collection(data: Folder) -> None:
    gc.collect()
    gc.disable()
    try:
        work = streamed(begun(data))
        work.listen(lambda: None)
        finish(work)
        model, own = weakref.ref(work.model), weakref.ref(work)
        del work
        assert (own(), model()) == (None, None)
    finally:
        gc.enable()
