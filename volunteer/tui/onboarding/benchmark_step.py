"""Fourth step: make the account and measure the devices."""

from __future__ import annotations

from textual.app import ComposeResult
from typing_extensions import override

from shared.errors import Forbidden, InvalidName, VolunteerError
from shared.text import printable
from volunteer.control import commands
from volunteer.i18n.catalogue import N_, _, translated
from volunteer.i18n.formats import size
from volunteer.tui.onboarding.onboarding_step import BACK, NEXT, OnboardingChoice, Step, text_lines
from volunteer.tui.text import Line, flops, left, percent
from volunteer.tui.widgets.benchmark_progress import progress_lines
from volunteer.tui.widgets.panel import FunctionPanel, Scene


class BenchmarkStep(Step):
    """Step that registers the account and waits for the benchmark."""

    NAME = "Benchmark"
    TITLE = N_("Benchmark")
    HEADING = N_("What can this machine do?")
    KEYS = (*NEXT, ("s", N_("skip"), "skip"), *BACK)

    def __init__(self, choice: OnboardingChoice) -> None:
        super().__init__(choice)
        self._trouble = ""
        self._joining = False

    @override
    def compose(self) -> ComposeResult:
        yield FunctionPanel(self._draw, title=N_("This machine"), id="machine", classes="card")

    @override
    def begin(self, why: str = "") -> None:
        self.query_one("#machine").focus()
        if not self._joining:
            self._joining = True
            self.run_worker(self._join(), group="join")

    @override
    def leave(self) -> None:
        self.workers.cancel_group(self, "join")  # the next join has the link and the name of then

    async def _join(self) -> None:
        self._trouble = ""
        try:
            if self.control is not None:
                await self.control.do(commands.Begin())
            if self.control is not None and not self.choice.joined:
                joined = await self.control.do(
                    commands.Join(link=self.choice.link, name=self.choice.name)
                )
                self.choice.joined = True
                self.choice.name = joined.nickname
        except InvalidName as error:
            self.post_message(self.Back("Name", translated(error.message)))
        except Forbidden as error:
            self.post_message(self.Back("Join", translated(error.message)))
        except VolunteerError as error:
            self._trouble = _(
                "{error}. Enter tries again, esc goes back.",
                error=translated(error.message).rstrip("."),
            )
        finally:
            self._joining = False
        self.query_one("#machine", FunctionPanel).draw()

    @override
    def proceed(self) -> None:
        if not self.choice.joined:
            self.begin()
        elif self._done:
            self.finish()

    def skip(self) -> None:
        """Stop measuring; the first tasks are then sized without a measured speed."""
        if self.control is not None and self.volunteer.view.benchmark is not None:
            self.volunteer.command(self.control.do(commands.StopMeasuring()))

    @property
    def _done(self) -> bool:
        view = self.volunteer.view
        return bool(view.status.devices) and view.benchmark is None

    def _draw(self, scene: Scene, width: int, height: int) -> list[Line]:
        glyphs, status = scene.glyphs, scene.view.status
        if self._trouble:
            return text_lines(self._trouble, width, height, "bad", glyphs.cross)
        if not self.choice.joined:
            text, done = _("making your account"), scene.view.registering
            if done is not None:
                text += _(": proof of work {done}", done=percent(done))
            return text_lines(text, width, height, "info", glyphs.wait)
        lines: list[Line] = [
            (
                (f"{glyphs.check} ", "good"),
                (_("welcome,") + " ", "text"),
                (self.choice.name or status.nickname, "value"),
            ),
            (),
        ]
        if status.stopped or scene.view.ended is not None:
            why = (
                translated(scene.view.ended.message)
                if scene.view.ended
                else _("the volunteer has ended")
            )
            return [*lines, *text_lines(why, width, height - 2, "bad", glyphs.cross)]
        if scene.view.benchmark is not None:
            lines += progress_lines(scene, width, height - len(lines) - 1)
            return [*lines, ((_("s: skip"), "dim"),)][:height]
        if not status.devices:
            waiting = translated(status.connection) or _(
                "looking for your devices; the first time takes some seconds"
            )
            return [*lines, *text_lines(waiting, width, height - 2, "info", glyphs.wait)]
        speeds = {b.device: b for b in status.benchmarks}
        for device in status.devices:
            speed = speeds.get(device.id)
            figure = (
                flops(speed.step_flops) if speed else (_("not measured") if device.usable else "")
            )
            name = printable(device.name, 40)
            lines.append(
                (
                    (left(device.id, 9), "value"),
                    (left(f"{name}, {size(device.memory_bytes)}", max(0, width - 26)), "text"),
                    (f" {figure}", "good" if speed else "dim"),
                )
            )
            if not device.usable:
                lines += text_lines(
                    translated(scene.view.status.problem(device)), width, 3, "bad", glyphs.cross
                )
        return [*lines, (), ((_("enter: next"), "dim"),)][:height]
