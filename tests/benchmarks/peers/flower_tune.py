"""Adapters of a Llama trained by Flower over dialogues that its members keep, as FlowerTune does.

    ENV/bin/python -m tests.benchmarks.peers.flower_tune --folder F --engine simulation
    ENV/bin/python -m tests.benchmarks.peers.flower_tune --folder F --engine nodes --rounds 2

The folder has `base` (model and tokenizer as transformers writes them), `adapter` (of version 0, as
peft writes it) and `member-N/talk.jsonl`. "simulation" is Flower's own engine, which keeps a client
process for each core; "nodes" a SuperLink and a SuperNode for each member over loopback. Each
round's adapter goes to `flower-ENGINE/ROUND.safetensors`. Prints {"version", "seconds": [one a
round], "cpu": seconds a round, "up", "down": bytes a member and round, "lines"}; the first round,
in which processes start, is left out. In a simulation nothing is sent, so its bytes are those of
the arrays in its messages.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from tests.benchmarks.peers.counting import CountingProxy, Moment, below, code_lines, counting_proxy
from tests.benchmarks.peers.flower_rounds import BIN, free_ports, wait_until_open

PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "tune"
version = "1.0.0"
description = ""
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "bench"
[tool.flwr.app.components]
serverapp = "tune.server:app"
clientapp = "tune.client:app"
[tool.flwr.app.config]
folder = ""
out = ""
members = 20
rounds = 10
steps = 10
batch = 16
lr = 0.01
"""
CLIENT = """
import json
import random
from functools import cache

import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from transformers import AutoModelForCausalLM, AutoTokenizer

app = ClientApp()
torch.set_num_threads(1)

@cache
def model_of(folder):
    base = AutoModelForCausalLM.from_pretrained(f"{folder}/base")
    return PeftModel.from_pretrained(base, f"{folder}/adapter", is_trainable=True)

@cache
def examples_of(folder, member):
    tokenizer = AutoTokenizer.from_pretrained(f"{folder}/base")
    examples = []
    for line in open(f"{folder}/member-{member}/talk.jsonl"):
        talk = json.loads(line)
        turns = [{"role": "user", "content": talk["prompt"]}]
        prompt = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        turns.append({"role": "assistant", "content": talk["completion"]})
        answer = tokenizer.apply_chat_template(turns, tokenize=False)[len(prompt):]
        asked = tokenizer(prompt, add_special_tokens=False).input_ids
        learnt = tokenizer(answer, add_special_tokens=False).input_ids
        examples.append((asked + learnt, [-100] * len(asked) + learnt))
    return examples[: len(examples) - len(examples) // 20]

def batch_of(examples):
    longest = max(len(tokens) for tokens, _ in examples)
    tokens = [tokens + [0] * (longest - len(tokens)) for tokens, _ in examples]
    labels = [labels + [-100] * (longest - len(labels)) for _, labels in examples]
    mask = [[1] * len(row) + [0] * (longest - len(row)) for row, _ in examples]
    return torch.tensor(tokens), torch.tensor(mask), torch.tensor(labels)

@app.train()
def train(message, context):
    config, member = context.run_config, context.node_config["partition-id"]
    model = model_of(config["folder"])
    set_peft_model_state_dict(model, message.content["arrays"].to_torch_state_dict())
    examples = examples_of(config["folder"], member)
    order = random.Random(f"{member} {message.content['config']['server-round']}")
    drawn = order.sample(examples, config["steps"] * config["batch"])
    learnt = [value for value in model.parameters() if value.requires_grad]
    optimizer = torch.optim.AdamW(learnt, config["lr"], betas=(0.9, 0.95), weight_decay=0.0)
    model.train()
    for step in range(config["steps"]):
        for group in optimizer.param_groups:
            group["lr"] = config["lr"] * min(1, (step + 1) / max(1, config["steps"] // 4))
        part = drawn[step * config["batch"] : (step + 1) * config["batch"]]
        tokens, mask, labels = batch_of(part)
        loss = model(input_ids=tokens, attention_mask=mask, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learnt, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    metrics = MetricRecord({"train_loss": loss.item(), "num-examples": len(examples)})
    arrays = ArrayRecord(get_peft_model_state_dict(model, save_embedding_layers=False))
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)
"""
SERVER = """
import os

from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from safetensors.torch import load_file, save_file

app = ServerApp()

@app.main()
def main(grid, context):
    config = context.run_config
    arrays = ArrayRecord(load_file(f"{config['folder']}/adapter/adapter_model.safetensors"))

    def keep(server_round, arrays):
        path = f"{config['out']}/{server_round}.safetensors"
        save_file(arrays.to_torch_state_dict(), f"{path}.part")
        os.replace(f"{path}.part", path)

    members = config["members"]
    strategy = FedAvg(
        fraction_evaluate=0.0, min_train_nodes=members, min_available_nodes=members
    )
    strategy.start(grid, arrays, num_rounds=config["rounds"], evaluate_fn=keep)
"""
COMMANDS = """
flower-superlink
flower-supernode --superlink ADDRESS --node-config partition-id=N
flwr run APP
"""


def write_app(folder: Path) -> Path:
    package = folder / "app" / "tune"
    package.mkdir(parents=True)
    (folder / "app" / "pyproject.toml").write_text(PROJECT)
    (package / "__init__.py").write_text("")
    (package / "client.py").write_text(CLIENT)
    (package / "server.py").write_text(SERVER)
    return folder / "app"


class Programs:
    """Programs of Flower, and what they write."""

    def __init__(self, home: Path, port: int) -> None:
        home.mkdir()
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n[superlink.here]\n'
            f'address = "127.0.0.1:{port}"\ninsecure = true\n'
        )
        self._started: list[subprocess.Popen[bytes]] = []
        self.log = home / "log"
        self.environment = os.environ | {
            "FLWR_HOME": str(home),
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "FLWR_TELEMETRY_ENABLED": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",  # by default 15: its clients would wait for all others
            "HF_HUB_OFFLINE": "1",
        }

    def start(self, *command: str) -> subprocess.Popen[bytes]:
        with self.log.open("a") as log:
            program = subprocess.Popen(
                [str(BIN / command[0]), *command[1:]],
                env=self.environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._started.append(program)
        return program

    def end(self) -> None:
        """Kill all programs with those that they started, some in sessions of their own."""
        pids = [pid for program in self._started for pid in (program.pid, *below(program.pid))]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for program in self._started:
            program.wait()


@contextlib.contextmanager
def running(
    options: argparse.Namespace, folder: Path
) -> Iterator[tuple[Programs, CountingProxy, subprocess.Popen[bytes]]]:
    """Flower, the proxy before its SuperLink, and the command that follows the run to its end."""
    simulated = options.engine == "simulation"
    link, *ports = free_ports(1 + (0 if simulated else options.members))
    programs = Programs(folder / "home", link)
    try:
        mode = ("--simulation",) if simulated else ()
        offline = "--disable-runtime-dependency-installation"
        programs.start("flower-superlink", "--insecure", offline, *mode, "--port", str(link))
        wait_until_open(link)
        with counting_proxy(link) as proxy:
            for member, port in enumerate(ports):
                place = ("--superlink", f"127.0.0.1:{proxy.port}", "--port", str(port))
                partition = ("--node-config", f"partition-id={member}")
                programs.start("flower-supernode", "--insecure", *place, *partition)
            config = f"folder='{options.folder}' out='{out_of(options)}'"
            for name in ("members", "rounds", "steps", "batch", "lr"):
                config += f" {name}={getattr(options, name)}"
            words = [
                "flwr",
                "run",
                str(write_app(folder)),
                "here",
                "--stream",
                "--run-config",
                config,
            ]
            if simulated:
                sizes = f"num-supernodes={options.members} client-resources-num-cpus=1"
                words += ["--federation-config", f"{sizes} init-args-num-cpus={os.cpu_count()}"]
            yield programs, proxy, programs.start(*words)
    finally:
        programs.end()


def out_of(options: argparse.Namespace) -> Path:
    return Path(options.folder) / f"flower-{options.engine}"


def watch(
    options: argparse.Namespace, proxy: CountingProxy, run: subprocess.Popen[bytes]
) -> list[Moment]:
    """End of each round, and the bytes up to it."""
    ends = time.monotonic() + options.limit_s
    moments: list[Moment] = []
    while len(moments) <= options.rounds:
        path = out_of(options) / f"{len(moments)}.safetensors"
        if path.exists():
            moments.append(proxy.moment(path.stat().st_mtime))
        elif run.poll() is not None or time.monotonic() > ends:
            raise SystemExit(f"no {options.rounds} rounds within {options.limit_s:.0f} s")
        else:
            time.sleep(0.05)
    return moments


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--engine", choices=["simulation", "nodes"], default="simulation")
    parser.add_argument("--members", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--lr", type=float, default=0.003)
    parser.add_argument("--limit-s", type=float, default=600.0)
    options = parser.parse_args()
    out_of(options).mkdir(exist_ok=True)
    for path in out_of(options).iterdir():
        path.unlink()
    with (
        tempfile.TemporaryDirectory() as directory,
        running(options, Path(directory)) as (programs, proxy, run),
    ):
        try:
            moments = watch(options, proxy, run)
        except SystemExit:
            sys.stderr.write(programs.log.read_text()[-6000:])
            raise
    arrays = (out_of(options) / "1.safetensors").stat().st_size
    count = options.members * (options.rounds - 1)
    first, last = moments[1], moments[-1]
    report = {
        "version": version("flwr"),
        "seconds": [after.at - before.at for before, after in itertools.pairwise(moments[1:])],
        "cpu": (last.cpu_s - first.cpu_s) / (options.rounds - 1),
        "up": arrays if options.engine == "simulation" else (last.up - first.up) / count,
        "down": arrays if options.engine == "simulation" else (last.down - first.down) / count,
        "lines": code_lines(PROJECT, CLIENT, SERVER, COMMANDS),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
