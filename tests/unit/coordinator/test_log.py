"""Log lines give no secret away and cannot be forged."""

from __future__ import annotations

import io
import json
import logging

import pytest
import structlog

from coordinator.log import CauseLimit, MessageLimit, configure, hide

CANARY = "c4n4ry-5ecret"


@pytest.fixture(autouse=True)
def restore() -> object:
    handlers, level = list(logging.getLogger().handlers), logging.getLogger().level
    yield
    logging.getLogger().handlers[:] = handlers
    logging.getLogger().setLevel(level)
    structlog.reset_defaults()


@pytest.mark.parametrize("as_json", [True, False])
def test_secrets_are_blotted_out(capsys: pytest.CaptureFixture[str], as_json: bool) -> None:
    configure("info", as_json=as_json)
    log = structlog.get_logger("test")
    log.info(
        "request",
        authorization=f"Bearer w1.{CANARY}",
        headers={"Authorization": f"Bearer {CANARY}"},
    )
    log.info(
        f"sent Bearer w1.{CANARY} away", link=f"https://h/join#key=ab+code={CANARY}", secret=CANARY
    )
    log.warning(
        "database",
        url=f"postgresql+asyncpg://ann:{CANARY}@db/v",
        code=CANARY,
        nested=[{"token": CANARY}],
    )
    logging.getLogger("other").warning("Bearer %s", CANARY)
    try:
        raise ValueError(f"token={CANARY}")
    except ValueError:
        log.exception("failed")
    written = capsys.readouterr().err
    assert CANARY not in written
    assert written.count("[hidden]") >= 9
    assert "database" in written
    assert "request" in written


def test_a_name_cannot_forge_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    configure("info", as_json=False)
    structlog.get_logger("t").info("joined", nickname='x\nlevel=error event="all is lost"\r\n')
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_json_lines_are_objects(capsys: pytest.CaptureFixture[str]) -> None:
    configure("warning", as_json=True)
    structlog.get_logger("t").info("unimportant")
    structlog.get_logger("t").warning("important", count=3)
    line = json.loads(capsys.readouterr().err)
    assert (line["event"], line["count"], line["level"]) == ("important", 3, "warning")


def test_what_is_no_secret_stays() -> None:
    assert hide("https://host:8765/join") == "https://host:8765/join"
    assert hide({"run": "a", "n": 3}) == {"run": "a", "n": 3}


def test_a_log_that_cannot_be_written_fails_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = io.StringIO()
    monkeypatch.setattr("sys.stderr", gone)
    configure("info", as_json=False)
    structlog.get_logger("test").warning("heard")
    assert "heard" in gone.getvalue()
    gone.close()
    structlog.get_logger("test").warning("lost")


def test_a_library_says_the_same_ten_times_a_minute_at_most() -> None:
    now = 0.0
    sparing = MessageLimit(lambda: now)

    def passed(count: int) -> int:
        record = logging.LogRecord("x", logging.WARNING, "x", 1, "Invalid HTTP request", (), None)
        return sum(sparing.filter(record) for _ in range(count))

    assert passed(1000) == 10
    now = 61.0
    assert passed(1000) == 10


def test_one_line_a_cause_a_minute(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    configure("info", as_json=True)
    processors = structlog.get_config()["processors"]
    spare = next(each for each in processors if isinstance(each, CauseLimit))
    spare._monotonic = lambda: now[0]
    log = structlog.get_logger("test")
    for second in range(90):
        now[0] = 100.0 + second
        for job in ("merger", "queue"):
            log.error("background job waits", job=job, error="the database cannot be reached")
        try:
            raise KeyError(3)
        except KeyError:
            log.exception("background job failed", job="upkeep")
        log.info("joined", nickname="Mia")  # about no failure: each is told
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    about = [line for line in lines if line["event"] != "joined"]
    assert len(lines) - len(about) == 90
    assert len(about) == 4
    assert [line.get("kept_back") for line in about] == [None, None, 119, 59]
