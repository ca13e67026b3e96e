"""A server without PyTorch: it answers requests, and leaves all computing to other servers."""

from __future__ import annotations

import secrets
import sys
from pathlib import Path

import httpx
import pytest

from tests.support.local_coordinator import RUN, local_coordinator
from tests.support.local_volunteer import SHORT
from tests.support.server_process import COORDINATOR, Process, command

BARE = [sys.executable, "-c", "import sys; sys.modules['torch'] = None; " + COORDINATOR[2]]
COMPUTING = {"merger", "evaluation", "recomputes", "recomputes aside"}


async def test_nothing_that_computes_is_begun_without_pytorch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with local_coordinator(tmp_path) as home:
        assert home.coordinator.jobs().keys() > COMPUTING
        monkeypatch.setitem(sys.modules, "torch", None)
        assert not home.coordinator.jobs().keys() & COMPUTING


@pytest.mark.slow
async def test_a_process_without_pytorch_hands_out_tasks(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path) as home:
        await home.start_run(SHORT)
        await home.coordinator.runs.create(RUN.replace('name = "tiny"', 'name = "later"'))
    with Process(tmp_path, "--port=0", command=BARE) as server:
        ids = {name: secrets.token_hex(16) for name in ("volunteer_id", "worker_id", "secret")}
        invite = server.link.partition("invite=")[2].partition("+")[0]
        said = {**ids, "nickname": "Ann", "invite": invite, "workloads": ["gpt"]}
        async with httpx.AsyncClient(base_url=f"{server.url}/api/v1/") as client:
            done = await client.post("workers/register", json=said)
            assert done.status_code == 200, done.text
            client.headers["Authorization"] = f"Bearer {ids['worker_id']}.{ids['secret']}"
            asked = {"claim_id": secrets.token_hex(16), "wait_s": 0.0, "codecs": ["float32"]}
            lease = (await client.post("claims", json=asked)).json()["lease"]
            begun = await client.post(
                f"tasks/{lease['task']}/begin", json={"attempt": lease["attempt"]}
            )
            assert begun.status_code == 200, begun.text
        token = f"--token-file={server.token_file}"
        refused = command("run", "start", "later", f"--server={server.link}", token)
        assert refused.returncode == 75, refused.stderr
        assert "PyTorch is not installed" in refused.stderr
        assert server.stop() == 0
    assert command("check", f"--data-dir={tmp_path}").returncode == 0
