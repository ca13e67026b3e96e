"""Table `[model]` of a run of language models: an architecture, and its trained part.

This module imports neither torch nor transformers, so a command line may use it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from shared.errors import InvalidRunFile
from shared.nearest_name import hint
from shared.settings import check_keys, read_table
from shared.tensors.spec import Schema, TensorSpec, streamed_nbytes
from shared.text import escaped
from shared.workloads.base import ChunkRef, DatasetManifest, Origin
from shared.workloads.causal_lm import architectures, hub, model_folder
from shared.workloads.causal_lm.architectures import Shape, read_shape
from shared.workloads.causal_lm.base_settings import BaseSettings, read_base_settings
from shared.workloads.data.tokenizer import MARKED, dtype_of
from shared.workloads.data.windows import windows_of

BASE = "base"  # prefix of frozen files among the assets of a dataset
HEAD = "lm_head.weight"
ALL_LINEAR = "all-linear"  # value of targets for every matrix inside blocks, as in peft
LIBRARY = "bitsandbytes"  # library for frozen weights in 8 and 4 bits
BasePrecision = Literal["float32", "bfloat16", "int8", "nf4"]
_BYTES: Mapping[BasePrecision, float] = {  # bytes a number, with its part of a block's scale
    "float32": 4.0,
    "bfloat16": 2.0,
    "int8": 1.0 + 4 / 64,
    "nf4": 0.5 + 4 / 64,
}
_CONTEXT = 256  # tokens of a window by default, if the model allows as many
_RANK_MAX = 1024
_FILE_BYTES_MAX = 1 << 40
_LICENCE_CHARS_MAX = 100
_SHA256 = re.compile(r"[0-9a-f]{64}")
_FIRST = {  # matrices adapted by default: of attention, for GPT-2 without its output
    "gpt2": ("c_attn",),
    "gpt_neox": ("query_key_value", "dense"),
    "phi3": ("qkv_proj", "o_proj"),
}
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


class Lora(msgspec.Struct, frozen=True, kw_only=True):
    """Low-rank adapters (Hu et al. 2022): W + alpha / rank B A, with W frozen.

    With `rslora` (Kalajdzievski 2023) alpha is divided by the root of the rank.
    """

    rank: int = 8
    alpha: float = 16.0
    rslora: bool = False
    dropout: float = 0.0  # dropout of an adapter's input
    targets: tuple[str, ...] = ()  # last parts of the names of adapted matrices
    modules_to_save: tuple[str, ...] = ()  # trained whole: table of tokens, head

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= _RANK_MAX:
            raise InvalidRunFile(f"[model.lora] rank must lie between 1 and {_RANK_MAX}")
        if not 0 < self.alpha <= 65536:
            raise InvalidRunFile("[model.lora] alpha must lie above 0, up to 65536")
        if not 0 <= self.dropout < 1:
            raise InvalidRunFile("[model.lora] dropout must be at least 0 and below 1")

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


class _Table(msgspec.Struct, frozen=True, kw_only=True):
    config: dict[str, object]
    source: str = msgspec.field(name="from", default="")
    files: dict[str, ChunkRef] = {}
    licence: str = ""
    context: int = 0
    train: Literal["all", "lora", "head"] = "all"
    lora: dict[str, object] | None = None
    base_precision: BasePrecision = "float32"
    base: dict[str, object] = {}


TABLE_KEYS = _Table.__struct_encode_fields__  # keys of [model] in a run file


class CausalConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Checked table `[model]`."""

    shape: Shape
    context: int  # tokens of a window
    lora: Lora | None  # None = every weight is trained
    source: str = ""  # folder of the first weights, or hub:OWNER/NAME@COMMIT
    files: Mapping[str, ChunkRef] = {}  # files of the first weights, by name
    licence: str = ""  # licence of the model in `source`
    head: bool = False  # only the head is trained
    base_precision: BasePrecision = "float32"  # precision of frozen matrices inside blocks
    base: BaseSettings = BaseSettings()  # settings of the model in `source`

    @property
    def frozen(self) -> bool:
        """Return True if some weights of the model are not trained."""
        return self.lora is not None or self.head

    @property
    def train(self) -> Literal["all", "lora", "head"]:
        return "lora" if self.lora is not None else "head" if self.head else "all"

    @classmethod
    def from_dict(cls, raw: Mapping[str, object]) -> CausalConfig:
        """Return a checked table as a struct. Raises InvalidRunFile as `read_table` does."""
        if "config" not in raw:
            check_keys(raw, TABLE_KEYS, "[model]")
            raise InvalidRunFile(
                '[model] needs config = { model_type = "llama", ... }, the architecture to train'
                ' from nothing, or from = "FOLDER" (or "hub:OWNER/NAME@REVISION") with a model to'
                " train further"
            )
        table = read_table(raw, _Table, "[model]")
        shape = read_shape(table.config)
        context = table.context or min(_CONTEXT, shape.positions)
        if not 2 <= context <= shape.positions:
            raise InvalidRunFile(
                f"[model] context {context} must lie between 2 and the {shape.positions} tokens"
                " that this model reads at once"
            )
        if table.train != "lora" and table.lora is not None:
            raise InvalidRunFile(
                f'[model.lora] is for train = "lora"; this run has train = "{table.train}"'
            )
        if table.train == "head" and shape.tie_word_embeddings:
            raise InvalidRunFile(
                '[model] train = "head": this model uses its table of tokens as its head'
                ' (tie_word_embeddings), which cannot be trained alone: take train = "lora"'
            )
        if table.train == "all" and table.base_precision != "float32":
            raise InvalidRunFile(
                f'[model] base_precision = "{table.base_precision}" is for weights that stay as'
                ' they are, and train = "all" changes them: take train = "lora"'
            )
        lora = _lora(shape, table.lora or {}) if table.train == "lora" else None
        _check_files(table.files)
        if table.source and not table.files:
            raise InvalidRunFile("[model] has both config and from: give one of them")
        if table.source.startswith(hub.PREFIX) and not hub.reference(table.source).pinned:
            raise InvalidRunFile("[model] from: the revision of this run is not a commit")
        if len(table.licence) > _LICENCE_CHARS_MAX:
            raise InvalidRunFile(f"[model] licence has more than {_LICENCE_CHARS_MAX} characters")
        return cls(
            shape=shape,
            context=context,
            lora=lora,
            head=table.train == "head",
            source=table.source,
            files=table.files,
            licence=table.licence,
            base_precision=table.base_precision,
            base=read_table(table.base, BaseSettings, "model.base"),
        )

    def to_dict(self) -> dict[str, object]:
        """Return the table with every default written out."""
        return {
            "config": architectures.written(self.shape),
            "from": self.source,
            "files": {name: msgspec.structs.asdict(file) for name, file in self.files.items()},
            "licence": self.licence,
            "base_precision": self.base_precision,
            "base": msgspec.to_builtins(self.base),
            "context": self.context,
            "train": self.train,
            "lora": None if self.lora is None else _written(self.lora),
        }


def _written(lora: Lora) -> dict[str, object]:
    """Return the table of adapters in stored form, its tuples as lists."""
    fields = msgspec.structs.asdict(lora)
    return fields | {name: list(fields[name]) for name in ("targets", "modules_to_save")}


def config_for(raw: Mapping[str, object], manifest: DatasetManifest | None) -> CausalConfig:
    """Return the config of a run on this dataset, with the vocab filled in and the context
    checked against the chunks. Raises InvalidRunFile.
    """
    if raw.get("from") and not raw.get("files"):
        raw = _taken_up(raw, manifest)
    if manifest is None:
        return CausalConfig.from_dict(raw)
    vocab = int(manifest.meta.get("vocab_size", 0))
    settings = raw.get("config")
    if vocab and isinstance(settings, Mapping) and "vocab_size" not in settings:
        raw = {**raw, "config": {**settings, "vocab_size": vocab}}
    config = CausalConfig.from_dict(raw)
    if config.shape.vocab_size < vocab:
        raise InvalidRunFile(
            f"[model.config] vocab_size {config.shape.vocab_size} is below the {vocab} tokens of"
            f' the dataset "{manifest.name}", whose tokenizer is not this model\'s'
        )
    if dtype_of(manifest) == MARKED:
        if not sum(windows_of(manifest, config.context)):
            raise InvalidRunFile(f'the dataset "{manifest.name}" has no answers to learn from')
        return config
    for chunks, use in ((manifest.chunks, "train on"), (manifest.heldout, "hold out")):
        longest = max((chunk.items for chunk in chunks), default=config.context + 1)
        if longest <= config.context:
            raise InvalidRunFile(
                f'the dataset "{manifest.name}" has no more than {longest} tokens in one piece to'
                f" {use}: [model] context must be at most {longest - 1}, or add more text"
            )
    return config


def _taken_up(raw: Mapping[str, Any], manifest: DatasetManifest | None) -> dict[str, Any]:
    """Read the folder or hub's model named by a run file, once, when its run is created. Raises
    InvalidRunFile.
    """
    check_keys(raw, TABLE_KEYS, "[model]")
    if "config" in raw:
        raise InvalidRunFile("[model] has both config and from: give one of them")
    if not isinstance(raw["from"], str):
        raise InvalidRunFile("[model] from must be a folder, or hub:OWNER/NAME@REVISION")
    raw = dict(raw)
    if raw["from"].startswith(hub.PREFIX):
        model = hub.resolved(raw["from"])
        _check_licence(raw, model)
        folder = hub.fetched(model)
        raw |= {"from": model.reference.text, "licence": model.licence}
    else:
        folder = Path(raw["from"]).expanduser()
    shape, files = model_folder.read_folder(folder)
    tokenizer_hash = model_folder.tokenizer_sha256(folder)
    used = manifest.assets.get("tokenizer") if manifest else None
    if (
        manifest
        and tokenizer_hash is not None
        and used is not None
        and used.sha256 != tokenizer_hash
    ):
        kind = "chat" if manifest.meta.get("dtype") == MARKED else "text"
        raise InvalidRunFile(
            f'the dataset "{manifest.name}" was made with another tokenizer than this model\'s:'
            f" coordinator dataset add NAME --tokenizer {folder / model_folder.TOKENIZER}"
            f" --{kind} PATH makes one with its own"
        )
    file_fields = {name: msgspec.structs.asdict(file) for name, file in files.items()}
    base = read_base_settings(folder, model_folder.settings_in(folder))
    more = {"files": file_fields, "base": msgspec.to_builtins(base)}
    return {**raw, "config": architectures.written(shape), **more}


def _check_licence(raw: Mapping[str, object], model: hub.HubModel) -> None:
    """Raise InvalidRunFile for a model whose licence differs from the run file's."""
    licence = raw.get("licence")
    if licence and licence != model.licence:
        raise InvalidRunFile(
            f"[model] licence: {model.reference.text} is under {model.licence or 'no licence'}, not"
            f" under {escaped(str(licence), 64)}: read it, then change or remove the line"
        )


def folder_of(config: CausalConfig) -> Path:
    """Return the folder with the files of a run's first weights."""
    if config.source.startswith(hub.PREFIX):
        return hub.folder_of(config.source, config.files)
    return Path(config.source).expanduser()


def origin(config: CausalConfig) -> Origin | None:
    """Return the base model of a run; for a folder only its name, since its path is private. None
    for a run that begins with random weights.
    """
    if not config.source:
        return None
    total = sum(file.size for file in config.files.values())
    if not config.source.startswith(hub.PREFIX):
        return Origin(name=Path(config.source).name, licence=config.licence, size=total)
    paths = {
        file.sha256: hub.path_on_hub(config.source, name) for name, file in config.files.items()
    }
    name = config.source.removeprefix(hub.PREFIX)
    return Origin(name=name, licence=config.licence, size=total, paths=paths)


def frozen_files(config: CausalConfig) -> dict[str, ChunkRef]:
    """Return the files of frozen weights by asset name; {} if version 0 holds all weights."""
    return {f"{BASE}/{name}": file for name, file in config.files.items()} if config.frozen else {}


def _check_files(files: Mapping[str, ChunkRef]) -> None:
    """Raise InvalidRunFile for names and sizes that no folder can have."""
    if len(files) > model_folder.FILES_MAX:
        raise InvalidRunFile(f"[model] files names more than {model_folder.FILES_MAX} files")
    for name, file in files.items():
        plain = model_folder.SHARD.fullmatch(name) and _SHA256.fullmatch(file.sha256)
        if not plain or not 0 <= file.size <= _FILE_BYTES_MAX:
            raise InvalidRunFile(f"[model] files: {escaped(name, 120)!r} is not a file of weights")


def schema(config: CausalConfig) -> Schema:
    """Return every tensor of a version: the whole model's, its adapters', or its head."""
    whole = architectures.schema(config.shape)
    if not config.frozen:
        return whole
    trained = trained_whole(config)
    specs = [spec for spec in whole if spec.name in trained]
    rank = config.lora.rank if config.lora is not None else 0
    for name, (outputs, inputs) in adapted(config).items():
        specs.append(TensorSpec(f"{name}.lora_A.weight", (rank, inputs)))
        specs.append(TensorSpec(f"{name}.lora_B.weight", (outputs, rank)))
    return tuple(specs)


def trained_whole(config: CausalConfig) -> tuple[str, ...]:
    """Return the trained weights, head or table of tokens, of a base model whose other weights are
    frozen; () if it has none, or all its weights are trained.
    """
    if config.lora is None:
        return (HEAD,) if config.head else ()
    modules = token_modules(config.shape)
    return tuple(f"{modules[name]}.weight" for name in config.lora.modules_to_save)


def token_modules(shape: Shape) -> dict[str, str]:
    """Return the modules whose matrices have a row for each token, by the last parts of their
    names: table of tokens and head. A table that is the head too is returned only if it has the
    name "embed_tokens", which peft ties to the head.
    """
    table = next(name for name, _ in shape.shapes()).removesuffix(".weight")
    modules = {table.rpartition(".")[2]: table}
    if shape.tie_word_embeddings:
        return modules if "embed_tokens" in modules else {}
    return {**modules, "lm_head": "lm_head"}


def adapted(config: CausalConfig) -> dict[str, tuple[int, int]]:
    """Return the matrices with adapters, and their (outputs, inputs); {} without adapters."""
    if config.lora is None:
        return {}
    return {
        name: size
        for name, size in _matrices(config.shape).items()
        if name.rpartition(".")[2] in config.lora.targets
    }


def flops_per_sample(config: CausalConfig) -> float:
    """Return the FLOPs of training on one window of T tokens.

    Matrices of N numbers take 6 N T, frozen matrices 4 N T (no gradient of their own), or 2 N T if
    only the head learns. Attention takes 12 L C T^2 (L layers, C wide), a third if only the head
    learns.
    """
    T, shape = config.context, config.shape
    inside = sum(a * b for name, (a, b) in _matrices(shape).items() if f"{name}.weight" != HEAD)
    matrices = inside + shape.vocab_size * _width(shape)  # the head
    attention = 12.0 * shape.layers * shape.attention_width * T * T
    if config.head:
        return (2.0 * matrices + 4.0 * (matrices - inside)) * T + attention / 3
    if config.lora is None:
        return 6.0 * matrices * T + attention
    trained = trained_whole(config)
    adapter_count = sum(spec.count for spec in schema(config) if spec.name not in trained)
    scores = HEAD in trained or (bool(trained) and shape.tie_word_embeddings)
    adapter_flops = 6.0 * adapter_count + (2.0 * (matrices - inside) if scores else 0.0)
    return (4.0 * matrices + adapter_flops) * T + attention


def fixed_bytes(config: CausalConfig) -> int:
    """Return the bytes of the frozen weights and of one window's activations.

    The activations are the inputs of all blocks plus the larger of two needs: the inputs and
    outputs of one block's matrices, recomputed, or two and a half times the logits (loss, gradient,
    a bfloat16 copy).
    """
    return _activation_bytes(config) + (frozen_bytes(config) if config.frozen else 0)


def streamed_bytes(config: CausalConfig) -> int:
    """Return the bytes of a device for one window while the weights stay on the host: copies of one
    block's weights and of those outside blocks, their gradients, and the activations.
    """
    trained = schema(config) if config.frozen else ()
    whole = (*architectures.schema(config.shape), *trained)
    return 2 * streamed_nbytes(whole) + 2 * _activation_bytes(config)


def _activation_bytes(config: CausalConfig) -> int:
    shape, T = config.shape, config.context
    largest = max(_by_block(shape).values(), default=0)
    return 4 * T * (shape.layers * _width(shape) + max(largest, 5 * shape.vocab_size // 2))


def frozen_bytes(config: CausalConfig) -> int:
    """Return the bytes of the frozen weights, and of one matrix expanded for use."""
    whole = architectures.count(config.shape)
    if config.base_precision == "float32":
        return 4 * whole
    sizes = [outputs * inputs for outputs, inputs in held_in_few(config.shape).values()]
    return round(4 * (whole - sum(sizes) + max(sizes)) + _BYTES[config.base_precision] * sum(sizes))


def held_in_few(shape: Shape) -> dict[str, tuple[int, int]]:
    """Return the blocks' matrices stored in `base_precision`, with their (outputs, inputs)."""
    return {name: size for name, size in _matrices(shape).items() if f"{name}.weight" != HEAD}


def libraries(config: CausalConfig) -> tuple[str, ...]:
    """Return the libraries that training needs besides the workload's own; () if it needs none."""
    return (LIBRARY,) if config.base_precision in ("int8", "nf4") else ()


def _by_block(shape: Shape) -> dict[str, int]:
    """Return for each block how many numbers its matrices read and write for each token."""
    by_block: dict[str, int] = {}
    for name, (outputs, inputs) in held_in_few(shape).items():
        block = next(part for part in name.split(".") if part.isdigit())
        by_block[block] = by_block.get(block, 0) + outputs + inputs
    return by_block


def _width(shape: Shape) -> int:
    return shape.n_embd if isinstance(shape, architectures.Gpt2Shape) else shape.hidden_size


def _matrices(shape: Shape) -> dict[str, tuple[int, int]]:
    """Return the matrices that may have adapters, with their (outputs, inputs)."""
    turned = isinstance(shape, architectures.Gpt2Shape)
    matrices = {}
    for name, size in shape.shapes():
        module, _, part = name.rpartition(".")
        inside = any(part.isdigit() for part in name.split("."))
        if part == "weight" and len(size) == 2 and (inside or (name == HEAD and not turned)):
            matrices[module] = (size[1], size[0]) if turned else (size[0], size[1])
    return matrices


def _lora(shape: Shape, raw: Mapping[str, object]) -> Lora:
    there = sorted({name.rpartition(".")[2] for name in _matrices(shape)})
    targets = raw.get("targets", [*_FIRST.get(shape.model_type, _ATTENTION)])
    if targets in (ALL_LINEAR, [ALL_LINEAR]):
        targets = [name for name in there if f"{name}.weight" != HEAD]
    lora = read_table({**raw, "targets": targets}, Lora, "[model.lora]")
    if "alpha" not in raw:
        lora = msgspec.structs.replace(lora, alpha=2.0 * lora.rank)
    for target in lora.targets:
        if target not in there:
            raise InvalidRunFile(
                f'[model.lora] targets: {shape.model_type} has no matrix "{target[:80]}": '
                f"{hint(target, there)}"
            )
    modules = sorted(token_modules(shape))
    for name in lora.modules_to_save:
        if name not in modules or name in lora.targets:
            raise InvalidRunFile(
                f'[model.lora] modules_to_save: "{name[:80]}" is not among the modules that may be'
                f" trained whole ({', '.join(modules) or 'none'}), or it is a target too"
            )
    if not lora.targets:
        raise InvalidRunFile(f"[model.lora] targets is empty: name some of {', '.join(there)}")
    return lora
