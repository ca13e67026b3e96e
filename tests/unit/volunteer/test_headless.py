"""The volunteer without a screen: lines for people, JSON lines for machines, and nothing that
steers a terminal.
"""

from __future__ import annotations

import asyncio
import io
import os

import msgspec
import pytest
from msgspec.structs import replace

from shared.decoding import decode
from shared.protocol.accounts import Benchmark, Device
from shared.protocol.contributions import Verdict
from shared.protocol.heartbeat import RunBeat
from tests.tui import scenes
from tests.tui.engine import FakeEngine
from volunteer.control import commands, events
from volunteer.control.event_sentences import START, words
from volunteer.control.events import AnyEvent
from volunteer.control.status import PauseStatus, Status, TaskStatus, fold
from volunteer.headless import Headless, pause_line, status_lines
from volunteer.i18n.catalogue import LanguageChoice, choose, use

NOW = 1_700_000_000.0


def training(step: int, at: float) -> events.Training:
    return events.Training(
        at=at,
        task=7,
        run="r",
        device="cpu",
        step=step,
        steps=50,
        samples=step,
        loss=2.5,
        steps_per_s=1.0,
        tokens_per_s=1234.5,
        eta_s=65.0,
        version=3,
    )


VERDICT = Verdict(
    contribution=1, task=7, run="r", state="rejected", reason="norm", message="too long"
)
ME = msgspec.structs.replace(
    scenes.ME, nickname="Ann", earned_micro=88_580_000, pending_micro=0, rank=2
)
STORY: list[AnyEvent] = [
    events.Started(
        coordinator="https://host",
        server="home",
        nickname="Ann",
        fingerprint="ab-cd",
        volunteer_id="v",
    ),
    events.Connection(online=False, message="refused", retry_at=NOW + 12, queued=1, at=NOW),
    events.Connection(online=True, since=NOW, at=NOW + 90),
    events.DevicesFound(
        torch="2.13.0+cpu",
        devices=(
            Device(id="cpu", kind="cpu", name="EPYC", memory_bytes=25_300_000_000),
            Device(
                id="nvidia:0",
                kind="cuda",
                name="RTX",
                memory_bytes=1,
                usable=False,
                problem="pip install torch",
            ),
        ),
    ),
    events.Benchmarked(
        benchmark=Benchmark(device="cpu", fp32_flops=1e11, bf16_flops=1e11, step_flops=8e10)
    ),
    events.Idle(reason="no_run", message="nothing is running", until=NOW + 30, at=NOW),
    training(10, NOW),
    events.Halved(task=7, device="cpu", micro_batch=4),
    events.Submitted(task=7, contribution=1, bytes=2_660_000),
    events.Judged(verdict=VERDICT),
    events.TaskEnded(task=7, how="gone", message="somebody else holds it"),
    events.LossMeasured(run="r", version=4, loss=2.25, mine=1),
    events.LossMeasured(run="p", version=2, loss=0.37, mine=0, measure="share solved"),
    events.Credits(me=ME),
    events.Paused(device="", by="battery", message="on battery", until="it is plugged in"),
    events.Resumed(device="cuda:0"),
    events.Notice(level="error", message="three tasks failed"),
]


async def lines(*told: AnyEvent, json: bool = False, since: float = 0.0) -> list[str]:
    engine, out = FakeEngine(), io.StringIO()
    front = Headless(engine.control, out, json=json, since=since)
    with engine.hub.subscribe():
        for event in told:
            front.show(msgspec.structs.replace(event, at=event.at or NOW))
    return out.getvalue().splitlines()


async def test_each_event_is_a_sentence_a_person_can_read() -> None:
    text = "\n".join(await lines(*STORY))
    for phrase in (
        '"Ann" helps home at https://host (key ab-cd)',
        "coordinator unreachable: refused; 1 result queued; next try in 12 s",
        "the coordinator answers again, after 1:30",
        "cpu EPYC (25.3 GB); nvidia:0 RTX (1 B) cannot be used: pip install torch",
        "idle (no_run): nothing is running; next poll in 30 s",
        "step 10/50  loss 2.500  1,234 tokens/s",
        "1:05 min left",
        "same batch, same pay",
        "task 7 submitted (2.66 MB)",
        "task 7 of r rejected: too long",
        "task 7 gone: somebody else holds it",
        "version 4: loss 2.250 on held-out data; made with 1 task of yours",
        "p version 2: solved 63 %",
        "88.58 earned, 0.00 pending, rank 2",
        "everything paused by battery: on battery; until it is plugged in",
        "cuda:0 resumed",
        "error: three tasks failed",
    ):
        assert phrase in text, phrase


async def test_a_try_that_follows_at_once_is_no_promise() -> None:
    away = events.Connection(online=False, message="refused", retry_at=NOW + 0.3, queued=0)
    (line,) = await lines(away)
    assert line.endswith("coordinator unreachable: refused")


async def test_self_play_is_told_in_games() -> None:
    played = msgspec.structs.replace(training(10, NOW), loss=None, counted="games")
    assert (await lines(played))[0].endswith("task 7  10 of 50 games, 1:05 min left")
    over = events.Trained(
        task=7, run="r", steps=16, samples=16, loss_first=None, loss_last=None, train_s=9.0
    )
    assert (await lines(over))[0].endswith("task 7 trained in 9 s")


async def test_a_merge_is_told_once_and_with_why_it_is_not_paid() -> None:
    merged = msgspec.structs.replace(
        VERDICT, state="merged", reason="", version=3, message="merged into version 3"
    )
    (line,) = await lines(events.Judged(verdict=merged))
    assert line.endswith("task 7 of r merged into version 3")
    unpaid = msgspec.structs.replace(
        merged, message="merged into version 3; not paid: this account is suspended"
    )
    (line,) = await lines(events.Judged(verdict=unpaid))
    assert line.endswith("merged into version 3: not paid: this account is suspended")


async def test_credits_stand_behind_the_verdict_they_come_from_and_only_when_they_change() -> None:
    paid = msgspec.structs.replace(
        VERDICT, state="accepted", reason="", message="accepted", credits_micro=88_580_000
    )
    told = events.Credits(me=ME, verdicts=(paid,))
    first, second = await lines(
        told, events.Judged(verdict=paid), events.Credits(me=ME), events.Credits(me=ME)
    )
    assert first.endswith("task 7 of r accepted, 88.58 credits")
    assert second.endswith("credits: 88.58 earned, 0.00 pending, rank 2")


async def test_a_first_step_says_nothing_of_what_is_not_known_yet() -> None:
    begun = msgspec.structs.replace(training(0, NOW), loss=None, tokens_per_s=0.0, eta_s=None)
    assert (await lines(begun))[0].endswith("task 7 step 0/50")


async def test_games_are_claimed_as_games() -> None:
    claimed = events.Claimed(
        task=7, attempt=1, run="r", workload="gomoku", device="cpu", steps=16, samples=16,
        price_micro=2_550_000, finish_by=NOW, kind="selfplay", counted="games",
    )  # fmt: skip
    (line,) = await lines(claimed)
    assert line.endswith("task 7 of r on cpu: 16 games, pays about 2.55 credits")


async def test_asking_for_work_is_said_once() -> None:
    asking = events.Idle(reason="asking", message="asking the coordinator for work")
    assert (await lines(asking))[0].endswith("  asking the coordinator for work")


async def test_what_is_measured_has_its_own_name() -> None:
    drawn = events.LossMeasured(run="r", version=4, loss=337.19, mine=0, measure="distance")
    assert (await lines(drawn))[0].endswith("r version 4: Fréchet distance 337.2")
    use(choose("de"))
    try:
        assert (await lines(drawn))[0].endswith("r Version 4: Fréchet-Abstand 337,2")
    finally:
        use(LanguageChoice())


async def test_training_does_not_flood_the_log() -> None:
    told = [training(step, NOW + step * 0.25) for step in range(1, 201)]
    assert 5 <= len(await lines(*told)) <= 6
    assert 49 <= len(await lines(*told, json=True)) <= 51


async def test_json_lines_are_the_events() -> None:
    for line, event in zip(await lines(*STORY, json=True), STORY, strict=True):
        back = decode(line, AnyEvent)
        assert back == msgspec.structs.replace(event, at=event.at or NOW)


async def test_what_was_before_the_start_is_not_printed_as_news() -> None:
    old = events.LossMeasured(at=NOW - 500, run="r", version=1, loss=3.0, mine=0)
    assert await lines(old, since=NOW - 1) == []
    assert len(await lines(old, since=NOW - 1, json=True)) == 1


async def test_foreign_text_cannot_steer_the_terminal() -> None:
    nasty = events.Notice(level="info", message="a\x1b[2Jb\nc\u202ed" + "x" * 9000)
    (line,) = await lines(nasty)
    assert line.isprintable()
    assert len(line) < 2100


async def test_foreign_text_cannot_steer_the_terminal_of_who_reads_json() -> None:
    steering = events.Notice(message="\x9b2J\u202e\u2066 \U0001f600 \x7f\x85 e\u0301", level="info")
    (line,) = await lines(steering, json=True)
    assert line.isascii()
    assert line.isprintable()
    assert msgspec.json.decode(line)["message"] == steering.message


def test_the_status_says_when_the_stake_is_free_and_what_is_owed() -> None:
    me = msgspec.structs.replace(ME, escrow_micro=1_500_000, debt_micro=2_000_000)
    text = status_lines(Status(me=me))
    assert any("1.50 at stake, 2.00 owed" in line for line in text)
    free = "at stake: 1.50; free once a later task of yours, drawn by lot, passes a recompute"
    assert free in text
    proving = msgspec.structs.replace(me, proving=2, proved_in_s=10_800.0)
    assert "at stake: 1.50; being proved, about 3:00 h" in status_lines(Status(me=proving))
    first = msgspec.structs.replace(ME, proving=1, proved_in_s=10_800.0)  # its pay is pending
    assert "being proved, about 3:00 h" in status_lines(Status(me=first))
    assert any(line.startswith("owed: 2.00; a debt is pay that was spent") for line in text)
    assert not any("at stake" in line or "owed" in line for line in status_lines(Status(me=ME)))


async def test_a_reader_that_goes_away_ends_the_volunteer() -> None:
    engine, out = FakeEngine(), io.StringIO()
    front = Headless(engine.control, out, json=False)
    out.close()
    running = asyncio.ensure_future(front.run())
    await asyncio.sleep(0)
    await engine.play(STORY[:1])
    await running
    assert engine.asked == [commands.Stop()]


def test_the_status_says_what_is_done_and_why_nothing_is() -> None:
    status = Status()
    for event in (*STORY, events.Finishing(message="finishing")):
        status = fold(status, msgspec.structs.replace(event, at=event.at or NOW))
    text = "\n".join(status_lines(status))
    for phrase in (
        '"Ann" at home',
        "online",
        "everything paused by battery: on battery; until it is plugged in",
        "finishing",
    ):
        assert phrase in text, phrase
    assert "idle" not in text  # a paused machine has no work for another reason
    assert "idle (no_run)" in "\n".join(status_lines(replace(status, pauses=())))


def test_the_status_says_of_problems_the_share_that_is_solved() -> None:
    beat = RunBeat(
        run="p", state="running", version=2, loss=0.37, needs=2, merge_in_s=9, workers=1,
        measure="share solved",
    )  # fmt: skip
    usual = msgspec.structs.replace(beat, run="r", measure="loss")
    text = status_lines(Status(beats=(beat, usual)))
    assert text[-2:] == ["p version 2: solved 63 %", "r version 2: loss 0.370"]


def test_the_status_says_where_each_task_stands_and_how_a_pause_of_yours_ends() -> None:
    working = TaskStatus(
        task=2,
        run="r",
        workload="gpt",
        device="cpu",
        phase="train",
        step=40,
        steps=50,
        samples=800,
        price_micro=1,
        finish_by=NOW,
        loss=5.62,
    )
    next_one = replace(working, task=3, phase="fetch", step=0, loss=None)
    pause = PauseStatus(device="", by="you", message="paused", until="you resume")
    text = status_lines(Status(tasks=(working, next_one), pauses=(pause,)))
    assert "paused by you; continue with `volunteer resume`" in text
    assert "task 2 of r on cpu: step 40 of 50, loss 5.620" in text
    assert "task 3 of r on cpu: download" in text


def test_the_pause_before_the_first_start_names_its_command_once() -> None:
    pause = PauseStatus(device="", by="you", message=START, until="you start")
    assert pause_line(pause) == "paused: `volunteer resume` starts it"


@pytest.mark.parametrize("event", STORY)
def test_every_event_of_the_story_has_words(event: AnyEvent) -> None:
    assert words(event)


async def test_a_reader_that_does_not_read_holds_nobody_up() -> None:
    engine = FakeEngine()
    behind, ahead = os.pipe()
    with os.fdopen(ahead, "w") as out, os.fdopen(behind) as reader:
        running = asyncio.ensure_future(Headless(engine.control, out, json=True).run())
        await asyncio.sleep(0)
        told = [
            events.Notice(level="info", message=f"{number} " + "x" * 4000) for number in range(100)
        ]
        await engine.play(told)  # more than a pipe holds, and the loop goes on
        for number in range(100):
            line = await asyncio.to_thread(reader.readline)
            notice = decode(line, AnyEvent)
            assert isinstance(notice, events.Notice)
            assert notice.message.startswith(f"{number} ")
        engine.hub.close()
        await running
