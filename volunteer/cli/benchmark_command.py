"""`volunteer benchmark`: measure the devices, store the result, report it to the coordinator."""

from __future__ import annotations

import asyncio
import sys

from shared.clock import SystemClock
from shared.errors import Unavailable
from shared.protocol import endpoints
from shared.protocol.accounts import Benchmark, BenchmarkRequest, Device
from shared.text import left, printable, table_lines
from volunteer.account.instance_lock import ProfileAtWork, instance_lock
from volunteer.account.join import connector
from volunteer.account.profile_directory import Identity, Profile
from volunteer.cli.exit_codes import remark
from volunteer.cli.json_output import print_json
from volunteer.i18n.catalogue import N_, _, number, translated
from volunteer.machine.benchmark import benchmark
from volunteer.machine.devices import choose, default_threads, detect, hardware
from volunteer.net.api import Api
from volunteer.settings import settings as config
from volunteer.settings.settings import Directories
from volunteer.training.trainer import Trainer

LINE = 40  # cells of the progress line
STAGES = {"step": N_("training")}


def measure(directories: Directories, device: str, *, quick: bool, json: bool) -> int:
    """Measure the devices, print and store the result; return the exit code.

    Raises Configuration for a missing device.
    """
    settings = config.load(path=directories.config / "config.toml").settings
    clock = SystemClock()
    trainer = Trainer("benchmark", threads=settings.threads or default_threads(), clock=clock)
    trainer.start()
    devices = trainer.call(detect).result()
    results = [
        _benchmark_device(trainer, candidate, directories, quick=quick, now=clock.now())
        for candidate in choose(device, devices)
    ]
    trainer.close()
    if json:
        print_json(results)
    else:
        print("\n".join(_lines(devices, results)))
    try:
        with instance_lock(directories.profile):  # a running volunteer would overwrite the result
            _store_and_publish(directories, tuple(results), devices)
    except ProfileAtWork:
        remark(_("nothing is stored: a volunteer is at work on this profile and shares the device"))
    return 0


def _benchmark_device(
    trainer: Trainer, device: Device, directories: Directories, *, quick: bool, now: float
) -> Benchmark:
    tty = sys.stderr.isatty()

    def report(stage: str, done: float) -> None:
        if tty:
            progress_line = left(
                f"{device.id}: {100 * done:3.0f} % {_(STAGES.get(stage, stage))}", LINE
            )
            print(f"\r{progress_line}", end="", file=sys.stderr, flush=True)

    result = trainer.call(
        lambda: benchmark(
            device.id,
            quick=quick,
            report=report,
            stop=lambda: False,
            now=now,
        )
    ).result()
    if tty:
        print(f"\r{' ' * LINE}\r", end="", file=sys.stderr, flush=True)
    return result


def _lines(devices: tuple[Device, ...], results: list[Benchmark]) -> list[str]:
    names = {device.id: printable(device.name) for device in devices}
    titles = [_("device"), _("training"), "fp32", "bf16", _("name")]
    rows = [
        (
            b.device,
            f"{number(b.step_flops / 1e9, ',.0f')} GF/s",
            f"{number(b.fp32_flops / 1e9, ',.0f')} GF/s",
            f"{number(b.bf16_flops / 1e9, ',.0f')} GF/s",
            names.get(b.device, ""),
        )
        for b in results
    ]
    unusable = [
        printable(
            _("{device} cannot be used: {problem}", device=d.name, problem=translated(d.problem))
        )
        for d in devices
        if not d.usable
    ]
    return table_lines(titles, rows) + unusable


def _store_and_publish(
    directories: Directories, results: tuple[Benchmark, ...], devices: tuple[Device, ...]
) -> None:
    profile = Profile(directories.profile)
    identity = profile.current()
    if identity is None:
        return
    machine = hardware(devices)
    home = profile.home(identity)
    older = home.memory.benchmarks if home.memory.torch == machine.torch else ()
    fresh = {b.device for b in results}
    benchmarks = (*(b for b in older if b.device not in fresh), *results)
    home.remember(benchmarks=benchmarks, torch=machine.torch)
    if identity.registered:
        request = BenchmarkRequest(benchmarks=benchmarks, hardware=machine)
        asyncio.run(_publish(identity, request))


async def _publish(identity: Identity, request: BenchmarkRequest) -> None:
    client = connector(SystemClock())(identity.address, identity.token)
    try:
        await Api(client).call(endpoints.BENCHMARK, body=request, patience_s=2.0)
    except Unavailable as error:
        remark(_("not reported to the coordinator: {message}", message=translated(error.message)))
    finally:
        await client.close()
