"""Runs of the demo: real, and small enough for two minutes on two cores."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from shared.errors import InvalidRunFile
from shared.workloads.base import DatasetManifest, is_here

Put = Callable[[bytes], str]

GPT = """
name = "demo-gpt"
workload = "gpt"
dataset = "stdlib"
description = "A small GPT that learns to write Python from the standard library's own source"
licence = "CC0-1.0"

[model]
block_size = 64
n_layer = 2
n_head = 4
n_embd = 96
dropout = 0.0

[task]
local_steps = 60
batch_size = 16

[train]
lr = 4e-3
warmup_steps = 60
decay_steps = 3000

[plan]
preset = "fedavg"
quorum = {quorum}
deadline_seconds = 20
codec = "bf16"

[evaluation]
prompt = "{prompt}"
"""

GPT_PROMPT = "def "

# With a random frozen model the head needs an adapter too, or no prediction becomes certain.
CAUSAL = """
name = "demo-causal-lm"
workload = "causal-lm"
dataset = "stdlib"
description = "Adapters that teach a small random Llama the standard library's own source"
licence = "CC0-1.0"

[model]
context = 64
train = "lora"

[model.config]
model_type = "llama"
hidden_size = 96
intermediate_size = 256
num_hidden_layers = 2
num_attention_heads = 4
max_position_embeddings = 64

[model.lora]
rank = 16
targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]

[task]
local_steps = 20
batch_size = 16

[train]
lr = 4e-3
warmup_steps = 60
decay_steps = 3000

[plan]
preset = "fedavg"
quorum = {quorum}
deadline_seconds = 20
codec = "int8"

[evaluation]
prompt = "{prompt}"
"""

# The digits have 8 x 8 pixels, so 16 x 16 loses nothing. A discriminator as wide as the
# generator tells every fake from the beginning, and for the first five hundred steps the generator
# learns nothing (measured: 28 x 28, 16 channels each).
DCGAN = """
name = "demo-dcgan"
workload = "dcgan"
dataset = "digits"
description = "A small GAN that learns to draw digits from 1,797 examples"
licence = "CC0-1.0"

[model]
generator_width = 32
discriminator_width = 16

[task]
local_steps = {steps}
batch_size = 32

[train]
lr = 1e-3

[plan]
preset = "fedavg"
quorum = {quorum}
deadline_seconds = 20
codec = "bf16"
"""

DIGITS_SIZE = 16  # pixels
DIGITS_HELD_OUT = 0.11  # leaves 1,599 digits: 50 steps of 32 in one pass
DIGITS_STEPS = 50


GOMOKU = """
name = "demo-gomoku"
workload = "gomoku"
description = "A player of four in a row on a board of 6 x 6 that teaches itself, from nothing"
licence = "CC0-1.0"

[model]
size = 6
win = 4

[task]
local_steps = 40
batch_size = 128

[train]
lr = 4e-3
warmup_steps = 20

[task.options]
games = 16
slots = 16
simulations = 64
opening_plies = 6
temperature_plies = 8
window = 512
window_min = 32
chunk = 32
reuse = 10
queue = 256
match_games = 16
match_simulations = 64
match_every = 2
"""


ROLLOUTS = """
name = "demo-rollouts"
workload = "rollouts"
description = "A small Llama that learns to sort numbers from its own answers"
licence = "CC0-1.0"

[model]
problems = "sorting"
size = 6
context = 20
answer = 8
n_layer = 2
n_head = 4
n_embd = 64

[task]
local_steps = 1
batch_size = 256

[train]
lr = 4e-4

[task.options]
problems = 32
group = 8
slots = 128
chunk = 32
window = 128
window_min = 32
queue = 64
reuse = 1
warm_steps = 100
warm_size = 4
warm_lr = 3e-3
"""


class DemoRun(msgspec.Struct, frozen=True, kw_only=True):
    """Run of the demo."""

    name: str
    toml: str
    prompt: str = ""
    minutes: float = 2.0  # of training
    preparing: str  # what a person reads meanwhile
    build: Callable[[Put], DatasetManifest] | None = None  # None: it needs no data


def _standard_library(put: Put) -> DatasetManifest:
    from shared.workloads.data.documents import standard_library_documents
    from shared.workloads.data.text_dataset import build_text

    return build_text(
        "stdlib",
        standard_library_documents(),
        put,
        vocab_size=1024,
        licence="PSF-2.0",
        source="the Python standard library of this machine",
    )


def _digits(put: Put) -> DatasetManifest:
    from shared.workloads.data.image_dataset import build_images
    from shared.workloads.data.image_sources import digit_pictures

    return build_images(
        "digits",
        digit_pictures(),
        put,
        size=DIGITS_SIZE,
        channels=1,
        heldout_share=DIGITS_HELD_OUT,
        licence="CC-BY-4.0" if is_here("sklearn") else "CC0-1.0",
        source="Alpaydin and Kaynak 1998, as scikit-learn ships it"
        if is_here("sklearn")
        else "digits of a font, drawn on this machine",
    )


def _gpt(volunteers: int) -> DemoRun:
    return DemoRun(
        name="demo-gpt",
        toml=GPT.format(quorum=volunteers, prompt=GPT_PROMPT),
        prompt=GPT_PROMPT,
        preparing="building a dataset from the Python standard library's own source",
        build=_standard_library,
    )


def _causal(volunteers: int) -> DemoRun:
    return DemoRun(
        name="demo-causal-lm",
        toml=CAUSAL.format(quorum=volunteers, prompt=GPT_PROMPT),
        prompt=GPT_PROMPT,
        minutes=1.5,  # two in all: its tokenizer and its libraries take the rest
        preparing="building a dataset from the Python standard library's own source",
        build=_standard_library,
    )


def _dcgan(volunteers: int) -> DemoRun:
    # A pass ends with its last task, so each volunteer gets an equal part.
    steps = max(1, DIGITS_STEPS // volunteers)
    return DemoRun(
        name="demo-dcgan",
        toml=DCGAN.format(quorum=volunteers, steps=steps),
        preparing="building a dataset of digits, and a judge that knows them",
        build=_digits,
    )


def _gomoku(volunteers: int) -> DemoRun:
    return DemoRun(
        name="demo-gomoku", toml=GOMOKU, minutes=3.0, preparing="setting up a board of 6 x 6"
    )


def _rollouts(volunteers: int) -> DemoRun:
    return DemoRun(
        name="demo-rollouts", toml=ROLLOUTS, minutes=3.0, preparing="setting up problems to sort"
    )


DEMOS: dict[str, Callable[[int], DemoRun]] = {
    "gpt": _gpt,
    "dcgan": _dcgan,
    "gomoku": _gomoku,
    "causal-lm": _causal,
    "rollouts": _rollouts,
}


def demo_run(workload: str, volunteers: int) -> DemoRun:
    """Return the demo of a workload. Raises InvalidRunFile for one without a demo."""
    if workload not in DEMOS:
        raise InvalidRunFile(
            f'there is no demo of "{workload}"; there is one of: {", ".join(DEMOS)}'
        )
    return DEMOS[workload](max(1, volunteers))
