"""States that are kept until the coordinator has said which of them it wants to see."""

from __future__ import annotations

from pathlib import Path

from volunteer.storage.evidence import EvidenceFiles


def test_what_a_killed_process_never_finished_goes_and_what_is_asked_for_stays(
    tmp_path: Path,
) -> None:
    state = tmp_path / "state"
    state.write_bytes(b"moments")
    kept = EvidenceFiles(tmp_path / "evidence")
    sha256 = kept.add(state, "r-cpu")
    (tmp_path / "residual").write_bytes(b"left over")
    residual = kept.add(tmp_path / "residual", "r-cpu")
    for name in ("1-1-0-0", "2-1-0-0"):
        kept.keep(name, (sha256,))
    kept.keep("3-1-0-0", (sha256, residual))
    kept.ask(6, (residual, "c" * 64))  # of no result
    kept.ask(7, (sha256, residual))
    again = EvidenceFiles(tmp_path / "evidence", {"2-1-0-0"}.__contains__)
    assert [one.contribution for one in again.asked()] == [7]
    assert sorted(path.stem for path in again.root.glob("*.json")) == ["2-1-0-0", "3-1-0-0"]
    for name in ("2-1-0-0", "3-1-0-0"):
        again.drop(name)
    assert not again.file(sha256).exists()
