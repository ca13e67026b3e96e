"""What a machine tells of itself is cut to size, never refused, and cannot move a terminal's
cursor.
"""

from __future__ import annotations

import math
import unicodedata

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from coordinator.rules import reports
from shared.protocol.accounts import Benchmark, Device, Hardware

anything = st.text(max_size=600)
counts = st.integers(-(2**70), 2**70)
rates = st.floats(allow_nan=True, allow_infinity=True)
devices = st.builds(
    Device, id=anything, kind=st.just("cuda"), name=anything, memory_bytes=counts, problem=anything
)


def test_an_honest_report_is_kept_as_it_is() -> None:
    told = Hardware(
        hostname="desk",
        system="Linux 6.1",
        cores=8,
        threads=16,
        memory_bytes=32 << 30,
        devices=(Device(id="cuda:0", kind="cuda", name="GeForce RTX 4090", memory_bytes=24 << 30),),
        torch="2.13.0",
        python="3.11.9",
    )
    assert reports.hardware(told) == told


@given(anything, st.integers(1, 300))
def test_a_line_is_one_printable_line(text: str, chars: int) -> None:
    line = reports.line(text, chars)
    assert len(line) <= chars
    assert line == " ".join(line.split())
    assert not any(unicodedata.category(c)[0] == "C" for c in line)


@given(
    st.builds(
        Hardware, hostname=anything, cores=counts, devices=st.lists(devices, max_size=20).map(tuple)
    )
)
def test_any_report_fits_its_column(told: Hardware) -> None:
    kept = reports.hardware(told)
    assert len(kept.hostname) <= reports.TEXT_CHARS_MAX
    assert len(kept.devices) <= reports.DEVICES_MAX
    assert 0 <= kept.cores <= reports.COUNT_MAX
    assert reports.hardware(kept) == kept
    assert msgspec.json.decode(msgspec.json.encode(kept), type=Hardware) == kept


@given(rates, rates, rates)
def test_rates_are_finite_and_not_negative(fp32: float, bf16: float, at: float) -> None:
    told = Benchmark(
        device="cpu",
        fp32_flops=fp32,
        bf16_flops=bf16,
        step_flops=fp32,
        at=at,
    )
    (kept,) = reports.benchmarks([told])
    for value in (kept.fp32_flops, kept.bf16_flops, kept.step_flops):
        assert 0.0 <= value <= reports.RATE_MAX
    assert math.isfinite(kept.at)


def test_the_last_result_of_a_device_counts() -> None:
    told = [
        Benchmark(device="cpu", fp32_flops=1, bf16_flops=1, step_flops=flops)
        for flops in (1.0, 2.0)
    ]
    assert [b.step_flops for b in reports.benchmarks(told)] == [2.0]


def benchmark(device: str = "cpu", **rates: float) -> Benchmark:
    told = {"fp32_flops": 1.0, "bf16_flops": 2.0, "step_flops": 4.0, "at": 6.0}
    return Benchmark(device=device, **(told | rates))


def test_an_honest_benchmark_is_kept_as_it_is() -> None:
    told = [benchmark("cpu"), benchmark("d" * 32, at=-7.5), benchmark("none", fp32_flops=0.0)]
    assert reports.benchmarks(told) == tuple(told)


def test_what_is_no_number_or_too_long_is_cut() -> None:
    odd = benchmark("d" * 33, fp32_flops=math.inf, bf16_flops=math.nan, step_flops=-1, at=math.nan)
    (kept,) = reports.benchmarks([odd])
    assert kept == benchmark("d" * 32, fp32_flops=0.0, bf16_flops=0.0, step_flops=0.0, at=0.0)
    (huge,) = reports.benchmarks([benchmark(bf16_flops=1e300)])
    assert huge.bf16_flops == reports.RATE_MAX


def test_so_many_devices_and_so_many_results_are_read() -> None:
    many = [benchmark(f"cuda:{n % 20}", at=float(n)) for n in range(100)]
    kept = reports.benchmarks(many)
    assert [b.device for b in kept] == [f"cuda:{n}" for n in range(16)]
    assert [b.at for b in kept] == [60.0, 61.0, 62.0, 63.0, *(float(n) for n in range(44, 56))]


def test_workloads_are_named_once_and_no_more_than_fit() -> None:
    assert reports.workloads(["gpt", "g\npt", "gpt", "w" * 65]) == ("gpt", "g pt", "w" * 64)
    assert len(reports.workloads([f"w{n}" for n in range(40)])) == 32


def test_a_machine_is_cut_to_its_columns() -> None:
    device = Device(id="i" * 33, kind="cuda", name="n" * 300, memory_bytes=1 << 60, problem="p\n")
    (kept,) = reports.hardware(Hardware(devices=(device,))).devices
    assert (kept.id, kept.name, kept.memory_bytes, kept.problem) == (
        "i" * 32, "n" * 255, 1 << 53, "p",
    )  # fmt: skip
    told = Hardware(hostname="h" * 300, system="s\x1b[2J", cores=-1, threads=7, memory_bytes=8)
    told = msgspec.structs.replace(told, torch="t" * 80, python="p" * 80, devices=(device,) * 20)
    kept_all = reports.hardware(told)
    assert (kept_all.hostname, kept_all.system, kept_all.cores) == ("h" * 255, "s [2J", 0)
    assert (kept_all.threads, kept_all.memory_bytes) == (7, 8)
    assert (kept_all.torch, kept_all.python) == ("t" * 64, "p" * 64)
    assert len(kept_all.devices) == 16
