"""Averaging steps of hivemind: N peers as processes over loopback, each with a
DecentralizedAverager of the same group.

    HIVEMIND_ENVIRONMENT/bin/python hivemind_steps.py --parameters 1000000 --nodes 4 --rounds 3
    --codec none

Prints {"version": ..., "seconds": [one a step], "error": ...}: the error is that of the average
relative to the true one, because a step may say that it succeeded and have averaged nothing.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import time
from importlib.metadata import version
from typing import Any

TENSORS = 16


def peer(number: int, options: argparse.Namespace, pipe: Any) -> None:
    import hivemind
    import torch
    from hivemind import compression

    torch.set_num_threads(1)
    codec = {
        "none": compression.NoCompression,
        "float16": compression.Float16Compression,
        "uint8": compression.Uniform8BitQuantization,
    }[options.codec]()
    first = None if number == 0 else pipe.recv()
    dht = hivemind.DHT(start=True, initial_peers=first, host_maddrs=["/ip4/127.0.0.1/tcp/0"])
    if number == 0:
        pipe.send([str(address) for address in dht.get_visible_maddrs()])
    size = options.parameters // TENSORS
    own, mean = torch.Generator(), torch.zeros(size)
    for other in range(options.nodes):
        mean += torch.randn(size, generator=own.manual_seed(other)) / options.nodes
    tensors = [torch.randn(size, generator=own.manual_seed(number))]
    tensors += [torch.randn(size) for _ in range(TENSORS - 1)]
    averager = hivemind.DecentralizedAverager(
        tensors,
        dht,
        prefix="rounds",
        target_group_size=options.nodes,
        min_group_size=options.nodes,
        min_matchmaking_time=1.0,
        compression=codec,
        start=True,
    )
    pipe.send("ready")
    error = None
    while pipe.recv() == "step":
        began = time.time()
        group = averager.step(timeout=options.limit_s)
        if error is None:
            with averager.get_tensors() as now:
                error = float((now[0] - mean).norm() / mean.norm())
        pipe.send((began, time.time(), len(group or ()), error))
    averager.shutdown()
    dht.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=int, required=True)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--codec", choices=["none", "float16", "uint8"], default="none")
    parser.add_argument("--limit-s", type=float, default=100.0)
    options = parser.parse_args()
    context = mp.get_context("fork")  # a spawned peer could not start processes of its own
    pipes: list[Any] = []
    processes: list[Any] = []
    addresses: list[str] = []
    for number in range(options.nodes):
        ours, theirs = context.Pipe()
        process = context.Process(target=peer, args=(number, options, theirs))
        process.start()
        theirs.close()  # a peer that dies is an end of file, not a wait
        processes.append(process)
        pipes.append(ours)
        if number == 0:
            addresses = ours.recv()
        else:
            ours.send(addresses)
    for pipe in pipes:
        assert pipe.recv() == "ready"
    seconds, error = [], 0.0
    try:
        for _ in range(
            options.rounds + 1
        ):  # the first one, in which the peers find each other, is left out
            for pipe in pipes:
                pipe.send("step")
            said = [pipe.recv() for pipe in pipes]
            assert all(group == options.nodes for _, _, group, _ in said), said
            seconds.append(max(s[1] for s in said) - min(s[0] for s in said))
            error = max(s[3] for s in said)
    finally:
        for pipe in pipes:
            pipe.send("end")
        for process in processes:
            process.join(10)
            process.kill()
    print(json.dumps({"version": version("hivemind"), "seconds": seconds[1:], "error": error}))


if __name__ == "__main__":
    main()
