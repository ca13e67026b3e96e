"""What the screen costs: time to the first paint, share of a core at the dashboard, key-to-screen
latency while training, of keys and of pages, how soon a pause leaves the device, and the rate of training beside
`--no-ui`.

    python -m tests.benchmarks.bench_screen --json screen.json
    python -m tests.benchmarks.bench_screen --starts 3 --keys 60 --seconds 10

Everything is measured from outside, on a pseudo-terminal: a key is written, and the clock stops
when the word that it changes has been read. The work beside it is one torch thread that trains a
small GPT, or pure Python as in self-play. A pause lasts from the key until the training thread has
let go of everything on the device; its rows are the worst of all pauses. For the rate the same
tasks are trained in turns by a process with the screen and by one without, each stopped while it is
the other's turn.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from shared.protocol.accounts import Benchmark
from shared.protocol.contributions import Verdict
from tests.tui.terminal import Terminal
from volunteer.account.profile_directory import VERDICTS_KEPT, Identity, Profile
from volunteer.settings.settings import directories

GOALS = {
    "first paint, wall s": 0.8,
    "first paint, cpu s": 0.8,
    "dashboard, % of a core": 2.6,
    "key, median ms": 10.0,
    "key, 99th percentile ms": 50.0,
    "key, worst ms": 50.0,
    "page change, 90th percentile ms": 40.0,
    "page change beside a GPT, 90th percentile ms": 50.0,
    "pause to idle device, s": 2.0,
    "while paused, % of a core": 2.6,
    "rate beside --no-ui": 1.0,
}
AT_LEAST = ("rate beside --no-ui",)
FIRST_WORDS = b"Loss of the model"
VOLUNTEER = [sys.executable, "-c", "from volunteer.__main__ import main; main()"]
PROGRAM = """
import asyncio, os, random, sys, threading, time
from shared.clock import SystemClock
from shared.errors import Unreachable
from volunteer.control import commands, events
from volunteer.control.control import Control
from volunteer.control.event_bus import EventBus
from volunteer.tui.app import VolunteerApp

hub = EventBus(SystemClock())

async def obey(command):
    if isinstance(command, commands.Pause):
        hub.emit(events.Paused(device="", by="you", message="paused"))
    elif isinstance(command, commands.Resume):
        hub.emit(events.Resumed(device=""))
    elif isinstance(command, commands.Stop):
        hub.close()
    elif isinstance(command, commands.Query):
        raise Unreachable("nobody answers the bench")

def gpt():
    import torch
    from volunteer.machine.priority import lower_thread
    lower_thread()
    torch.set_num_threads(1)
    layer = torch.nn.TransformerEncoderLayer(64, 4, 256, 0.0, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    while True:
        loss = model(torch.randn(4, 64, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

def play():
    tree = {}
    while True:
        place = tuple(random.randrange(9) for _ in range(4))
        tree[place] = tree.get(place, 0) + 1

async def tell():
    hub.emit(events.Started(coordinator="", server="bench", nickname="n", fingerprint="", volunteer_id="v"))
    hub.emit(events.Connection(online=True))
    hub.emit(events.Claimed(task=1, attempt=1, run="r", workload="gpt", device="cpu", steps=4000, samples=1,
                            price_micro=1, finish_by=time.time() + 9999))
    for step in range(1, 4001):
        hub.emit(events.Training(task=1, run="r", device="cpu", step=step, steps=4000, samples=step,
                                 loss=3 + random.random(), steps_per_s=4.0, tokens_per_s=900 * random.random(),
                                 eta_s=1000.0, version=1))
        await asyncio.sleep(0.25 if step > 1000 else 0)

async def main():
    work = {"gpt": gpt, "python": play}.get(sys.argv[1])
    if work:
        threading.Thread(target=work, daemon=True).start()
        if work is gpt:
            while "torch.optim" not in sys.modules:
                await asyncio.sleep(0.1)
    telling = asyncio.create_task(tell()) if sys.argv[1] != "bare" else None
    await VolunteerApp(Control(hub, obey)).run_async()
    os._exit(0)

asyncio.run(main())
"""


ROOT = str(Path(__file__).resolve().parents[2])


def start(work: str) -> Terminal:
    return Terminal([sys.executable, "-c", PROGRAM, work], PYTHONPATH=ROOT, OMP_NUM_THREADS="1")


def read_until(terminal: Terminal, word: bytes, patience_s: float) -> float:
    """Read until a word appears; return the monotonic time."""
    until = time.perf_counter() + patience_s
    seen = b""
    while word not in seen:
        if time.perf_counter() > until:
            raise SystemExit(f"{word!r} never came")
        if select.select([terminal.master], [], [], 0.05)[0]:
            seen += os.read(terminal.master, 1 << 16)
    return time.perf_counter()


def joined(home: str) -> None:
    """A profile that has handed in as much as is remembered; nobody answers at its coordinator's
    address.
    """
    identity = Identity(
        url="http://127.0.0.1:9",
        tls_pin="",
        public_key="00" * 32,
        fingerprint="ab12",
        server="bench",
        volunteer_id="v",
        worker_id="w",
        secret="s",
        nickname="ann",
        registered=True,
    )
    profile = Profile(directories({"VOLUNTEER_HOME": home}).profile)
    profile.use(identity)
    verdicts = tuple(
        Verdict(contribution=n, task=n, run="r", state="merged", version=n, at=float(n))
        for n in range(VERDICTS_KEPT)
    )
    remembered = profile.home(identity)
    remembered.remember_verdicts(verdicts, VERDICTS_KEPT)
    speed = Benchmark(device="cpu", fp32_flops=1e11, bf16_flops=1e11, step_flops=1e10)
    remembered.remember(benchmarks=(speed,))  # without one it begins with the first questions


def first_paint(of: str) -> tuple[float, float]:
    """Wall and CPU seconds from the start of Python to the first screen: of the bare dashboard, or
    of `volunteer` on a machine that is new or has joined.
    """
    with tempfile.TemporaryDirectory() as home:
        if of == "joined":
            joined(home)
        began = time.perf_counter()
        real = (
            Terminal(VOLUNTEER, PYTHONPATH=ROOT, VOLUNTEER_HOME=home) if of != "dashboard" else None
        )
        with real or start("bare") as terminal:
            painted = read_until(terminal, b"join link" if of == "new" else FIRST_WORDS, 30)
            times = psutil.Process(terminal.child.pid).cpu_times()
            return painted - began, times.user + times.system


def share(seconds: float, size: tuple[int, int]) -> float:
    """Per cent of a core that the dashboard takes while four events a second come in."""
    with start("none") as terminal:
        resize(terminal, *size)
        read_until(terminal, FIRST_WORDS, 30)
        drain(terminal, 5)  # until the first thousand steps have been told
        process = psutil.Process(terminal.child.pid)
        before, began = sum(process.cpu_times()[:2]), time.perf_counter()
        drain(terminal, seconds)
        used = sum(process.cpu_times()[:2]) - before
        return float(100 * used / (time.perf_counter() - began))


def resize(terminal: Terminal, columns: int, rows: int) -> None:
    import fcntl
    import struct
    import termios

    fcntl.ioctl(terminal.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    terminal.child.send_signal(28)  # SIGWINCH


def drain(terminal: Terminal, seconds: float) -> None:
    until = time.perf_counter() + seconds
    while (left := until - time.perf_counter()) > 0:
        if select.select([terminal.master], [], [], left)[0]:
            os.read(terminal.master, 1 << 16)


def latencies(work: str, keys: int) -> list[float]:
    """Milliseconds from a key to the word that it changes."""
    dice = random.Random(0)
    found = []
    with start(work) as terminal:
        read_until(terminal, FIRST_WORDS, 60)
        drain(terminal, 5)
        for number in range(keys):
            word = b"resume" if number % 2 == 0 else b"pause"
            began = time.perf_counter()
            os.write(terminal.master, b" ")
            found.append(1000 * (read_until(terminal, word, 20) - began))
            drain(terminal, dice.uniform(0.05, 0.15))
    return found


def page_changes(work: str, changes: int) -> list[float]:
    """Milliseconds from a key to the last byte of the other page, which has been open before.

    The page is whole when nothing follows for 10 ms: a change is one frame.
    """
    found = []
    with start(work) as terminal:
        resize(terminal, 120, 36)
        read_until(terminal, FIRST_WORDS, 60)
        drain(terminal, 5)
        for number in range(7 + changes):
            began = last = time.perf_counter()
            os.write(terminal.master, b"2345671"[number % 7 : number % 7 + 1])
            size = 0
            while size < 4000 or time.perf_counter() < last + 0.01:
                if select.select([terminal.master], [], [], 0.01)[0]:
                    size += len(os.read(terminal.master, 1 << 16))
                    last = time.perf_counter()
            found.append(1000 * (last - began))
            drain(terminal, 0.2)
    return found[7:]


class Front:
    """A front end over real training, in a process of its own (front.py)."""

    def __init__(self, kind: str, directory: Path) -> None:
        orders, times = directory / f"{kind}-orders", directory / f"{kind}-times"
        os.mkfifo(orders)
        os.mkfifo(times)
        self._orders, self._times = (os.open(p, os.O_RDWR | os.O_NONBLOCK) for p in (orders, times))
        self._told = b""
        command = [sys.executable, "-m", "tests.benchmarks.front", kind, str(orders), str(times)]
        self.terminal: Terminal | None = None
        if kind == "screen":
            self.terminal = Terminal(command, PYTHONPATH=ROOT, OMP_NUM_THREADS="1")
            self.child = self.terminal.child
        else:
            around = os.environ | {"PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"}
            self.child = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=around)

    def order(self, model: str, number: int) -> None:
        os.write(self._orders, f"{model} {number}\n".encode())

    def told(self, patience_s: float = 300.0) -> float:
        """The next time that it writes; what it draws meanwhile is read."""
        until = time.monotonic() + patience_s
        ends = [self._times, *([self.terminal.master] if self.terminal else [])]
        while b"\n" not in self._told:
            if time.monotonic() > until:
                raise SystemExit("the front end fell silent")
            for end in select.select(ends, [], [], 0.5)[0]:
                new = os.read(end, 1 << 16)
                self._told += new if end == self._times else b""
        line, _, self._told = self._told.partition(b"\n")
        return float(line)

    def trained(self, model: str, number: int) -> float:
        """Seconds that training took, with this process awake for it alone."""
        self.child.send_signal(signal.SIGCONT)
        self.order(model, number)
        seconds = self.told()
        self.child.send_signal(signal.SIGSTOP)
        return seconds

    def end(self) -> None:
        self.child.kill()
        self.child.wait()
        if self.terminal is not None:
            self.terminal.vanish()
        for end in (self._orders, self._times):
            os.close(end)


def pauses(number: int) -> tuple[list[float], float]:
    """Seconds from the key to the idle device, and the share of a core that is used while paused,
    in per cent.
    """
    dice, found, used = random.Random(0), [], 0.0
    with tempfile.TemporaryDirectory() as directory:
        front = Front("screen", Path(directory))
        assert front.terminal is not None
        process = psutil.Process(front.child.pid)
        front.order("large", 1000)
        drain(front.terminal, 12)
        for _ in range(number):
            began = time.monotonic()
            os.write(front.terminal.master, b" ")
            found.append(front.told() - began)
            before = sum(process.cpu_times()[:2])
            drain(front.terminal, 1.0)
            used += sum(process.cpu_times()[:2]) - before
            os.write(front.terminal.master, b" ")
            drain(front.terminal, dice.uniform(1.0, 3.0))
        front.end()
    return found, 100 * used / number


def rates(pairs: int, seconds: float) -> list[float]:
    """Rate of training with the screen open by the rate without, pair by pair."""
    found = []
    with tempfile.TemporaryDirectory() as directory:
        fronts = [Front(kind, Path(directory)) for kind in ("screen", "lines")]
        once = max(front.trained("small", 1) for front in fronts)  # the first warms up
        once = max(front.trained("small", 1) for front in fronts)
        number = max(1, round(seconds / once))
        for pair in range(pairs):
            took = {}
            for kind in (0, 1) if pair % 2 else (1, 0):
                took[kind] = fronts[kind].trained("small", number)
            found.append(took[1] / took[0])
        for front in fronts:
            front.end()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--starts", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--keys", type=int, default=300)
    parser.add_argument("--changes", type=int, default=70, help="of pages")
    parser.add_argument("--pauses", type=int, default=20)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--slice", type=float, default=8.0, help="seconds of each of a pair")
    parser.add_argument(
        "--only", choices=("paint", "share", "keys", "pages", "pause", "rate"), nargs="*"
    )
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []

    def note(what: str, beside: str, value: float) -> None:
        goal = GOALS[what]
        met = round(value, 2) >= goal if what in AT_LEAST else value <= goal
        rows.append({"what": what, "beside": beside, "value": value, "goal": goal, "met": met})
        said = "met" if met else "MISSED"
        print(f"{what:<26} {beside:<14} {value:8.3f}  goal {goal:g}  {said}", flush=True)

    def wanted(part: str) -> bool:
        return not options.only or part in options.only

    if wanted("paint"):
        for beside in ("dashboard", "new", "joined"):
            starts = [first_paint(beside) for _ in range(options.starts)]
            note("first paint, wall s", beside, statistics.median(wall for wall, _ in starts))
            note("first paint, cpu s", beside, statistics.median(cpu for _, cpu in starts))
    for size in ((80, 24), (120, 36)) if wanted("share") else ():
        note("dashboard, % of a core", f"{size[0]} x {size[1]}", share(options.seconds, size))
    for work in ("none", "gpt", "python") if wanted("keys") else ():
        found = sorted(latencies(work, options.keys))
        note("key, median ms", work, statistics.median(found))
        note("key, 99th percentile ms", work, found[min(len(found) - 1, int(len(found) * 0.99))])
        note("key, worst ms", work, found[-1])
    for work, row in (("none", "page change"), ("gpt", "page change beside a GPT")):
        if wanted("pages"):
            found = sorted(page_changes(work, options.changes))
            note(f"{row}, 90th percentile ms", work, found[int(len(found) * 0.9)])
    if wanted("pause"):
        lasted, used = pauses(options.pauses)
        note("pause to idle device, s", f"worst of {len(lasted)}", max(lasted))
        note("while paused, % of a core", "gpt", used)
    if wanted("rate"):
        pairs = rates(options.pairs, options.slice)
        note("rate beside --no-ui", f"{len(pairs)} pairs", statistics.median(pairs))
        print("  each pair:", " ".join(f"{ratio:.3f}" for ratio in pairs))
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "load": os.getloadavg()}, indent=1))


if __name__ == "__main__":
    main()
