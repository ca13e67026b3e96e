"""Publishing a version on a model hub: the real library against a small server that stands for the
hub.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.numpy import load

from coordinator.runs.model_hub import HubRepository
from shared.errors import BadRequest, Configuration
from tests.support.fake_hub import TOKEN, FakeHub, fake_hub
from tests.support.local_coordinator import local_coordinator
from tests.support.server_process import command


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with fake_hub() as server:
        yield server


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A data directory with a started run."""
    asyncio.run(_started(tmp_path / "data"))
    return tmp_path / "data"


async def _started(data_dir: Path) -> None:
    async with local_coordinator(data_dir) as home:
        await home.start_run()


def alone(folder: Path) -> dict[str, str]:
    """For a process of its own, without the hub's files of this machine: the library reads this
    when it is imported.
    """
    return os.environ | {"HF_HOME": str(folder / "hf"), "HF_HUB_DISABLE_XET": "1"}


@pytest.mark.slow
def test_a_version_becomes_one_commit_of_a_private_repository(hub: FakeHub, run: Path) -> None:
    words = ("run", "export", "tiny", "--to", "hub:ann/tiny", "--data-dir", str(run))
    done = command(*words, **alone(run.parent), HF_ENDPOINT=hub.url, HF_TOKEN=TOKEN)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f'Version 0 of "tiny" is in {hub.url}/ann/tiny (')
    assert hub.visible == {"ann/tiny": "private"}
    assert hub.messages == ['Version 0 of "tiny"']
    assert json.loads(hub.files["config.json"])["workload"] == "gpt"
    assert load(hub.files["model.safetensors"])
    assert {"README.md", "LICENSE.txt", "tokenizer.json", "metrics.jsonl"} <= set(hub.files)
    assert TOKEN not in done.stdout + done.stderr


REFUSALS = """
import os, sys
from pathlib import Path
from coordinator.runs.model_hub import HubRepository
from shared.errors import VolunteerError

for endpoint, token in zip(sys.argv[2::2], sys.argv[3::2]):
    os.environ["HF_ENDPOINT"], os.environ["HF_TOKEN"] = endpoint, token
    try:
        HubRepository.of("hub:ann/tiny").publish(Path(sys.argv[1]), "Version 1")
    except VolunteerError as error:
        print(error.exit_code, error.message)
"""


def test_what_the_hub_refuses_is_said(hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    hub.full = True
    away = "http://127.0.0.1:1"
    asked = (hub.url, "hf_read", hub.url, TOKEN, away, TOKEN, hub.url, "")
    done = subprocess.run(
        [sys.executable, "-c", REFUSALS, str(tmp_path), *asked],
        capture_output=True,
        text=True,
        env=alone(tmp_path) | {"HF_ENDPOINT": hub.url},
    )
    assert done.returncode == 0, done.stderr
    wrong, full, unreachable, missing = done.stdout.splitlines()
    assert wrong == "78 the hub does not let this token write to ann/tiny: check its scope"
    assert full.startswith("1 the hub refused ann/tiny: ")
    assert unreachable.startswith(f"75 the hub {away} cannot be reached: ")
    assert missing.startswith("78 there is no token for the hub: set HF_TOKEN")
    assert hub.files == {}


def test_without_the_extra_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(Configuration, match="the extra `hub`"):
        HubRepository.of("hub:ann/tiny")


@pytest.mark.parametrize("target", ["hub:", "hub:tiny", "hub:a/b/c", "hub:../x", "hub:a b/c"])
def test_what_names_no_repository_is_refused(target: str) -> None:
    with pytest.raises(BadRequest, match="hub:OWNER/NAME"):
        HubRepository.of(target)
