"""FedAvg rounds of Flower: a SuperLink and N SuperNodes as processes over loopback, clients that
return what they were given.

    FLOWER_ENVIRONMENT/bin/python flower_rounds.py --parameters 1000000 --nodes 2 --rounds 3

Prints {"version": ..., "seconds": [one a round], "server_rss_bytes": ...}. A round ends when its
average is there; the first one, in which the nodes are still starting, is left out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

BIN = Path(sys.executable).parent
PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "rounds"
version = "1.0.0"
description = ""
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "bench"
[tool.flwr.app.components]
serverapp = "rounds.server:app"
clientapp = "rounds.client:app"
[tool.flwr.app.config]
parameters = 1000
nodes = 2
rounds = 3
times = ""
"""
CLIENT = """
from flwr.app import Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()

@app.train()
def train(message, context):
    content = RecordDict(
        {"arrays": message.content["arrays"], "metrics": MetricRecord({"num-examples": 1})}
    )
    return Message(content=content, reply_to=message)
"""
SERVER = """
import time
import numpy as np
from flwr.app import Array, ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()
TENSORS = 16

class Timed(FedAvg):
    def __init__(self, path, **options):
        super().__init__(**options)
        self.path = path

    def aggregate_train(self, server_round, replies):
        done = super().aggregate_train(server_round, replies)
        with open(self.path, "a") as file:
            print(time.time(), file=file)
        return done

@app.main()
def main(grid, context):
    config = context.run_config
    size = int(config["parameters"]) // TENSORS
    random = np.random.default_rng(0)
    arrays = ArrayRecord(
        {f"tensor{n}": Array(random.normal(size=size).astype(np.float32)) for n in range(TENSORS)}
    )
    nodes = int(config["nodes"])
    strategy = Timed(
        config["times"], fraction_train=1.0, fraction_evaluate=0.0,
        min_train_nodes=nodes, min_available_nodes=nodes,
    )
    strategy.start(grid=grid, initial_arrays=arrays, num_rounds=int(config["rounds"]))
"""


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def wait_until_open(port: int, limit_s: float = 60.0) -> None:
    ends = time.monotonic() + limit_s
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            if time.monotonic() > ends:
                raise SystemExit(f"nothing listens on port {port}") from None
            time.sleep(0.2)


def write_app(folder: Path) -> Path:
    package = folder / "app" / "rounds"
    package.mkdir(parents=True)
    (folder / "app" / "pyproject.toml").write_text(PROJECT)
    (package / "__init__.py").write_text("")
    (package / "client.py").write_text(CLIENT)
    (package / "server.py").write_text(SERVER)
    return folder / "app"


def resident(root: int) -> int:
    """Bytes of resident memory of a process and of everything it has started, as the kernel counts
    them.
    """
    children: dict[int, list[int]] = {}
    sizes: dict[int, int] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        children.setdefault(int(fields[1]), []).append(int(status.parent.name))
        sizes[int(status.parent.name)] = int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
    family = [root]
    for one in family:
        family += children.get(one, [])
    return sum(sizes.get(one, 0) for one in family)


def wait_for(path: Path, lines: int, server: int, limit_s: float) -> tuple[list[float], int]:
    """The times of so many rounds, and the most memory that the server held meanwhile."""
    peak, ends = 0, time.monotonic() + limit_s
    while time.monotonic() < ends:
        peak = max(peak, resident(server))
        found = path.read_text().split() if path.exists() else []
        if len(found) >= lines:
            return [float(line) for line in found], peak
        time.sleep(0.1)
    raise SystemExit(f"no {lines} rounds within {limit_s:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=int, required=True)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit-s", type=float, default=600.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        link, *others = free_ports(1 + options.nodes)
        (folder / "home").mkdir()
        (folder / "home" / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n[superlink.here]\n'
            f'address = "127.0.0.1:{link}"\ninsecure = true\n'
        )
        environment = os.environ | {
            "FLWR_HOME": str(folder / "home"),
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "FLWR_TELEMETRY_ENABLED": "0",
        }
        log = (folder / "log").open("w")
        started: list[subprocess.Popen[bytes]] = []

        def start(*command: str) -> None:
            started.append(
                subprocess.Popen(
                    [str(BIN / command[0]), *command[1:]],
                    env=environment,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )

        times = folder / "times"
        try:
            offline = "--disable-runtime-dependency-installation"
            start("flower-superlink", "--insecure", offline, "--port", str(link))
            wait_until_open(link)
            for port in others:
                where = ("--superlink", f"127.0.0.1:{link}", "--port", str(port))
                start("flower-supernode", "--insecure", *where)
            config = f"parameters={options.parameters} nodes={options.nodes}"
            config += f" rounds={options.rounds + 1} times='{times}'"
            asked = subprocess.run(
                [BIN / "flwr", "run", write_app(folder), "here", "--run-config", config],
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            if asked.returncode:
                raise SystemExit(asked.stdout + asked.stderr + (folder / "log").read_text())
            try:
                found, peak = wait_for(times, options.rounds + 1, started[0].pid, options.limit_s)
            except SystemExit:
                sys.stderr.write((folder / "log").read_text()[-4000:])
                raise
        finally:
            for process in started:
                try:
                    os.killpg(process.pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
                process.wait()
            log.close()
    seconds = [after - before for before, after in itertools.pairwise(found)]
    print(json.dumps({"version": version("flwr"), "seconds": seconds, "server_rss_bytes": peak}))


if __name__ == "__main__":
    main()
