"""Fifty slips that people make in a run file: each leads to the right word, table or line."""

from __future__ import annotations

import pytest

from coordinator.plan.plan import plan
from coordinator.rules import run_file
from coordinator.rules.run_file_help import explained
from shared.errors import BadRequest, NotFound
from shared.workloads.base import load
from tests.support.workloads.tiny_causal import LLAMA

GOOD = """name = "mine"
workload = "gpt"
dataset = "corpus"
[task]
local_steps = 30
[train]
lr = 1e-3
[plan]
preset = "fedavg"
"""
SLIPS = [
    # what stands in the file, and what the message has to say
    (GOOD + "[stop]\nepochs = 3\n", "line 11", "[stop] passes"),
    (GOOD + "[stop]\nmax_steps = 300\n", "line 11", "[stop] versions"),
    (GOOD + "[stop]\nsteps = 1000\n", "line 11", "[stop] versions or tokens"),
    (GOOD + "[stop]\nhours = 2\n", "line 11", "[stop] date"),
    (GOOD + "[evaluation]\ngate = True\n", "line 11", "true or false in TOML, in small letters"),
    (GOOD + "[evaluation]\ngate = yes\n", "line 11", "true or false"),
    (GOOD.replace('"corpus"', "my corpus"), "line 3", 'in quotes: "my corpus"'),
    ('{"name": "mine", "workload": "gpt"}', "line 1", "this is JSON"),
    ("name: mine\nworkload: gpt\ntask:\n  local_steps: 3\n", "line 1", "this is YAML"),
    (GOOD + "[evaluation]\neval_every = 3\n", "line 11", "[evaluation] every"),
    (GOOD + "[retention]\nkeep_every = 3\n", "line 11", "every"),
    (GOOD + "[optimizer]\nname = 'adam'\n", "line 10", "belongs in [train]"),
    (GOOD + "[stop]\nversion = 3\n", "line 11", '"versions"'),
    (GOOD + "[stop]\nversions = '3'\n", "line 11", "whole number"),
    (GOOD + "[stop]\ndate = 'tomorrow'\n", "line 11", "2027-01-31"),
    (GOOD + "[stop\nversions = 3\n", "line 10", "has no closing bracket ]"),
    (GOOD + "[train]\nseed = 3\n", "line 10", "twice"),
    (GOOD + "[evaluation]\ngates = true\n", "line 11", '"gate"'),
    (GOOD + "[validation]\nnorm = 3\n", "line 11", '"norm_limit"'),
    (GOOD + "[trust]\nnorm_limit = 3\n", "line 11", "belongs in [validation]"),
    (GOOD + "[trust]\nevery = 4\n", "line 11", "belongs in [evaluation] or [retention]"),
    (GOOD + "[trust]\nnonsense = 4\n", "line 11", "known: recompute"),
    (GOOD + "[credit]\nprice = 3\n", "line 11", "belongs in [serve]"),
    (GOOD + "[credits]\ncredits_per_step = 3\n", "line 10", '"credit"'),
    (GOOD + "[validate]\nnorm_limit = 3\n", "line 10", '"validation"'),
    (GOOD + "[data]\npath = 'x'\n", "line 11", "dataset"),
    *(
        (GOOD.replace("[task]", f"{line}\n[task]"), "line 4", said)
        for line, said in [
            ('preset = "diloco"', "belongs in [plan]"),
            ("learning_rate = 1e-3", "[train] lr"),
            ("epochs = 3", "[stop] passes"),
            ("batch_size = 3", "belongs in [task]"),
            ("batch = 3", "[task] batch_size"),
            ('license = "MIT"', "licence"),
            ("max_steps = 3", "[stop] versions"),
            ("rounds = 3", "[stop] versions"),
            ("quorum = 3", "belongs in [plan]"),
            ("n_layer = 3", "[model]"),
            ("lr = 3", "belongs in [train]"),
            ('desciption = "x"', '"description"'),
            ("seed = -1", "seed"),
            ("weight = 'x'", "weight"),
        ]
    ),
    *(
        (GOOD.replace("lr = 1e-3", line), "line 7", said)
        for line, said in [
            ("learning_rate = 1e-3", "[train] lr"),
            ("optimiser = 'muon'", '"optimizer"'),
            ("optimizer = 'adam'", "adamw"),
            ("precision = 'bf16'", "bfloat16"),
            ("batch_size = 3", "belongs in [task]"),
            ("weight_deacy = 3", '"weight_decay"'),
            ("warmup = 3", "[train] warmup_steps"),
            ("grad_clip = 1", "[train] clip_norm"),
            ("lr = '1e-3'", "number"),
            ("lr = -1", "lr"),
            ("lr = 1e-3,", "should end before ,"),
        ]
    ),
    *(
        (GOOD.replace('preset = "fedavg"', line), "line 9", said)
        for line, said in [
            ('preset = "fedavgg"', '"fedavg"'),
            ('preset = "dilco"', '"diloco"'),
            ("strategy = 'fedavg'", "[plan] preset"),
            ("min_clients = 3", "[plan] quorum"),
            ("quorum = 0", "quorum"),
            ("quorum = 0.6", "a share is [plan] quorum_share"),
            ("deadline_seconds = '5m'", "it counts seconds: 300 is five minutes"),
            ("quorum = '3'", "a number stands without quotation marks"),
            ("local_step = 3", "[task] local_steps"),
            ("codec = 'int9'", "int8"),
            ("deadline = 3", "[plan] deadline_seconds"),
        ]
    ),
    (GOOD.replace('"gpt"', '"gtp"'), "line 2", 'did you mean "gpt"?'),
    (GOOD.replace('"gpt"', '"GPT"'), "line 2", 'did you mean "gpt"?'),
    (GOOD.replace('name = "mine"', ""), "", 'a line name = "..."'),
    (GOOD.replace('name = "mine"', 'name = "my run"'), "line 1", "letters, digits"),
    ("", "", "is empty"),
]


def refused(text: str) -> str:
    """The message of a run file as the organiser reads it."""
    try:
        found = run_file.parse(text)
        load(found.workload)
        plan(found.plan)
    except (BadRequest, NotFound) as error:
        return explained(text, error.message)
    raise AssertionError("it was accepted")


@pytest.mark.parametrize(("text", "line", "said"), SLIPS)
def test_a_slip_leads_to_the_right_word_and_line(text: str, line: str, said: str) -> None:
    message = refused(text)
    assert message.startswith(line), message
    assert said in message


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('bias = "all"', "adapters train no bias: leave the line out"),
        ("use_dora = true", "leave the line out"),
        ("r = 8", "here it is [model.lora] rank"),
        ("lora_alpha = 8", "here it is [model.lora] alpha"),
        ("lora_dropout = 0.1", "here it is [model.lora] dropout"),
        ("use_rslora = true", "here it is [model.lora] rslora"),
        ('target_modules = "all-linear"', "here it is [model.lora] targets"),
    ],
)
def test_peft_s_words_for_adapters_lead_to_ours(line: str, said: str) -> None:
    text = f'name = "mine"\n[model]\ntrain = "lora"\n[model.lora]\n{line}\n'
    model = {**run_file.parse('workload = "causal-lm"\n' + text).model}
    model |= {"config": {**LLAMA, "vocab_size": 300}, "context": 32}
    with pytest.raises(BadRequest) as caught:
        load("causal-lm").config(model, None)
    message = explained(text, caught.value.message)
    assert message.startswith("line 5: unknown key")
    assert said in message


def test_there_are_fifty_slips_at_least() -> None:
    assert len(SLIPS) >= 50
