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


@given(rates, rates, rates, rates)
def test_rates_are_finite_and_not_negative(
    fp32: float, bf16: float, memory: float, at: float
) -> None:
    told = Benchmark(
        device="cpu",
        fp32_flops=fp32,
        bf16_flops=bf16,
        memory_bytes_per_s=memory,
        step_flops=fp32,
        at=at,
    )
    (kept,) = reports.benchmarks([told])
    for value in (kept.fp32_flops, kept.bf16_flops, kept.memory_bytes_per_s, kept.step_flops):
        assert 0.0 <= value <= reports.RATE_MAX
    assert math.isfinite(kept.at)


def test_the_last_result_of_a_device_counts() -> None:
    told = [
        Benchmark(device="cpu", fp32_flops=1, bf16_flops=1, memory_bytes_per_s=1, step_flops=flops)
        for flops in (1.0, 2.0)
    ]
    assert [b.step_flops for b in reports.benchmarks(told)] == [2.0]
