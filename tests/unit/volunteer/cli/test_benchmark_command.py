"""`volunteer benchmark`: its result is stored, unless a volunteer is at work on the profile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shared.protocol.accounts import Benchmark
from volunteer.account.instance_lock import instance_lock
from volunteer.account.profile_directory import Identity, Profile
from volunteer.cli import benchmark_command
from volunteer.cli.main import run_command
from volunteer.settings.settings import directories

IDENTITY = Identity(
    url="http://127.0.0.1:1", tls_pin="", public_key="00" * 32, fingerprint="", server="",
    volunteer_id="v", worker_id="w", secret="s", nickname="Ann",
)  # fmt: skip
RESULT = Benchmark(device="cpu", fp32_flops=3e9, bf16_flops=2e9, step_flops=1e9, at=1.0)


def test_beside_a_volunteer_at_work_the_result_is_shown_and_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(*_: Any, **__: Any) -> Benchmark:
        return RESULT

    monkeypatch.setenv("VOLUNTEER_HOME", str(tmp_path))
    monkeypatch.setattr(benchmark_command, "benchmark", measured)
    profile = Profile(directories().profile)
    profile.use(IDENTITY)
    with instance_lock(profile.path):
        assert run_command(["benchmark", "--device", "cpu"]) == 0
    said = capsys.readouterr()
    assert "1 GF/s" in said.out
    assert "nothing is stored" in said.err
    assert profile.home(IDENTITY).memory.benchmarks == ()
    assert run_command(["benchmark", "--device", "cpu"]) == 0
    assert profile.home(IDENTITY).memory.benchmarks == (RESULT,)
