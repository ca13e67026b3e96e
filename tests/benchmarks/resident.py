"""A volunteer that trains nothing, as a process of its own for `bench_peers`; like a real one it
imports nothing of the coordinator.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import secrets
import time
from pathlib import Path

import numpy as np

from shared.clock import SystemClock
from shared.decoding import decode
from shared.programs import gc_freeze
from shared.protocol import endpoints
from shared.protocol.accounts import RegisterRequest
from shared.protocol.leases import ClaimRequest
from shared.protocol.versions import VersionManifest
from shared.tensors.codec import codec
from shared.tensors.spec import Schema
from tests.benchmarks.handing import Handing
from volunteer.net.api import Api
from volunteer.net.client import Client
from volunteer.net.tls import Address
from volunteer.net.transfers import Transfers
from volunteer.net.weights import Weights
from volunteer.storage.blob_cache import Cache

STAGES = ("claim", "begin", "fetch", "encode", "upload", "submit")  # begin waits for the merge
WARM = 1  # rounds before the clock starts


class Resident:
    """A volunteer that trains nothing."""

    def __init__(self, options: argparse.Namespace, folder: Path, schema: Schema) -> None:
        self._worker, secret = secrets.token_hex(16), secrets.token_hex(32)
        token = f"{self._worker}.{secret}"
        self.client = Client(Address(url=options.url), clock=SystemClock(), token=token)
        self._api = Api(self.client)
        cache = Cache(folder / "cache", 8 << 30)
        self._transfers = Transfers(self._api, cache)
        self._weights = Weights(self._transfers, cache, print)
        self._codec, self._schema, self._file = options.codec, schema, folder / "update"
        self._register = RegisterRequest(
            volunteer_id=self._worker,
            worker_id=self._worker,
            secret=secret,
            nickname=f"bench-{options.number}",
            workloads=("gpt",),
        )
        random = np.random.default_rng(options.number)
        self._delta = {
            spec.name: (1e-5 * random.standard_normal(spec.shape, np.float32)) for spec in schema
        }

    async def join(self) -> None:
        await self._api.call(endpoints.REGISTER, body=self._register)

    async def round(self, turn: int) -> list[float]:
        """One contribution; the seconds that each of `STAGES` took."""
        times = [time.perf_counter()]

        def done() -> None:
            times.append(time.perf_counter())

        claim = ClaimRequest(claim_id=secrets.token_hex(16), step_flops=1e9, codecs=(self._codec,))
        reply = await self._api.claim(claim)
        lease = reply.lease
        assert lease is not None, reply.idle
        done()
        begun = await self._api.begin(lease.task, lease.attempt)
        done()
        assert begun.manifest is not None
        manifest = decode(begun.manifest.payload, VersionManifest)
        await self._weights.fetch(manifest, lambda size: lambda count: None)
        done()
        next(iter(self._delta.values())).flat[0] = turn * 1e-6  # the same bytes twice are a replay
        self._file.unlink(missing_ok=True)
        encoded = await asyncio.to_thread(
            codec(self._codec).encode, self._delta, self._schema, self._file
        )
        done()
        handing = Handing(lease, begun, encoded, self._codec)
        await handing.upload(self._transfers, self._file)
        done()
        await handing.submit(self._api)
        done()
        return [after - before for before, after in itertools.pairwise(times)]


async def reside(options: argparse.Namespace) -> None:
    """Be one volunteer; print when each of its rounds began, and what it sent and received."""
    folder = Path(options.folder) / f"volunteer-{options.number}"
    folder.mkdir()
    schema = decode((folder.parent / "schema.json").read_bytes(), Schema)
    resident = Resident(options, folder, schema)
    await resident.join()
    gc_freeze.freeze()  # as a volunteer does
    sent, received, before = 0, 0, time.process_time()
    began, stages = [], []
    for turn in range(options.rounds + WARM + 1):
        if turn == WARM:
            sent, received = resident.client.sent_bytes, resident.client.received_bytes
        began.append(time.time())
        stages.append(await resident.round(turn))
    traffic = [resident.client.sent_bytes - sent, resident.client.received_bytes - received]
    cpu = (time.process_time() - before) / len(began)
    said = {"began": began, "traffic": traffic, "stages": stages[WARM:], "cpu": cpu}
    print(json.dumps(said))
    await resident.client.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--url", "--folder", "--codec"):
        parser.add_argument(name, required=True)
    for name in ("--number", "--rounds"):
        parser.add_argument(name, type=int, required=True)
    asyncio.run(reside(parser.parse_args()))


if __name__ == "__main__":
    main()
