"""Device page: the devices and their readings, their benchmarks, and the tasks they would get."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Sequence
from typing import Any, ClassVar

from textual import on
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from typing_extensions import override

from shared.errors import VolunteerError
from shared.protocol import endpoints
from shared.protocol.accounts import Benchmark, Device, RunInfo, WorkerInfo
from shared.protocol.limits import process_on
from shared.settings import SettingRow
from shared.text import printable
from volunteer.control import commands
from volunteer.control.control import Control
from volunteer.control.status import GAMES
from volunteer.i18n.catalogue import N_, _, ngettext, number
from volunteer.i18n.formats import duration_words, size
from volunteer.tui import keys
from volunteer.tui.query_page import RELOAD, PageQuery, QueryPage, QueryReply
from volunteer.tui.run_estimate import estimate, game_part_words
from volunteer.tui.screens.copy_text import CopyText, for_others
from volunteer.tui.text import Line, ago, fit, flops, left, paragraph, short_number
from volunteer.tui.widgets.benchmark_progress import progress_lines
from volunteer.tui.widgets.device_readings import Readings, device_state, live_lines, unusable_lines
from volunteer.tui.widgets.panel import FunctionPanel, Scene
from volunteer.tui.widgets.table import Column, Filling, Listing, Row

NAME_CELLS = 11
READ_S = 1.5  # time between two sensor readings while this page is visible
DUTY_MIN = 5  # per cent
COLUMNS = (
    Column(title=N_("device"), cells=8),
    Column(title=N_("name"), least=56),
    Column(title=N_("state"), cells=14),
    Column(title=N_("memory"), cells=8, align="right", least=66),
    Column(title=N_("training"), cells=13, align="right"),
    Column(title="fp32", cells=13, align="right", least=96),
    Column(title="bf16", cells=13, align="right", least=112),
)


class DevicePage(QueryPage):
    """Device page: a table of devices, and the state, benchmark and tasks of the chosen one."""

    NAME = "device"
    AUTO_FOCUS = "#devices"
    ACTIONS: ClassVar[tuple[keys.KeyCommand, ...]] = (
        keys.KeyCommand(
            key="b",
            action="benchmark",
            short=N_("measure"),
            help=N_("Measure the device under the cursor, some seconds; again: stop."),
            rank=33,
        ),
        keys.KeyCommand(
            key="p",
            action="pause_device",
            short=N_("pause this"),
            help=N_("Pause or resume only the device under the cursor."),
            rank=35,
        ),
        keys.KeyCommand(
            key="minus",
            action="duty(-10)",
            short=N_("less"),
            help=N_("Let the device under the cursor work for a smaller share of the time."),
            rank=37,
        ),
        keys.KeyCommand(
            key="plus,equals_sign",
            action="duty(10)",
            short=N_("more"),
            help=N_("Let the device under the cursor work for a larger share of the time."),
            rank=38,
        ),
        keys.KeyCommand(
            key="l",
            action="link",
            short=N_("add a machine"),
            help=N_(
                "Show a link, good for ten minutes, that adds another machine to your account."
            ),
            rank=36,
        ),
        keys.KeyCommand(
            key="m",
            action="machines",
            short=N_("all my machines"),
            help=N_("Show every machine of your account; pause, resume or finish one from here."),
            rank=34,
        ),
        RELOAD,
    )
    CSS = """
    DevicePage {
        #devices { height: 8; }
        #state-and-speed { width: 1fr; }
        #now { height: 12; }
        #measured { height: 1fr; }
        #given { width: 1fr; }
        &.-narrow #below, &.-tiny #below { layout: vertical; }
        &.-middle, &.-short {
            #devices { height: 7; }
            #now { height: 1fr; }
            #measured { display: none; }
        }
        &.-measuring {
            #now { display: none; }
            #measured { display: block; }
        }
        &.-short #devices { height: 5; }
        &.-short #given { display: none; }
        &.-low #below, &.-flat #below { display: none; }
        &.-low #devices, &.-flat #devices { height: 1fr; }
    }
    """

    def __init__(self) -> None:
        super().__init__()
        self._readings = Readings()
        self._read_at = float("-inf")
        self._wanted_duty: dict[str, int] = {}  # shares set here, not in the settings yet

    @override
    def body(self) -> ComposeResult:
        with Vertical():
            yield Listing(COLUMNS, self._filling, id="devices")
            with Horizontal(id="below"):
                with Vertical(id="state-and-speed"):
                    yield FunctionPanel(self._now, title=self._now_title, id="now", classes="card")
                    yield FunctionPanel(
                        self._measured, title=self._measured_title, id="measured", classes="card"
                    )
                yield FunctionPanel(
                    self._task_lines, title=N_("Tasks for this device"), id="given", classes="card"
                )

    @override
    def queries(self) -> dict[str, PageQuery]:
        run = self.volunteer.view.run()
        queries: dict[str, PageQuery] = {
            "settings": lambda control: control.do(commands.GetSettings()),
        }
        if run:
            queries["workers"] = lambda control: control.query(endpoints.WORKERS, run=run)
        return queries

    @override
    def update_from(self, scene: Scene) -> None:
        """Request fresh sensor readings while this page is visible."""
        super().update_from(scene)
        self.set_class(scene.view.benchmark is not None, "-measuring")
        self._readings.take(scene.view.sensors)
        control = self.volunteer.control
        if control is None or scene.view.ended is not None:
            return
        if not 0 <= scene.now - self._read_at < READ_S:
            self._read_at = scene.now
            self.run_worker(self._read_sensors(control), group="look", exclusive=True)

    async def _read_sensors(self, control: Control) -> None:
        with contextlib.suppress(VolunteerError):  # not joined yet
            await control.do(commands.LookAtDevices())

    def _setting(self, name: str) -> Any:
        rows: Sequence[SettingRow] = self.reply("settings").value or ()
        return next((row.value for row in rows if row.name == name), None)

    def _duty(self, device: str) -> int | None:
        """Return a device's share of working time in percent; None while it is unknown."""
        whole = self._setting("duty_percent")
        duties = {**(self._setting("device_duty") or {}), **self._wanted_duty}
        duty = duties.get(device, whole)
        return None if duty is None else int(duty)

    # Drawing.

    def _device(self) -> Device | None:
        key = self.query_one("#devices", Listing).key
        return next((d for d in self.volunteer.view.status.devices if d.id == key), None)

    def _filling(self, scene: Scene) -> Filling:
        status = scene.view.status
        speeds = {b.device: b for b in status.benchmarks}
        return Filling(
            rows=tuple(device_row(d, speeds.get(d.id), scene) for d in status.devices),
            empty=_("looking for devices; the first time takes some seconds"),
            title=_("Devices"),
            subtitle=_(
                "{sent} sent, {received} received",
                sent=size(status.sent_bytes),
                received=size(status.received_bytes),
            ),
        )

    def _measured_title(self, scene: Scene) -> tuple[str, str]:
        device = self._device()
        if scene.view.benchmark is not None:
            return _("Measuring {device}", device=scene.view.benchmark.device), _("b stops it")
        return (_("Benchmark of {id}", id=device.id) if device else _("Benchmark")), ""

    def _measured(self, scene: Scene, width: int, height: int) -> list[Line]:
        if scene.view.benchmark is not None:
            return progress_lines(scene, width, height)
        device = self._device()
        if device is None:
            return []
        workers: QueryReply[Sequence[WorkerInfo]] = self.reply("workers")
        return benchmark_lines(device, workers.value or (), scene, width)[:height]

    def _now_title(self, scene: Scene) -> tuple[str, str]:
        device = self._device()
        return (_("{id} now", id=device.id) if device else _("Now")), ""

    def _now(self, scene: Scene, width: int, height: int) -> list[Line]:
        device = self._device()
        if device is None:
            return []
        loads, duty = self._readings.load(device.id), self._duty(device.id)
        return live_lines(device, scene, width, loads, duty)[:height]

    def _task_lines(self, scene: Scene, width: int, height: int) -> list[Line]:
        return task_lines(self._device(), scene, width, height, self._roles())

    def _roles(self) -> tuple[str, ...]:
        """Return the roles of the device under the cursor."""
        device = self._device()
        role_words = (self._setting("device_roles") or {}).get(device.id if device else "")
        return tuple(role_words.split()) if role_words else tuple(self._setting("roles") or ())

    @on(Listing.Moved)
    def _moved(self) -> None:
        self.query_one("#measured", FunctionPanel).draw()
        self.query_one("#given", FunctionPanel).draw()
        self.query_one("#now", FunctionPanel).draw()

    # Actions.

    def action_benchmark(self) -> None:
        control = self.volunteer.control
        if control is None:
            return
        if self.volunteer.view.benchmark is not None:
            self.volunteer.command(control.do(commands.StopMeasuring()))
            return
        device = self._device()
        if device is None or not device.usable:
            self.volunteer.tell(_("this device cannot be measured"), "warning")
            return
        if self.volunteer.view.task(device.id) is not None:
            self.volunteer.tell(_("measuring starts after the task in hand"))
        self.volunteer.command(control.do(commands.Measure(device=device.id)))

    def action_pause_device(self) -> None:
        control, device = self.volunteer.control, self._device()
        if control is None or device is None:
            return
        paused = any(pause.device == device.id for pause in self.volunteer.view.status.pauses)
        order = commands.Resume if paused else commands.Pause
        self.volunteer.command(control.do(order(device=device.id)))

    def action_duty(self, change: int) -> None:
        """Change the share of working time of the device under the cursor."""
        control, device = self.volunteer.control, self._device()
        duty = self._duty(device.id) if device else None
        if control is None or device is None or duty is None:
            return
        # Multiples of ten, but `DUTY_MIN` at the bottom.
        step = (duty + change) // 10 * 10 if change > 0 else -(-(duty + change) // 10) * 10
        self._wanted_duty[device.id] = max(DUTY_MIN, min(100, step))
        self.query_one("#now", FunctionPanel).draw()
        self.run_worker(self._save_duty(control), group="duty", exclusive=True)

    async def _save_duty(self, control: Control) -> None:
        duty = {**(self._setting("device_duty") or {}), **self._wanted_duty}
        try:
            await control.do(commands.SetSettings(changes={"device_duty": duty}))
        except VolunteerError as error:
            self._wanted_duty.clear()
            self.volunteer.tell(error.message, "error")
        self.query_now({"settings": lambda control: control.do(commands.GetSettings())})

    @override
    def reply_arrived(self, name: str) -> None:
        """Drop the wanted shares once the settings contain them all."""
        setting = self._setting("device_duty") or {}
        if name == "settings" and self._wanted_duty.items() <= setting.items():
            self._wanted_duty.clear()

    def action_machines(self) -> None:
        from volunteer.tui.screens.machines import MachinesPage

        self.app.push_screen(MachinesPage())

    def action_link(self) -> None:
        control = self.volunteer.control
        if control is None:
            return

        async def tell() -> None:
            code = await control.do(commands.MakeLink())
            words = _(
                "On the other machine, within ten minutes: volunteer join '<link>' with this link."
            )
            text = for_others(code.link, words)
            self.app.push_screen(CopyText(_("Add a machine to your account"), text, code.link))

        self.volunteer.command(tell())


def device_row(device: Device, speed: Benchmark | None, scene: Scene) -> Row:
    """Return a device as a row of the table."""
    glyphs = scene.glyphs
    unusable: Line = ((f"{glyphs.cross} {_('unusable')}", "bad"),)
    state = (device_state(device, scene, 0)[0],) if device.usable else unusable
    return Row(
        key=device.id,
        cells=(
            ((device.id, "value"),),
            ((printable(device.name, 80), "text"),),
            state,
            ((size(device.memory_bytes), "text"),),
            ((flops(speed.step_flops) if speed else "-", "value"),),
            ((flops(speed.fp32_flops) if speed else "-", "text"),),
            ((flops(speed.bf16_flops) if speed else "-", "text"),),
        ),
    )


def benchmark_lines(
    device: Device,
    workers: Sequence[WorkerInfo],
    scene: Scene,
    cells: int,
) -> list[Line]:
    """Return the figures of a device, their age, and the comparison with other machines."""
    glyphs, room = scene.glyphs, cells - NAME_CELLS
    if not device.usable:
        return unusable_lines(device, scene, cells)
    speed = next((b for b in scene.view.status.benchmarks if b.device == device.id), None)
    if speed is None:
        sentence = _("not measured: b measures it (a few seconds; b again stops)")
        return paragraph(sentence, cells, 3, "dim")
    status = scene.view.status
    products = " " + _("in matrix products") if room > 36 else ""
    lines = [
        _fact(_("training"), flops(speed.step_flops), room, "value"),
        _fact("fp32", f"{flops(speed.fp32_flops)}{products}", room),
        _fact("bf16", f"{flops(speed.bf16_flops)}{products}", room),
    ]
    ways = ((glyphs.up, status.up_bytes_per_s), (glyphs.down, status.down_bytes_per_s))
    if network := "  ".join(f"{sign} {size(rate)}/s" for sign, rate in ways if rate):
        lines.append(_fact(_("network"), network, room))
    if speed.at:
        lines.append(_fact(_("measured"), _("{time} ago", time=ago(scene.now - speed.at)), room))
    return [*lines, *_compared(speed, workers, scene, room)]


def _compared(
    speed: Benchmark, workers: Sequence[WorkerInfo], scene: Scene, room: int
) -> list[Line]:
    """Return a line that compares this device's benchmark with the median rate of the run's active
    workers; [] for fewer than two workers.
    """
    info = scene.view.info(scene.view.run())
    # A machine is listed once for each of its tasks.
    rates = list({worker.worker_id: worker.rate for worker in workers if worker.rate}.values())
    if info is None or info.step_flops <= 0 or len(rates) < 2:
        return []
    rate = speed.step_flops / info.step_flops
    share = rate / statistics.median(rates)
    median_words = ngettext("the median of {n} machine", "the median of {n} machines", len(rates))
    sentence = (
        _("as fast as {others}", others=median_words)
        if 0.95 <= share < 1.05
        else _("{share} times {others}", share=number(share, ".2g"), others=median_words)
    )
    return [_fact(_("others"), sentence, room)]


def task_lines(
    device: Device | None, scene: Scene, cells: int, height: int, roles: Sequence[str] = ()
) -> list[Line]:
    """Return the time of a step and a task on a device, and the pay, for each running run."""
    infos = [info for info in scene.view.status.runs if info.state == "running"]
    if device is None or not infos:
        sentence = _("with the first run, the time of a task here and its credits appear")
        return paragraph(sentence, cells, height, "dim")
    lines: list[Line] = []
    for info in infos:
        lines += _run_lines(info, device, scene, cells)
        sentence = game_part_words(scene.view.status, info.name, device.id, roles)
        lines += [*paragraph(sentence, cells, 4), ()]
    return lines[:height]


def _run_lines(info: RunInfo, device: Device, scene: Scene, cells: int) -> list[Line]:
    run_estimate = estimate(info, scene.view.status, (info.workload,), device.id)
    lines: list[Line] = [((printable(info.name, cells), "title"),)]
    if not run_estimate.fits or run_estimate.step_s is None:
        return [*lines, *paragraph(run_estimate.sentence, cells, 2)]
    task = scene.view.task(device.id)
    sentence = _("A step of this run takes {time} here.", time=duration_words(run_estimate.step_s))
    if task is not None and task.run == info.name and task.kind not in GAMES:
        whole = duration_words(run_estimate.step_s * task.steps)
        sentence += " " + ngettext(
            "The task in hand has {n} step, about {time}.",
            "The task in hand has {n} steps, about {time}.",
            task.steps,
            time=whole,
        )
    if run_estimate.credits_per_hour is not None:
        sentence += " " + _(
            "It earns about {credits} credits an hour ({basis}).",
            credits=short_number(run_estimate.credits_per_hour),
            basis=run_estimate.basis,
        )
    sentence += " " + memory_words(info, device, scene)
    return [*lines, *paragraph(sentence, cells, 6)]


def memory_words(info: RunInfo, device: Device, scene: Scene) -> str:
    """Return a run task's memory need on a device and its micro-batch, as far as measured."""
    names = {"id": fit(device.id, 12), "has": size(device.memory_bytes)}
    steps = scene.view.status.steps
    step = next((s for s in steps if (s.run, s.device) == (info.name, device.id)), None)
    if step is None or not step.peak_bytes:
        needs = size(process_on(device.id, info.memory_bytes))
        sentence = _("It needs {needs} of memory; {id} has {has}.", needs=needs, **names)
    else:
        sentence = _(
            "A task took {peak} of memory at the most; {id} has {has}.",
            peak=size(step.peak_bytes),
            **names,
        )
    if step is None or not 0 < step.micro_batch < step.batch_size:
        return sentence
    return (
        sentence
        + " "
        + _(
            "Its batch of {batch} is cut into pieces of {micro}.",
            batch=step.batch_size,
            micro=step.micro_batch,
        )
    )


def _fact(name: str, text: str, room: int, role: str = "text") -> Line:
    return ((left(name, NAME_CELLS), "dim"), (fit(text, room), role))
