"""A real `coordinator serve` that answers: streams over HTTP, beside heartbeats and claims."""

from __future__ import annotations

import asyncio
import json
import secrets
import statistics
import time
from pathlib import Path
from typing import Any, cast

import msgspec
import psutil
from typing_extensions import override

from coordinator.database.ledger import gifts
from coordinator.inference.builtin_engine import BuiltinEngine, ProcessLimits
from coordinator.inference.inference_engine import Generation, ModelVersion
from coordinator.inference.process_messages import ModelFiles
from coordinator.runs.definition import of_file
from coordinator.runs.version_files import read_weights
from shared.clock import SystemClock
from shared.workloads.generation import batch
from tests.benchmarks.wire import Connection
from tests.support.local_coordinator import Worker, local_coordinator
from tests.support.server_process import Process

API = "/api/v1"
FIRSTS, FIRST_TOKENS = 15, 64
PAUSE_S = 0.02  # between two heartbeats with a claim
RUN = """
name = "bench"
workload = "gpt"
dataset = "sums"
[model]
n_layer = 6
n_head = 6
n_embd = 384
block_size = 256
[task]
local_steps = 2
batch_size = 2
min_steps = 1
[plan]
preset = "fedavg"
[serve]
who = "keys"
[[serve.tiers]]
requests_per_minute = 100000
tokens = 4096
tokens_waiting = 10000000
"""
MODEL = ModelVersion(run_id=1, run="bench", version=0)
OFF = {
    "COORDINATOR_RATE_WORKER": "off",
    "COORDINATOR_RATE_IP": "off",
    "COORDINATOR_INFERENCE_THREADS": "1",
}
STREAMS, TOKENS = 16, 96
PROMPTS = [f"{n} plus {n} is {n + n};\n" * 8 for n in range(STREAMS)]


class FixedEngine(BuiltinEngine):
    """The built-in engine with one version, whose files need no database."""

    def __init__(self, files: ModelFiles, threads: int) -> None:
        power = ProcessLimits(threads=threads)
        super().__init__(cast(Any, None), SystemClock(), cast(Any, None), power)
        self._fixed = files

    @override
    async def _files(self, model: ModelVersion) -> ModelFiles:
        return self._fixed


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """A data directory with a version that answers, a key with credits, and a worker."""

    path: Path
    files: ModelFiles
    key: str
    worker: str  # its token


async def prepare(path: Path, run: str = RUN) -> Prepared:
    """Make the data directory."""
    async with local_coordinator(path) as home:
        inside = home.coordinator
        await home.start_run(run)
        ann = await home.join("Ann")
        who = ann.volunteer_id
        await inside.db.write(lambda c: gifts.grant(c, who, "bench", 10**12, "", 1.0))
        reply = await ann.post("/me/keys", {"name": "bench"})
        engine = BuiltinEngine(inside.db, SystemClock(), inside.blobs)
        files = await engine._files(MODEL)
        await engine.close()
        return Prepared(path=path, files=files, key=reply.json()["key"], worker=_token(ann))


def _token(worker: Worker) -> str:
    return f"{worker.worker_id}.{worker.secret}"


async def streamed(port: int, key: str, prompt: str, tokens: int) -> tuple[float, int]:
    """Ask over a connection of its own; when the first event came, and how many had text."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    wish = {"model": "bench", "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    body = json.dumps(wish | {"stream": True, "stream_options": {"include_usage": True}}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    first, made = 0.0, 0
    while line := await reader.readline():
        if not line.startswith(b"data: "):
            assert b"HTTP/1.1 4" not in line, line
            continue
        first = first or time.perf_counter()
        if b'"completion_tokens"' in line:
            made = json.loads(line[6:])["usage"]["completion_tokens"]
        if line.startswith(b"data: [DONE]"):
            break
    writer.close()
    return first, made


def beats(port: int, token: str, seconds: float) -> tuple[list[float], list[float]]:
    """Send heartbeats, and claims whose task is given back; how long each took, in seconds."""
    heartbeats, claims = [], []
    ends = time.perf_counter() + seconds
    with Connection(port, token) as line:
        while time.perf_counter() < ends:
            began = time.perf_counter()
            line.call(f"{API}/workers/heartbeat", {})
            heartbeats.append(time.perf_counter() - began)
            wish = {"claim_id": secrets.token_hex(16), "wait_s": 0, "codecs": ["float32"]}
            began = time.perf_counter()
            lease = line.call(f"{API}/claims", wish).get("lease")
            claims.append(time.perf_counter() - began)
            if lease is not None:
                back = json.dumps({"attempt": lease["attempt"]}).encode()
                line.send("POST", f"{API}/tasks/{lease['task']}/release", [back])
            time.sleep(PAUSE_S)
    return heartbeats, claims


def p95(values: list[float]) -> float:
    """Return the 95th percentile in milliseconds."""
    return 1e3 * sorted(values)[int(0.95 * (len(values) - 1))]


async def measure(folder: Path, repeats: int, seconds: float) -> dict[str, Any]:
    """Return what a server adds to the engine at sixteen streams, and what they do to workers.

    Both engines have one thread, and the same prompts; the server is one process and its engine
    another. CPU does not depend on who else uses the cores, as rates do.
    """
    made = await prepare(folder / "coordinator")
    engine = FixedEngine(made.files, 1)
    try:
        with Process(made.path, "--port", "0", **OFF) as server:
            await _http(server, made)  # which loads the version
            await _direct(engine)
            turns = [(await _direct(engine), await _http(server, made)) for _ in range(repeats)]
            firsts = await _firsts(server, made)
            beside = [await _beside(server, made, seconds) for _ in range(repeats)]
    finally:
        await engine.close()
    of = statistics.median
    tokens = STREAMS * TOKENS
    rates = [tokens / each for each, _ in turns], [tokens / each[0] for _, each in turns]
    return {
        "engine_tokens_per_s": round(of(rates[0]), 1),
        "http_tokens_per_s": round(of(rates[1]), 1),
        "http_beside_engine": round(of(h / d for d, h in zip(*rates, strict=True)), 2),
        "server_cpu_beside_engine_cpu": round(of(each[1] for _, each in turns), 3),
        "prefill_ms": round(1e3 * of(bare for bare, _ in firsts), 1),
        "first_token_http_ms": round(1e3 * of(served for _, served in firsts), 1),
        "first_token_over_prefill_ms": round(1e3 * of(s - bare for bare, s in firsts), 1),
        "heartbeat_p95_quiet_ms": round(of(each[0][0] for each in beside), 2),
        "heartbeat_p95_ms": round(of(each[1][0] for each in beside), 2),
        "heartbeat_ratio": round(of(each[1][0] / each[0][0] for each in beside), 2),
        "claim_p95_quiet_ms": round(of(each[0][1] for each in beside), 2),
        "claim_p95_ms": round(of(each[1][1] for each in beside), 2),
        "claim_ratio": round(of(each[1][1] / each[0][1] for each in beside), 2),
    }


async def _direct(engine: BuiltinEngine) -> float:
    async def one(prompt: str) -> None:
        told = await engine.prepare(MODEL, prompt)
        sequence = batch.Sequence(
            id="x", prompt=told.tokens, max_tokens=TOKENS, seed=0, temperature=0
        )
        wish = Generation(model=MODEL, sequence=sequence)
        assert sum([len(piece.tokens) async for piece in engine.generate(wish)]) == TOKENS

    began = time.perf_counter()
    await asyncio.gather(*map(one, PROMPTS))
    return time.perf_counter() - began


async def _http(server: Process, made: Prepared) -> tuple[float, float]:
    """Return the seconds of all streams, and the CPU of the server beside that of its engine."""
    before, began = _cpu(server), time.perf_counter()
    found = await asyncio.gather(
        *(streamed(server.port, made.key, prompt, TOKENS) for prompt in PROMPTS)
    )
    took = time.perf_counter() - began
    assert {tokens for _, tokens in found} == {TOKENS}
    after = _cpu(server)
    return took, (after[0] - before[0]) / max(1e-9, after[1] - before[1])


async def _firsts(server: Process, made: Prepared) -> list[tuple[float, float]]:
    """Return the seconds of a bare prefill of 64 tokens, and until the first token of the same
    prompt over HTTP at idle, in turns.
    """
    about = of_file(made.files.file)
    weights = read_weights(Path(made.files.weights), about)
    tokenizer = Path(made.files.tokenizer or "").read_bytes()
    found = about.workload.decoder(about.file.model, weights, tokenizer, 1, "cpu")
    assert found is not None
    prompt = PROMPTS[0]
    while len(found.encode(prompt)) < FIRST_TOKENS:
        prompt += PROMPTS[0]
    tokens = found.encode(prompt)[:FIRST_TOKENS]
    text = found.decode(tokens)
    turns = []
    for _ in range(FIRSTS):
        began = time.perf_counter()
        found.prefill(0, tokens, 0)
        bare = time.perf_counter() - began
        began = time.perf_counter()
        first, _ = await streamed(server.port, made.key, text, 1)
        turns.append((bare, first - began))
    return turns


def _cpu(server: Process) -> tuple[float, float]:
    """Return the CPU seconds of the server and of its engine."""
    main = psutil.Process(server.child.pid)
    workers = [
        each
        for each in main.children()
        if "coordinator.inference.inference_process" in each.cmdline()
    ]
    return _used(main), sum(map(_used, workers))


def _used(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def _beside(
    server: Process, made: Prepared, seconds: float
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return p95 of heartbeats and claims in milliseconds, without streams and with sixteen."""
    quiet = await asyncio.to_thread(beats, server.port, made.worker, seconds)
    ended = False

    async def keep(prompt: str) -> None:
        while not ended:
            await streamed(server.port, made.key, prompt, TOKENS)

    streams = [asyncio.create_task(keep(prompt)) for prompt in PROMPTS]
    busy = await asyncio.to_thread(beats, server.port, made.worker, seconds)
    ended = True
    await asyncio.gather(*streams)
    return (p95(quiet[0]), p95(quiet[1])), (p95(busy[0]), p95(busy[1]))
