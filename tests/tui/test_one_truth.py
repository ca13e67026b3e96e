"""No two widgets contradict each other, whatever has arrived so far of a recorded stream."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from textual.app import App, ComposeResult
from typing_extensions import override

from shared.protocol.accounts import Me
from shared.protocol.base import ContributionState
from shared.protocol.contributions import Verdict
from shared.protocol.heartbeat import RunBeat
from shared.text import credit
from tests.tui import scenes
from volunteer.agent.run_watcher import merging_words
from volunteer.control import events
from volunteer.control.events import AnyEvent
from volunteer.control.status import Status, fold
from volunteer.tui.agent_view import AgentView, reduce
from volunteer.tui.screens.history import total_lines
from volunteer.tui.text import Line
from volunteer.tui.widgets.brief_state import brief
from volunteer.tui.widgets.cards import CreditsCard, run_lines
from volunteer.tui.widgets.loss_plots import ModelPlot
from volunteer.tui.widgets.panel import Panel, Scene
from volunteer.tui.widgets.recent_work import Contributions

PRICE = 88_580_000
NOBODY = replace(
    scenes.ME,
    earned_micro=0,
    pending_micro=0,
    today_micro=0,
    accepted=0,
    rejected=0,
    merged=0,
    device_s=0.0,
)
GOOD = ("accepted", "merged", "superseded")


class Server:
    """A coordinator as a volunteer hears it: submissions, merges, and the account that follows."""

    def __init__(self) -> None:
        self.now = scenes.NOW
        self.version = 1
        self.verdicts: dict[int, Verdict] = {}
        self.unheard: list[Verdict] = []

    def judge(self, number: int, state: ContributionState) -> None:
        verdict = Verdict(
            contribution=number,
            task=number,
            run=scenes.RUN.name,
            state=state,
            version=self.version if state == "merged" else None,
            credits_micro=PRICE if state in GOOD else 0,
            at=self.now,
        )
        self.verdicts[number] = verdict
        self.unheard.append(verdict)

    def me(self) -> Me:
        states = [verdict.state for verdict in self.verdicts.values()]
        earned = sum(PRICE for state in states if state in ("merged", "superseded"))
        return replace(
            NOBODY,
            earned_micro=earned,
            pending_micro=PRICE * states.count("accepted"),
            today_micro=earned,
            accepted=sum(state in GOOD for state in states),
            rejected=states.count("rejected"),
            merged=states.count("merged"),
            at=self.now,
        )

    def news(self) -> Iterable[AnyEvent]:
        told, self.unheard = tuple(self.unheard), []
        if told:
            yield events.Credits(at=self.now, me=self.me(), verdicts=told)
        yield from (events.Judged(at=self.now, verdict=verdict) for verdict in told)

    def beat(self) -> Iterable[AnyEvent]:
        beat = RunBeat(
            run=scenes.RUN.name,
            state="running",
            version=self.version,
            loss=None,
            needs=1,
            merge_in_s=None,
            workers=0,  # a machine that has just begun is not counted yet
        )
        yield events.RunProgress(at=self.now, beat=beat, message=merging_words(beat))

    def measured(self) -> Iterable[AnyEvent]:
        """The newest version is evaluated."""
        yield events.LossMeasured(
            at=self.now,
            run=scenes.RUN.name,
            version=self.version,
            loss=400.0 / (1 + self.version),
            mine=sum(v.version == self.version for v in self.verdicts.values()),
        )

    def listing(self) -> Iterable[AnyEvent]:
        run = replace(scenes.RUN, version=self.version, workers=0, progress=self.version / 500)
        yield events.RunsListed(at=self.now, runs=(run,))


def recorded(steps: list[str]) -> Iterable[AnyEvent]:
    """Return the events of a volunteer while these things happen at its coordinator."""
    server = Server()
    yield from scenes.started()
    yield events.Credits(me=server.me())
    yield from scenes.claimed()
    for number, step in enumerate(steps):
        server.now += 1.0
        if step in ("accepted", "rejected", "superseded"):
            server.judge(number, step)  # type: ignore[arg-type]
        elif step == "merge":
            server.version += 1
            waiting = [v.contribution for v in server.verdicts.values() if v.state == "accepted"]
            for contribution in waiting:
                server.judge(contribution, "merged")
        else:
            told = {
                "news": server.news,
                "beat": server.beat,
                "list": server.listing,
                "measure": server.measured,
            }
            yield from told[step]()


def said(lines: Iterable[Line], name: str) -> str:
    """Return the words beside a name, or "" where it is not drawn."""
    for line in lines:
        text = "".join(part for part, _ in line)
        if text.strip().startswith(name):
            return text.strip().removeprefix(name).strip()
    return ""


def agreed(view: AgentView) -> None:
    """Check that what is drawn of this view says one thing."""
    scene = Scene(view=view, now=view.status.at)
    me = view.status.me
    if me is None:
        return
    card = CreditsCard().lines(scene, 60, 20)
    totals = total_lines(scene, 60, 20)
    for name in ("balance", "pending", "today"):
        drawn = {words.split()[0] for words in (said(totals, name), said(card, name)) if words}
        assert len(drawn) <= 1, name
    own = view.status.verdicts
    paid = sum(v.credits_micro for v in own if v.state in GOOD)
    assert me.earned_micro + me.pending_micro == paid
    assert said(totals, "balance") == credit(me.earned_micro - me.spent_micro)
    run = run_lines(scene, 60, 30)
    versions = {v.version for v in own if v.version is not None}
    assert int(said(run, "version")) >= max(versions, default=0)
    if view.task() is not None:
        assert said(run, "helpers") != "0 online"
    whole = "".join(text for line in brief(scene, 60, 20) for text, _ in line)
    assert f"{said(totals, 'balance')} credits" in whole
    title, marks = ModelPlot().heading(scene)
    value = title.removeprefix("Loss of the model").strip()
    assert value in ("", said(run, "loss").split()[-1])
    model = view.models.get(view.run())
    held = len(model.mine) if model else 0
    assert marks in ("", f"{scene.glyphs.mark} mine {held}")
    if held:
        assert f"in {held} version" in said(run, "my part")
    shown = Contributions().lines(scene, 60, 100)
    words = ["".join(text for text, _ in line) for line in shown]
    merged = sum(v.state == "merged" for v in own)
    assert sum(" merged " in line for line in words) == merged or not own


STEPS = st.lists(
    st.sampled_from(
        ["accepted", "rejected", "superseded", "merge", "news", "beat", "list", "measure"]
    ),
    max_size=40,
)


@given(steps=STEPS)
@settings(max_examples=60, deadline=None)
def test_no_two_widgets_disagree_at_any_moment(steps: list[str]) -> None:
    status, view = Status(), AgentView()
    for event in recorded(steps):
        status = fold(status, event)
        view = reduce(view, event, status)
        agreed(view)


def test_a_reply_that_was_overtaken_does_not_set_the_account_back() -> None:
    newer = replace(scenes.ME, at=scenes.NOW + 2)
    older = replace(scenes.ME, at=scenes.NOW, earned_micro=0)
    status = fold(fold(Status(), events.Credits(me=newer)), events.Credits(me=older))
    assert status.me == newer


class Drawn(Panel):
    """Panel that counts how often it is drawn."""

    times = 0

    @override
    def lines(self, scene: Scene, width: int, height: int) -> list[Line]:
        self.times += 1
        return []


async def test_panels_that_show_the_same_number_are_drawn_at_the_same_moment() -> None:
    class One(App[None]):
        @override
        def compose(self) -> ComposeResult:
            yield Drawn()

    view = AgentView(status=Status(me=scenes.ME))
    async with One().run_test() as pilot:
        panel = pilot.app.query_one(Drawn)
        panel.show(Scene(view=view, now=scenes.NOW))
        before = panel.times
        panel.show(Scene(view=view, now=scenes.NOW + 0.1))
        assert panel.times == before  # a moment ago
        paid = replace(scenes.ME, earned_micro=scenes.ME.earned_micro + PRICE)
        panel.show(Scene(view=AgentView(status=Status(me=paid)), now=scenes.NOW + 0.2))
        assert panel.times == before + 1
