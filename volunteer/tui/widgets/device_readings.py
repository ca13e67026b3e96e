"""Live readings of a device: load, memory, temperature, power."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from rich.cells import cell_len

from shared.protocol.accounts import Device
from volunteer.control.events import Sensed
from volunteer.i18n.catalogue import _, translated
from volunteer.tui.status_line import activity
from volunteer.tui.text import Line, bar, fit, paragraph, percent, spark
from volunteer.tui.widgets.cards import NAME_CELLS, fact, memory_spans, pace_lines, power_span
from volunteer.tui.widgets.panel import Scene

READINGS_MAX = 120  # readings kept of one device: some minutes
PERCENT_CELLS = 5


class Readings:
    """Newest loads of each device, for the small curve."""

    def __init__(self) -> None:
        self._load: dict[str, deque[float]] = {}
        self._at: dict[str, float] = {}

    def take(self, sensors: Mapping[str, Sensed]) -> None:
        """Store the new loads."""
        for device, sensed in sensors.items():
            if sensed.utilisation is not None and self._at.get(device) != sensed.at:
                self._at[device] = sensed.at
                readings = self._load.setdefault(device, deque(maxlen=READINGS_MAX))
                readings.append(sensed.utilisation)

    def load(self, device: str) -> tuple[float, ...]:
        return tuple(self._load.get(device, ()))


def live_lines(
    device: Device, scene: Scene, cells: int, loads: tuple[float, ...], duty: int | None
) -> list[Line]:
    """Return a device's present state: share of working time, pace, load, temperature and power."""
    if not device.usable:
        return unusable_lines(device, scene, cells)
    lines: list[Line] = [fact(_("state"), *device_state(device, scene, cells))]
    if duty is not None:
        tail = f" {duty} %".rjust(PERCENT_CELLS + 1)
        room = cells - NAME_CELLS - len(tail)
        lines.append(fact(_("duty"), *bar(duty / 100, room, scene.glyphs), (tail, "value")))
    sensed = scene.view.sensors.get(device.id) or Sensed(device=device.id)
    lines += _load(sensed, loads, scene, cells)
    lines.append(fact(_("power"), power_span(sensed)))
    if sensed.celsius is not None:
        lines.append(fact(_("heat"), (f"{sensed.celsius:.0f} °C", "text")))
    lines.append(fact(_("memory"), *memory_spans(scene, device, cells)))
    speed_lines = pace_lines(scene, device.id, cells)
    return [
        *lines,
        *(speed_lines or [fact(_("pace"), (_("no training since this screen was opened"), "dim"))]),
    ]


def unusable_lines(device: Device, scene: Scene, cells: int) -> list[Line]:
    """Return the reason why a device cannot be used."""
    sentence = translated(scene.view.status.problem(device)) or _("torch cannot use this device")
    return paragraph(sentence, cells, 8, "bad")


def device_state(device: Device, scene: Scene, cells: int) -> Line:
    """Return the state of a usable device as a word, then a sentence cut to the room left."""
    status = scene.view.status
    measured = any(speed.device == device.id for speed in status.benchmarks)
    if not (measured or scene.view.task(device.id) or status.paused(device.id)):
        return ((f"{scene.glyphs.off} {_('not lent')}", "dim"),)
    state = activity(scene.view, scene.now, scene.glyphs, device.id)
    word = f"{state.sign} {state.word}"
    room = max(0, cells - NAME_CELLS - cell_len(word) - 2)
    return ((word, state.role), (f"  {fit(state.sentence, room, scene.glyphs.ellipsis)}", "text"))


def _load(sensed: Sensed, loads: tuple[float, ...], scene: Scene, cells: int) -> list[Line]:
    """Return the load as a small curve up to the newest value, or as a bar for fewer than three
    values; [] without a reading.
    """
    if sensed.utilisation is None:
        return []
    tail = f" {percent(sensed.utilisation)}"
    room = cells - NAME_CELLS - len(tail)
    if len(loads) < 3:
        return [fact(_("load"), *bar(sensed.utilisation, room, scene.glyphs), (tail, "text"))]
    drawn = spark((*loads, 1.0), room + 1, scene.glyphs)[:-1]  # the 1.0 only sets the scale
    return [fact(_("load"), (drawn, "raw"), (tail, "text"))]
