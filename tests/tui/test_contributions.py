"""The log of contributions on the dashboard, in little and in much room."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from shared.protocol.contributions import Verdict
from volunteer.tui.text import UNICODE
from volunteer.tui.widgets.recent_work import verdict_lines


def text_of(lines: Iterable[Iterable[tuple[str, str]]]) -> str:
    return "\n".join("".join(text for text, _ in line) for line in lines)


def test_a_rejection_has_its_reason_in_full_where_it_fits() -> None:
    reason = "the update is far larger than others of this run (norm 41.2, limit 9.8)"
    verdict = Verdict(contribution=1, task=9, run="r", state="rejected", message=reason)
    assert reason in text_of(verdict_lines(verdict, 84, UNICODE))
    lines = verdict_lines(verdict, 46, UNICODE)
    assert len(lines) == 2
    assert "rejected" in text_of(lines[:1])
    assert "the update is far larger" in text_of(lines[1:])


def test_work_that_brings_nothing_is_a_cross_with_its_reason() -> None:
    why = "this account is suspended: its work is neither merged nor paid"
    unpaid = Verdict(contribution=1, task=9, run="r", state="superseded", message=why)
    for cells in (84, 46):
        text = text_of(verdict_lines(unpaid, cells, UNICODE))
        assert "✗ not paid" in text
        assert "not needed" not in text
        assert "✓" not in text
        assert "this account is suspended" in text
    message = "merged into version 7; not paid: it counts nothing in a merge"
    text = text_of(verdict_lines(replace(unpaid, state="merged", message=message), 120, UNICODE))
    assert "✗ not paid" in text
    assert "it counts nothing" in text
    paid = replace(unpaid, message="enough others were in time", credits_micro=1)
    assert "✓ not needed" in text_of(verdict_lines(paid, 84, UNICODE))
    free = replace(paid, credits_micro=0)  # of a run that pays nothing
    assert "✓ not needed" in text_of(verdict_lines(free, 84, UNICODE))


def test_a_contribution_names_its_run_and_the_version_it_is_in() -> None:
    verdict = Verdict(
        contribution=1,
        task=9,
        run="stdlib-gpt",
        state="merged",
        version=1204,
        credits_micro=5_000_000,
    )
    wide, narrow, least = (
        text_of(verdict_lines(verdict, n, UNICODE, named=True)) for n in (84, 46, 30)
    )
    assert "stdlib-gpt" in wide
    assert "#9" in wide
    assert "version 1204" in wide
    assert "stdlib-g…" in narrow
    assert narrow.endswith("v1204")
    assert "stdlib-g…" in least
