"""Help with a refused run file: the line of the fault, the right table for a key, and this
program's key for the key of another program.
"""

from __future__ import annotations

import re
from functools import cache

import msgspec

from coordinator.plan.plan_tables import Plan
from coordinator.rules.run_file import RunFile
from shared.nearest_name import nearest

# Keys of other programs, and the same settings of a run file.
WORDS = {
    "learning_rate": "[train] lr",
    "max_lr": "[train] lr",
    "wd": "[train] weight_decay",
    "warmup": "[train] warmup_steps",
    "warmup_ratio": "[train] warmup_steps",
    "scheduler": "[train] warmup_steps and decay_steps",
    "lr_scheduler_type": "[train] warmup_steps and decay_steps",
    "optim": "[train] optimizer",
    "dtype": "[train] precision",
    "mixed_precision": "[train] precision",
    "bf16": '[train] precision = "bfloat16"',
    "fp16": '[train] precision = "bfloat16"',
    "grad_clip": "[train] clip_norm",
    "max_grad_norm": "[train] clip_norm",
    "gradient_clipping": "[train] clip_norm",
    "epochs": "[stop] passes",
    "num_epochs": "[stop] passes",
    "num_train_epochs": "[stop] passes",
    "rounds": "[stop] versions",
    "num_rounds": "[stop] versions",
    "max_iters": "[stop] versions or tokens",
    "iterations": "[stop] versions or tokens",
    "max_steps": "[stop] versions or tokens",
    "total_steps": "[stop] versions or tokens",
    "max_tokens": "[stop] tokens",
    "steps": "[task] local_steps for one task, [stop] versions or tokens for the run",
    "inner_steps": "[task] local_steps",
    "local_epochs": "[task] local_steps",
    "batch": "[task] batch_size",
    "per_device_train_batch_size": "[task] batch_size",
    "micro_batch_size": "[task] batch_size",
    "workers": "[plan] quorum",
    "clients": "[plan] quorum",
    "min_clients": "[plan] quorum",
    "num_clients": "[plan] quorum",
    "strategy": "[plan] preset",
    "algorithm": "[plan] preset",
    "aggregation": "[plan] preset",
    "aggregator": "[plan] aggregate",
    "compression": "[plan] codec",
    "timeout": "[plan] deadline_seconds",
    "deadline": "[plan] deadline_seconds",
    "staleness": "[plan] max_staleness",
    "layers": "[model] n_layer",
    "num_layers": "[model] n_layer",
    "num_hidden_layers": "[model] n_layer",
    "heads": "[model] n_head",
    "num_heads": "[model] n_head",
    "d_model": "[model] n_embd",
    "hidden_size": "[model] n_embd",
    "context": "[model] block_size",
    "context_length": "[model] block_size",
    "seq_len": "[model] block_size",
    "max_seq_len": "[model] block_size",
    "license": "licence",
    "type": "workload",
    "task_type": "workload",
    "author": "contact",
    "eval_every": "[evaluation] every",
    "eval_steps": "[evaluation] every",
    "save_every": "[retention] every",
    "save_steps": "[retention] every",
    "checkpoint_every": "[retention] every",
}
# Words that mean something else in one table.
WORDS_OF_TABLES = {
    "[stop]": {
        "steps": "[stop] versions or tokens",
        "samples": "[stop] passes or tokens",
        "time": "[stop] date",
        "hours": "[stop] date",
        "minutes": "[stop] date",
        "duration": "[stop] date",
    },
    "[task]": {"steps": "[task] local_steps", "timeout": "[task] lease_floor_seconds"},
    "[plan]": {"steps": "[task] local_steps", "type": "[plan] preset"},
    "[data]": {"path": "dataset", "name": "dataset"},
    "[serve]": {"max_tokens": "[[serve.tiers]] tokens"},
    "[model.lora]": {
        "r": "[model.lora] rank",
        "lora_alpha": "[model.lora] alpha",
        "lora_dropout": "[model.lora] dropout",
        "use_rslora": "[model.lora] rslora",
        "target_modules": "[model.lora] targets",
    },
}
# Keys of other programs for what a run cannot do, by table, and what to do instead.
ABSENT = {
    "[model.lora]": {
        "bias": 'adapters train no bias: leave the line out, or train all: [model] train = "all"',
        "use_dora": "adapters have no magnitudes of their own: leave the line out",
    },
}
_MODEL = ("block_size", "n_layer", "n_head", "n_embd", "dropout")  # keys of the workload gpt
_UNKNOWN = re.compile(
    r'unknown key "(?P<key>[^"]+)" in (?P<place>\[[\w.]+\]|the run file): (?P<hint>.*)', re.DOTALL
)
_NUMBER = re.compile(
    r"(?P<key>\w+): expected a (whole )?number[^,]*, not (?P<other>a text|one with a fraction)"
)
_TOML = re.compile(r".* is not TOML: (?P<fault>line \d+: .*)", re.DOTALL)


def explained(text: str, complaint: str) -> str:
    """Return a complaint about a run file with its line; for an unknown key, also its table."""
    if not text.strip():
        return "the run file is empty: `coordinator run create --list` has some to begin with"
    if toml := _TOML.fullmatch(complaint):
        return toml["fault"]
    if match := _UNKNOWN.fullmatch(complaint):
        first_line = f'unknown key "{match["key"]}" in {match["place"]}'
        complaint = f"{first_line}: {_better(match['key'], match['place'], match['hint'])}"
    complaint = re.sub(r"^the run file (\w+)\.(\w+):", r"[\1] \2:", complaint)
    complaint = _numbered(re.sub(r"^the run file (\w+):", r"\1:", complaint))
    line = line_of(text, complaint)
    return f"line {line}: {complaint}" if line else complaint


def _numbered(complaint: str) -> str:
    """Return a complaint about a number with its right form: of seconds, of a share, of a text."""
    match = _NUMBER.search(complaint)
    if match is None:
        return complaint
    key, share = match["key"], f"{match['key']}_share"
    if match["other"] == "a text":
        seconds = "it counts seconds: 300 is five minutes"
        form = seconds if key.endswith("_seconds") else "a number stands without quotation marks"
        return f"{complaint}; {form}"
    homes = [table for table, keys in _tables().items() if share in keys]
    return f"{complaint}; a share is {homes[0]} {share}" if homes else complaint


def _better(key: str, place: str, hint: str) -> str:
    """Return a better hint for an unknown key than `hint`, the nearest name in its table; `hint` if
    no better hint is known.
    """
    homes = [table for table, keys in _tables().items() if key in keys and table != place]
    words = WORDS | WORDS_OF_TABLES.get(place, {})
    if absent := ABSENT.get(place, {}).get(key.lower()):
        return absent
    if key.lower() in words:
        return f"here it is {words[key.lower()]}"
    if homes:
        return f"it belongs in {' or '.join(homes)}"
    if hint.startswith("did you mean"):
        return hint
    near = {
        table: better
        for table, keys in _tables().items()
        if (better := nearest(key, keys)) and table != place
    }
    if near:
        return "did you mean " + " or ".join(f"{table} {key}" for table, key in near.items()) + "?"
    return hint


@cache
def _tables() -> dict[str, tuple[str, ...]]:
    """Return the keys of every table of a run file; the top level is named "the run file"."""
    tables: dict[str, tuple[str, ...]] = {"the run file": RunFile.__struct_encode_fields__}
    for field in msgspec.structs.fields(RunFile):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            tables[f"[{field.name}]"] = field.type.__struct_encode_fields__
    return tables | {"[plan]": Plan.__struct_encode_fields__, "[model]": _MODEL}


def line_of(text: str, complaint: str) -> int:
    """Return the number of the line that a complaint is about; 0 if unknown."""
    table = next(iter(re.findall(r"\[([\w.]+)\]", complaint.partition(": ")[0])), "")
    words = re.findall(r'"([^"]+)"', complaint) + re.findall(r"\[[\w.]+\] (\w+)", complaint)
    words += re.findall(r"^(\w+)\b", complaint)
    here, candidates = "", []
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[+\s*([\w.]+)\s*\]+", line):
            here = header[1]
        key, _, value = line.partition("=")
        for rank, word in enumerate(words):
            if header and word in (here, here.rpartition(".")[2]):
                candidates.append((2, rank, number))
            elif key.strip() == word and "=" in line:
                candidates.append((0 if here == table else 1, rank, number))
            elif f'"{word}"' in value:
                candidates.append((1, rank, number))
    return min(candidates)[2] if candidates else 0
