"""No sentence of ours reaches a screen in English where another language is spoken: the screens are
walked in a language whose every word is written in Greek letters, so that what is not looked up
shows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest
from msgspec.structs import replace

from shared import errors
from shared.errors import VolunteerError
from shared.network.links import parse_link
from shared.protocol.base import Reason
from shared.protocol.contributions import Verdict
from shared.protocol.heartbeat import RunBeat
from shared.sentences import Sentence
from tests.support.greek import ENGLISH, greek, in_english, pseudo
from tests.tui import scenes
from tests.tui.engine import FakeEngine, opened, screen_text
from tests.tui.pages import prepared, settle
from tests.tui.steps import PAGE, STEPS, onward, tell
from volunteer.agent.agent import LAPSED
from volunteer.agent.run_watcher import merging_words
from volunteer.control import events
from volunteer.control.events import AnyEvent
from volunteer.i18n import catalogue, coordinator
from volunteer.i18n.catalogue import LanguageChoice, translated, use
from volunteer.machine.policy import MachineFacts, decide
from volunteer.net.reply_errors import connection_failure, refusal
from volunteer.settings.work_rules import WorkRules
from volunteer.tui import keys

# Words of others: names, what a coordinator or an organiser wrote, the code that a model writes.
OTHERS = re.compile(
    r"Little Lab|AMD Ryzen.*|NVIDIA.*|volunteer \w+|"
    r"A small language.*|Learns five.*|def main.*|Apache.*|"
    r"parser\..*|import .*|return of.*|self .*|argparse.*|the in in in.*|[\"(].*|"
    r"standard library|stdlib, PSF|stdlib|play, learn, train|part of it|gpt, dcgan.*|digits +gpt"
)


@pytest.fixture(autouse=True)
def _in_greek(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(catalogue, "_current", pseudo())
    yield
    use(LanguageChoice())


def english(text: str) -> set[str]:
    """Return what a screen says in English, words of others left out."""
    return in_english(text, OTHERS)


NOW = datetime.fromtimestamp(scenes.NOW, UTC).replace(tzinfo=None)
REASONS = [each for each in Reason if each in coordinator.VERDICTS]


def judged() -> Iterator[AnyEvent]:
    """Yield a rejection for each reason, with the coordinator's own words."""
    for n, each in enumerate(REASONS):
        verdict = Verdict(
            contribution=700 + n,
            task=600 + n,
            run=scenes.RUN.name,
            state="rejected",
            reason=each.value,
            message="words of the coordinator that nobody translates",
            at=scenes.NOW + n,
        )
        yield events.Judged(verdict=verdict)


def held() -> Iterator[AnyEvent]:
    """Yield a pause by each rule of the owner."""
    rules = WorkRules(
        schedule=("Mon 01:00-02:00",),
        in_use="pause",
        on_battery=False,
        programs=("game",),
        metered="pause",
        disk_free_gb=5.0,
        temperature_max=80.0,
    )
    facts = MachineFacts(
        unused_s=1.0,
        on_battery=True,
        battery_percent=64.0,
        programs=("game",),
        metered=True,
        temperatures={"cpu": 91.0},
        disk_free_bytes=1,
    )
    for hold in decide(rules, facts, NOW, ("cpu",)).holds:
        yield events.Paused(
            device=hold.device, by=hold.rule.value, message=hold.message, until=hold.until
        )


def untold() -> Iterator[AnyEvent]:
    """Yield what the layers below say of a working day, beside verdicts and pauses."""
    away = Sentence(
        "{url} cannot be reached: {why}",
        url="https://train.example.org",
        why=connection_failure(ConnectionRefusedError()),
    )
    yield from scenes.filled()
    yield events.Connection(online=False, message=away, retry_at=scenes.NOW + 42, queued=2)
    yield events.TaskEnded(task=4, how="gone", message=LAPSED)
    yield events.Notice(
        level="warning", message=Sentence("version not fetched: {error}", error=away)
    )
    beat = RunBeat(
        run=scenes.RUN.name,
        state="running",
        version=41,
        loss=3.4,
        needs=2,
        workers=12,
        merge_in_s=192.0,
    )
    yield events.RunProgress(beat=beat, message=merging_words(beat))
    broken = replace(
        scenes.GPU,
        usable=False,
        problem=Sentence("torch ({build}) does not see it: {why}", build="cuda 12.6", why=away),
    )
    yield events.devices_found((scenes.CPU, broken), {}, 0)


STATES = {
    "offline": lambda: (*untold(), *judged()),
    "held": lambda: (*scenes.filled(), *held()),
    "ended": lambda: (
        *scenes.filled(),
        events.Stopped(
            code=78,
            message=refused("upgrade_required").message,
            tasks=7,
            credits_micro=0,
            sent_bytes=1,
            received_bytes=1,
            seconds=4200.0,
        ),
    ),
}


def refused(code: str, status: int = 400) -> VolunteerError:
    """Return the error of a reply of a coordinator."""
    body = f'{{"code": "{code}", "message": "words of the coordinator", "request_id": "r"}}'
    return refusal("train.example.org", status, {}, body.encode())


@pytest.mark.parametrize("state", STATES)
async def test_no_page_says_a_sentence_in_english(engine: FakeEngine, state: str) -> None:
    found: dict[str, set[str]] = {}
    async with opened(prepared(engine), STATES[state](), size=(120, 36)) as (app, pilot):
        for page in keys.PAGES:
            app.action_page(page.name)
            await pilot.pause()
            await settle(app, pilot)
            if said := english(screen_text(app)):
                found[page.name] = said
    assert not found


async def test_the_reason_for_no_task_is_said_by_its_code(engine: FakeEngine) -> None:
    async with opened(prepared(engine), scenes.started()) as (app, pilot):
        for reason in coordinator.IDLE:
            message = coordinator.idle_sentence(reason, "words of the coordinator")
            await engine.play([events.Idle(reason=reason.value, message=message)])
            await settle(app, pilot)
            assert translated(message)[:24] in screen_text(app)
            assert english(screen_text(app)) == set(), reason


LINKS = {
    "no link": "hello there",
    "no address": "https:///join",
    "a password": "https://a:b@example.org/join",
    "damaged": "https://example.org/join#key=%20",
    "plain": "http://example.org/join",
}


async def test_trouble_with_a_link_is_said_in_the_language(engine: FakeEngine) -> None:
    async with opened(prepared(engine), look=PAGE) as (app, pilot):
        await settle(app, pilot)
        for name, link in LINKS.items():
            with pytest.raises(VolunteerError) as error:
                parse_link(link)
            assert ENGLISH.search(error.value.message), "a log is in English"
            await tell(app, pilot, engine, link)
            assert translated(error.value.message)[:24] in screen_text(app)
            assert english(screen_text(app).replace(link, "")) == set(), name


async def test_no_step_of_the_first_start_says_a_sentence_in_english(engine: FakeEngine) -> None:
    async with opened(prepared(engine), look=PAGE) as (app, pilot):
        for step in STEPS:
            await onward(app, pilot, engine, step)
            assert english(screen_text(app)) == set(), step


async def test_a_refusal_of_the_coordinator_is_said_by_its_code(engine: FakeEngine) -> None:
    async with opened(prepared(engine), scenes.filled(), size=(120, 36)) as (app, pilot):
        for code in coordinator.REFUSED:
            engine.refuses = refused(code, errors.BY_CODE[code].status)
            assert engine.refuses.message.startswith("words of the coordinator")
            app.action_page("leaderboard")
            await engine.clock.advance(60)  # it is asked again
            await settle(app, pilot)
            assert translated(engine.refuses.message)[:24] in screen_text(app)
            assert english(screen_text(app)) == set(), code


def test_what_has_no_code_is_quoted_and_never_guessed() -> None:
    paid = Verdict(contribution=1, task=1, run="r", state="accepted", message="16 games, all valid")
    assert translated(coordinator.verdict_reason(paid)) == greek('coordinator: "{words}"').format(
        words="16 games, all valid"
    )
    merged = replace(paid, state="merged", version=7, message="merged into version 7")
    assert english(translated(coordinator.verdict_reason(merged))) == set()
    unpaid = replace(merged, message="merged into version 7; its account is suspended")
    assert "its account is suspended" in translated(coordinator.verdict_reason(unpaid))
    assert coordinator.verdict_reason(replace(paid, message="merged", state="merged")) == ""


def test_every_code_of_the_protocol_has_a_sentence() -> None:
    local = {kind.code for kind in errors.LOCAL}
    unsent = {"error", "invalid_run_file", "invalid_plan", "offset_mismatch"}
    assert set(errors.BY_CODE) - local - unsent == set(coordinator.REFUSED)
    assert set(Reason) == {*coordinator.IDLE, *coordinator.VERDICTS}
