"""Code of an author's model: the functions of a derived workload, and its table `[model]`.

This module does not import torch; the author's module may.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, get_type_hints

import msgspec

from shared.decoding import complaint, convert
from shared.errors import InvalidRunFile, VolunteerError
from shared.settings import Table, check_keys, read_table

if TYPE_CHECKING:
    from torch import Tensor, nn

M = TypeVar("M", bound="nn.Module")
B = TypeVar("B")

DERIVED = "derived"  # key of a config that holds what was derived from the code


class TrainerLike(Protocol):
    """Trainer of another library, such as Hugging Face's: a loss and a collator."""

    data_collator: Callable[[list[Any]], Any]

    def compute_loss(self, model: Any, inputs: Any) -> Any: ...


@dataclasses.dataclass(frozen=True)
class ModelCode(Generic[M, B]):
    """Functions of an author.

    `model` builds a torch model; its parameters, or the fields of a dataclass that it takes, are
    the keys of `[model]`. `loss` returns the mean loss of a batch; `trainer`, in place of `loss`,
    returns an object with `compute_loss` and `data_collator`; without `loss` and `trainer` the
    model has Lightning's `training_step`. `samples` yields samples of files: tuples or dicts of
    arrays and numbers, each of the same shapes. `batch` makes a batch of a list of samples, in
    place of stacking them. `draw` returns a number of pictures of the model, (N, C, H, W) from -1
    to 1.
    """

    model: Callable[..., M]
    loss: Callable[[M, B], Tensor] | None = None
    samples: Callable[..., Iterable[object]] | None = None
    batch: Callable[[list[Any]], B] | None = None
    trainer: Callable[[M], TrainerLike] | None = None
    draw: Callable[[M, int], Tensor] | None = None

    @property
    def file(self) -> str:
        """Return the author's file, for sentences."""
        return file_of(sys.modules[self.model.__module__].__file__ or self.model.__module__)

    def build(self, table: Mapping[str, object]) -> M:
        """Return a new model of a checked table. Raises InvalidRunFile."""
        from torch import nn

        kind = _dataclass_of(self.model)
        built = self.model(kind(**table)) if kind else self.model(**table)
        if not isinstance(built, nn.Module):
            raise InvalidRunFile(
                f"{self.file}: {self.model.__name__}() returned {type(built).__name__}: return a"
                " torch.nn.Module"
            )
        return built


def file_of(path: str) -> str:
    """Return the last two parts of a path."""
    return "/".join(Path(path).parts[-2:])


def load_code(reference: str) -> ModelCode[Any, Any]:
    """Return the code at "module:name". Raises InvalidRunFile."""
    module_name, _, name = reference.partition(":")
    try:
        module = import_module(module_name)
    except Exception as error:
        raise InvalidRunFile(
            f"the module {module_name} cannot be imported: {_complaint(error, module_name)}"
        ) from error
    code = vars(module).get(name)
    if not isinstance(code, ModelCode):
        raise InvalidRunFile(
            f"{file_of(module.__file__ or module_name)} has no ModelCode of the name {name}: end it"
            f" with `{name} = ModelCode(model, loss)`, the functions of your model"
        )
    return code


@contextmanager
def errors_of(code: ModelCode[Any, Any]) -> Iterator[None]:
    """Turn an author's errors into InvalidRunFile with file and line."""
    try:
        yield
    except VolunteerError:
        raise
    except Exception as error:
        raise InvalidRunFile(_complaint(error, code.model.__module__)) from error


def _complaint(error: Exception, module_name: str) -> str:
    """Return an author's error as a sentence, with the last line of the author's own package."""
    package = module_name.partition(".")[0]
    frames = traceback.extract_tb(error.__traceback__)
    frames_there = (
        f for f in reversed(frames) if package in Path(f.filename).with_suffix("").parts
    )
    place = next(frames_there, None)
    where = f"{file_of(place.filename)} line {place.lineno}: " if place else ""
    return f"{where}{type(error).__name__}: {error}"[:600]


def table_of(code: ModelCode[Any, Any], values: Mapping[str, object]) -> dict[str, object]:
    """Return the checked table `[model]` with its defaults. Raises InvalidRunFile."""
    return msgspec.structs.asdict(read_table(values, _table(code, code.model), "[model]"))


def options_of(code: ModelCode[Any, Any], options: Mapping[str, str]) -> dict[str, object]:
    """Return the options for the author's `samples`, converted to the types of its parameters. Its
    first parameter, the files, is no option. Raises InvalidRunFile.
    """
    if code.samples is None:
        raise InvalidRunFile(
            f"{code.file} makes no samples: add a function `samples(paths)` that yields them, and"
            " give it to ModelCode"
        )
    kind = _table(code, code.samples, skip=1)
    check_keys(options, kind.__struct_fields__, "--set")
    try:
        return msgspec.structs.asdict(convert(dict(options), kind, strict=False))
    except msgspec.ValidationError as error:
        raise InvalidRunFile(complaint(error, "--set", kind)) from error


def names_of(code: ModelCode[Any, Any]) -> Sequence[str]:
    """Return the keys of `[model]`."""
    return _table(code, code.model).__struct_fields__


def _dataclass_of(function: Callable[..., object]) -> type | None:
    """Return the dataclass that is the only parameter of a function; None for another function."""
    parameters = list(inspect.signature(function).parameters)
    kind = get_type_hints(function).get(parameters[0]) if len(parameters) == 1 else None
    return kind if isinstance(kind, type) and dataclasses.is_dataclass(kind) else None


def _table(
    code: ModelCode[Any, Any], function: Callable[..., object], skip: int = 0
) -> type[msgspec.Struct]:
    """Return the parameters of a function as a table. Raises InvalidRunFile for a parameter without
    a type.
    """
    source = _dataclass_of(function) or function
    hints = get_type_hints(source, include_extras=True)
    fields: list[tuple[str, Any] | tuple[str, Any, Any]] = []
    for parameter in list(inspect.signature(source).parameters.values())[skip:]:
        has_default = parameter.default is not parameter.empty
        kind = hints.get(parameter.name, type(parameter.default) if has_default else None)
        if kind is None or parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            raise InvalidRunFile(
                f"{code.file}: {function.__name__}() takes {parameter.name} without a type or a"
                f" default: write `{parameter.name}: int = 1`, a key of the run file"
            )
        name = parameter.name
        fields.append((name, kind, parameter.default) if has_default else (name, kind))
    return msgspec.defstruct("ModelTable", fields, bases=(Table,), frozen=True, kw_only=True)
