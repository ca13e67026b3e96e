"""Model built by an author's code: its tensors, its batches and its loss, on one device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from shared.errors import InvalidFrame, InvalidRunFile
from shared.tensors.spec import Role
from shared.workloads.base import Config, Data, Weights
from shared.workloads.data.image_chunks import Images, unit_range
from shared.workloads.data.windows import Windows
from shared.workloads.derived.derived_facts import BLOCK, DataKind, derived_of, image_shape
from shared.workloads.derived.model_code import DERIVED, ModelCode, TrainerLike, load_code, table_of
from shared.workloads.derived.sample_records import Records
from shared.workloads.derived.seeded_draws import InitialDraws, SeededDraws
from shared.workloads.training.device_differences import to_device, to_host

Layout = tuple[tuple[str, tuple[int, ...], Role], ...]


class BuiltModel:
    """Model of a config on a device, with the weights of a version, or new weights drawn by a
    seed.
    """

    def __init__(
        self,
        reference: str,
        config: Config,
        *,
        weights: Weights | None = None,
        device: str = "cpu",
        seed: int = 0,
    ) -> None:
        self.code: ModelCode[Any, Any] = load_code(reference)
        table = {key: value for key, value in config.items() if key != DERIVED}
        self._table = table_of(self.code, table)
        layout = derived_of(config).tensors
        self._check_on_meta(layout)
        with SeededDraws(InitialDraws(seed)):
            self.model: nn.Module = self.code.build(self._table).float()
        self._check(layout_of(self.model), layout)
        self._trainer: TrainerLike | None = (
            self.code.trainer(self.model) if self.code.trainer else None
        )
        if weights is not None:
            self._load(weights)
        self.model.to(device)

    def tensors(self) -> dict[str, Tensor]:
        """Return copies of the tensors of a version, on the CPU."""
        return {name: to_host(value) for name, value in _tensors(self.model)}

    def buffers(self) -> dict[str, Tensor]:
        """Return the tensors of a version that no gradient changes."""
        return {name: value for name, value in _tensors(self.model) if not value.requires_grad}

    def whole(self) -> dict[str, Tensor]:
        """Return the model's whole state, a tied tensor under each of its names."""
        return {name: value.detach().clone() for name, value in self.model.state_dict().items()}

    def loss(self, batch: object) -> Tensor:
        """Return the mean loss of a batch, a scalar. Raises InvalidRunFile for another value."""
        name, value = self._value(batch)
        if isinstance(value, Mapping):
            value = value.get("loss")
        if isinstance(value, Tensor) and value.numel() == 1:
            return value.reshape(()).float()
        result = (
            f"a tensor of the shape {tuple(value.shape)}" if isinstance(value, Tensor) else value
        )
        raise InvalidRunFile(
            f"{self.code.file}: {name}() returned {result}: return one number, the mean over the"
            " batch (end it with .mean())"
        )

    def _value(self, batch: object) -> tuple[str, object]:
        """Return the name of the function that gives the loss, and its result."""
        if self.code.loss is not None:
            return self.code.loss.__name__, self.code.loss(self.model, batch)
        if self._trainer is not None:
            return "compute_loss", self._trainer.compute_loss(self.model, batch)
        return "training_step", _training_step(self.code, self.model)(batch, 0)

    def batch(self, samples: Sequence[object]) -> Any:
        """Return a batch of samples on the CPU: stacked, or by the author's own function. Raises
        InvalidRunFile if that function returns another number of samples.
        """
        collate = self.code.batch
        if collate is None and self._trainer is not None:
            collate = self._trainer.data_collator
        if collate is None:
            return _stacked(samples)
        batch = collate(list(samples))
        rows = [value.shape[0] for value in _leaves(batch) if value.ndim]
        if rows and len(samples) not in rows:
            raise InvalidRunFile(
                f"{self.code.file}: a batch of {len(samples)} samples has {rows[0]} rows: the"
                " function that makes batches must keep every sample"
            )
        return batch

    @property
    def collates(self) -> bool:
        """Return True if batches are made by a function of the author's."""
        return self.code.batch is not None or self._trainer is not None

    def token_sample(self, window: Tensor) -> object:
        """Return a window of tokens as the code's functions expect it."""
        return window if self._trainer is None else {"input_ids": window, "labels": window}

    def _check_on_meta(self, layout: Layout) -> None:
        """Check the shapes before a wrong config takes memory, for models that can be built without
        memory.
        """
        try:
            with torch.device("meta"):
                model = self.code.build(self._table)
            here = layout_of(model)
        except Exception:  # the model computes with numbers while it is built
            return
        self._check(here, layout)

    def _check(self, here: Layout, layout: Layout) -> None:
        if here == layout:
            return
        pairs = zip(here, layout, strict=False)
        first = next((pair for pair in pairs if pair[0] != pair[1]), (here[-1], layout[-1]))
        raise InvalidFrame(
            f"{self.code.file}: {self.code.model.__name__}() builds another model here than where"
            f" the run was created ({' and '.join(map(_in_words, first))}): its shapes must follow"
            " from [model] alone, and both sides need the same release of it"
        )

    def _load(self, weights: Weights) -> None:
        with torch.no_grad():
            for name, value in _tensors(self.model):
                if name not in weights or weights[name].shape != value.shape:
                    raise InvalidFrame(f"{name} of this version does not fit {self.code.file}")
                value.copy_(weights[name])


class SampleBatches:
    """Samples of a dataset, each (chunk, number in the chunk), in batches for a model."""

    def __init__(
        self,
        built: BuiltModel,
        kind: DataKind,
        config: Config,
        data: Data,
        rows: NDArray[np.int64],
    ) -> None:
        self._built = built
        self._kind = kind
        manifest = data.manifest
        self._images = self._windows = self._records = None
        if kind == "images":
            self._images = Images(data, image_shape(manifest), rows)
        elif kind == "tokens":
            vocab = int(manifest.meta.get("vocab_size", 0))
            self._windows = Windows(data, int(config[BLOCK]), vocab, rows)
        else:
            self._records = Records(data, rows)

    def read(self, start: int, stop: int, device: str) -> Any:
        """Return a batch of samples [start, stop) on a device. Raises InvalidRunFile."""
        return on_device(self.on_host(start, stop), device)

    def on_host(self, start: int, stop: int) -> Any:
        stacked = self.fields(start, stop)
        if not self._built.collates:
            return structure(stacked)
        if self._kind == "tokens":
            return self._built.batch([self._built.token_sample(row) for row in stacked[""]])
        parts = [
            structure({name: value[index] for name, value in stacked.items()})
            for index in range(stop - start)
        ]
        return self._built.batch(parts)

    def fields(self, start: int, stop: int) -> dict[str, Tensor]:
        """Return samples [start, stop), stacked, by the name of the field."""
        if self._images is not None:
            return {"": torch.from_numpy(unit_range(self._images.read(start, stop)))}
        if self._windows is not None:
            return {"": torch.from_numpy(self._windows.read(start, stop))}
        assert self._records is not None
        fields = self._records.read(start, stop)
        return {name: torch.from_numpy(np.ascontiguousarray(v)) for name, v in fields.items()}


def layout_of(model: nn.Module) -> Layout:
    """Return the tensors of a version of the model: parameters, then buffers."""
    return tuple((name, tuple(value.shape), _role(value)) for name, value in _tensors(model))


def _role(value: Tensor) -> Role:
    if value.requires_grad:
        return "parameter"
    return "buffer" if value.is_floating_point() else "counter"


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters, then buffers of the state; a tied tensor counts once."""
    yield from model.named_parameters()
    state = model.state_dict()
    for name, value in model.named_buffers():
        if name in state:
            yield name, value


def structure(fields: Mapping[str, Tensor]) -> Any:
    """Return the fields of samples in the form in which the author made them."""
    if list(fields) == [""]:
        return fields[""]
    if all(name == str(index) for index, name in enumerate(fields)):
        return tuple(fields.values())
    return dict(fields)


def _stacked(samples: Sequence[Any]) -> Any:
    first = samples[0]
    if isinstance(first, Mapping):
        return {name: torch.stack([sample[name] for sample in samples]) for name in first}
    if isinstance(first, tuple):
        return tuple(map(torch.stack, zip(*samples, strict=True)))
    return torch.stack(list(samples))


def _leaves(batch: object) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _leaves(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from _leaves(value)


def on_device(batch: Any, device: str) -> Any:
    """Return a batch with its tensors on a device."""
    if isinstance(batch, Tensor):
        return to_device(batch, device)
    if isinstance(batch, Mapping):
        return {name: on_device(value, device) for name, value in batch.items()}
    if isinstance(batch, list | tuple):
        return type(batch)(on_device(value, device) for value in batch)
    return batch


def _training_step(code: ModelCode[Any, Any], model: Any) -> Any:
    step = getattr(model, "training_step", None)
    if step is None:
        raise InvalidRunFile(
            f"{code.file}: ModelCode has no loss: give it a function `loss(model, batch)` that"
            " returns the mean loss, or a `trainer`"
        )
    return step


def _in_words(tensor: tuple[str, tuple[int, ...], Role]) -> str:
    return f"{tensor[0]} {list(tensor[1])}"
