"""The check of a GPU: said where there is none, and its code tried on the processor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.benchmarks.gpu_check import NO_GPU, main


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["gpu-check"])
    assert main() == NO_GPU == 75
    assert "finds no GPU on this machine" in capsys.readouterr().out


@pytest.mark.slow
def test_every_check_runs_on_a_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written = str(tmp_path / "rows.json")
    monkeypatch.setattr("sys.argv", ["gpu-check", "--device", "cpu", "--small", "--json", written])
    assert main() == 0
    rows = json.loads(Path(written).read_text())
    assert {what.partition(",")[0] for what, _, _ in rows} == {
        "machine",
        "benchmark",
        "training",
        "out of memory",
        "pause",
        "two processes",
        "ranks",
        "inference",
        "self-play",
    }
    assert all(good for _, _, good in rows)
    assert "| self-play |" in capsys.readouterr().out
