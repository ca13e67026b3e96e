"""Reports of a worker about itself, cut to size before they are stored.

Reports size a worker's tasks, but decide no pay; some are shown to people.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence

import msgspec

from shared.protocol.accounts import Benchmark, Device, Hardware
from shared.text import is_undrawn

DEVICES_MAX = 16
WORKLOADS_MAX = 32
NAME_CHARS_MAX = 64
TEXT_CHARS_MAX = 255
COUNT_MAX = 1 << 53
RATE_MAX = 1e24  # operations or bytes a second; far above any machine


def line(text: str, chars: int = TEXT_CHARS_MAX) -> str:
    """Return one printable line, without characters that control a terminal or are not drawn."""
    printable_text = "".join(
        " " if unicodedata.category(c)[0] == "C" else "" if is_undrawn(c) else c
        for c in text[: chars * 4]
    )
    return " ".join(printable_text.split())[:chars].rstrip()


def hardware(report: Hardware) -> Hardware:
    """Return the report with every text, list and number within its limit."""
    return Hardware(
        hostname=line(report.hostname),
        system=line(report.system),
        cores=_count(report.cores),
        threads=_count(report.threads),
        memory_bytes=_count(report.memory_bytes),
        devices=tuple(_device(device) for device in report.devices[:DEVICES_MAX]),
        torch=line(report.torch, NAME_CHARS_MAX),
        python=line(report.python, NAME_CHARS_MAX),
    )


def _device(device: Device) -> Device:
    return msgspec.structs.replace(
        device,
        id=line(device.id, 32),
        name=line(device.name),
        memory_bytes=_count(device.memory_bytes),
        problem=line(device.problem),
    )


def benchmarks(results: Sequence[Benchmark]) -> tuple[Benchmark, ...]:
    """Return one result for each device, the last reported, within limits."""
    by_device = {line(b.device, 32): b for b in results[: 4 * DEVICES_MAX]}
    return tuple(
        Benchmark(
            device=device,
            fp32_flops=_rate(b.fp32_flops),
            bf16_flops=_rate(b.bf16_flops),
            step_flops=_rate(b.step_flops),
            at=b.at if math.isfinite(b.at) else 0.0,
        )
        for device, b in list(by_device.items())[:DEVICES_MAX]
    )


def workloads(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the workloads that a worker reports, each once, within limits."""
    return tuple(dict.fromkeys(line(name, NAME_CHARS_MAX) for name in names[:WORKLOADS_MAX]))


def _count(value: int) -> int:
    return min(COUNT_MAX, max(0, value))


def _rate(value: float) -> float:
    return min(RATE_MAX, max(0.0, value)) if math.isfinite(value) else 0.0
