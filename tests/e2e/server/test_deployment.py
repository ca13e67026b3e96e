"""Files of `packaging/`: schemas, and the services of the compose file as processes of this
machine, with haproxy, PostgreSQL and an S3 store.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from coordinator.config import Settings
from coordinator.database.tables.contributions import contributions
from coordinator.http.routes.metrics import INSTRUMENTS, PREFIX
from coordinator.services import opened
from tests.e2e.conftest import Forked, free_port
from tests.support.balancer import balanced
from tests.support.databases import Postgres, _run
from tests.support.local_coordinator import RUN
from tests.support.server_process import Process
from tests.support.sources import ROOT
from tests.support.sums import build_sums
from tests.support.wayward_store import WaywardStore

FOLDER = ROOT / "packaging"
UNITS = ("volunteer-coordinator.service", "volunteer-coordinator.user.service")
COMPOSE: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text(encoding="utf-8"))
CONTAINERFILE = (FOLDER / "Containerfile.coordinator").read_text(encoding="utf-8")
KUBERNETES: list[dict[str, Any]] = list(
    yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text(encoding="utf-8"))
)


def accepted(*words: str) -> None:
    """Run a tool that checks a file."""
    done = subprocess.run([*words], capture_output=True, text=True, check=False, cwd=FOLDER)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_files_have_their_schemas() -> None:
    tool = Path(sys.executable).parent
    schema = "--builtin-schema=vendor.compose-spec"
    accepted(str(tool / "check-jsonschema"), schema, "compose.yaml")
    accepted(str(tool / "kubernetes-validate"), "--strict", "kubernetes.yaml")


def test_what_the_hosts_of_the_code_run_exists() -> None:
    """Workflows have their schema; they, the hooks and the container run targets of the Makefile
    with its variables.
    """
    workflows = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    tool = str(Path(sys.executable).parent / "check-jsonschema")
    schema = "--builtin-schema=vendor.github-workflows"
    accepted(tool, schema, *map(str, workflows))
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    variables = set(re.findall(r"^([A-Z_]+) \?=", makefile, re.MULTILINE))
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    night = yaml.safe_load((ROOT / ".github" / "workflows" / "nightly.yml").read_text())
    container = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    commands = [
        f"make {words}" for words in night["jobs"]["night"]["strategy"]["matrix"]["command"]
    ]
    commands += [hook["entry"] for hook in hooks["repos"][0]["hooks"]]
    commands += [container["postCreateCommand"]]
    for workflow in workflows:
        commands += re.findall(r"run: (make [^$\n]+)", workflow.read_text(encoding="utf-8"))
    for command in commands:
        make, *words = shlex.split(command)
        assert make == "make"
        names = [word for word in words if not word.startswith("--")]
        for name in names:
            variable, equals, _ = name.partition("=")
            assert variable in (variables if equals else targets), command


def test_every_setting_that_is_named_exists() -> None:
    known = {f"COORDINATOR_{name.upper()}" for name in Settings.__struct_fields__}
    text = "".join(
        path.read_text() for path in (FOLDER / "compose.yaml", FOLDER / "kubernetes.yaml")
    )
    options = {"COORDINATOR_MEMORY"}  # of the compose file itself
    assert set(re.findall(r"\bCOORDINATOR_[A-Z_]+", text)) <= known | options


def test_one_image_without_pytorch_answers_and_one_with_it_computes() -> None:
    stages = re.findall(r"^FROM \S+ AS (\S+)$", CONTAINERFILE, flags=re.M)
    one, two = (COMPOSE["services"][f"coordinator-{number}"] for number in (1, 2))
    assert ("target" not in one["build"], two["build"]["target"] in stages) == (True, True)
    pods = {
        each["metadata"]["name"]: each["spec"]["template"]
        for each in KUBERNETES
        if each["kind"] == "Deployment"
    }
    images = {
        name: {c["image"] for c in pod["spec"]["initContainers"] + pod["spec"]["containers"]}
        for name, pod in pods.items()
    }
    assert images == {"coordinator": {two["image"]}, "coordinator-compute": {one["image"]}}
    [service] = (each for each in KUBERNETES if each["kind"] == "Service")
    assert all(
        service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
        for pod in pods.values()
    )


def test_the_autoscaler_follows_a_metric_that_is_exported() -> None:
    [scaler] = (each for each in KUBERNETES if each["kind"] == "HorizontalPodAutoscaler")
    counters = {PREFIX + each.name for each in INSTRUMENTS if each.kind == "counter"}
    assert {each["pods"]["metric"]["name"] for each in scaler["spec"]["metrics"]} <= counters


def test_the_unit_of_the_machine_hides_devices_but_no_gpu() -> None:
    text = (FOLDER / "systemd" / UNITS[0]).read_text(encoding="utf-8")
    assert "\nPrivateDevices" not in text
    for words in ("DevicePolicy=closed", "DeviceAllow=char-nvidia", "ProtectClock=yes"):
        assert f"\n{words}" in text


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"], ids=["plain", "tls"])
def test_the_health_check_finds_a_server_and_leaves_no_warning(host: str, tmp_path: Path) -> None:
    check = [sys.executable, str(FOLDER / "healthcheck.py")]
    with Process(tmp_path, f"--host={host}", "--port=0") as server:
        port = {"COORDINATOR_PORT": str(server.port)}
        assert server.url.startswith("https:") == (host == "0.0.0.0")
        assert subprocess.run(check, env=port, check=False).returncode == 0
        assert server.stop() == 0
        assert "warning" not in "".join(server.errors)
    assert subprocess.run(check, env=port, check=False).returncode == 1


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@pytest.mark.parametrize("unit", UNITS)
def test_systemd_takes_the_units(unit: str, tmp_path: Path) -> None:
    text = (FOLDER / "systemd" / unit).read_text(encoding="utf-8")
    path = tmp_path / "volunteer-coordinator.service"
    path.write_text(re.sub(r"^ExecStart=\S+", f"ExecStart={sys.executable}", text, flags=re.M))
    accepted("systemd-analyze", "verify", "--man=no", str(path))


@pytest.fixture
def environment(
    postgres: Postgres, wayward: WaywardStore, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, str]]:
    """Set the environment of the compose file, with the addresses of this machine; return it."""
    url = _run(postgres.fresh())
    here = {
        "COORDINATOR_DATABASE": url,
        "COORDINATOR_BLOBS": s3_url,
        "COORDINATOR_URL": f"http://127.0.0.1:{free_port()}",
        "COORDINATOR_TRUSTED_PROXIES": "127.0.0.1",
        "AWS_ENDPOINT_URL_PUBLIC": wayward.url,
    }
    set_there = COMPOSE["services"]["coordinator-1"]["environment"]
    assert here.keys() <= set_there.keys()
    kept = {key: value for key, value in set_there.items() if key.startswith("COORDINATOR_")}
    kept = {key: value for key, value in kept.items() if "$" not in value}
    for key, value in (made := kept | here).items():
        if key != "COORDINATOR_DATA_DIR":
            monkeypatch.setenv(key, value)
    yield made
    _run(postgres.recycle(url))


@pytest.mark.slow
async def test_the_services_of_the_compose_file_train(
    environment: dict[str, str], wayward: WaywardStore, tmp_path: Path, forked: Forked
) -> None:
    settings = Settings(
        data_dir=str(tmp_path / "1"),
        database=environment["COORDINATOR_DATABASE"],
        blobs=environment["COORDINATOR_BLOBS"],
    )
    ports = [free_port() for _ in range(2)]
    with ExitStack() as stack:
        one = stack.enter_context(forked(tmp_path / "1", f"--port={ports[0]}"))
        (tmp_path / "2").mkdir(mode=0o700)
        shutil.copy(tmp_path / "1" / "signing.key", tmp_path / "2")
        two = stack.enter_context(forked(tmp_path / "2", f"--port={ports[1]}"))
        async with opened(settings) as coordinator:
            await coordinator.datasets.add(build_sums)
            run = await coordinator.runs.create(RUN.replace("quorum = 2", "quorum = 1"))
            await coordinator.runs.start(run.name)
        port = int(environment["COORDINATOR_URL"].rpartition(":")[2])
        async with balanced(*ports, port=port) as url, httpx.AsyncClient() as client:
            assert url == environment["COORDINATOR_URL"]
            assert one.link == two.link
            home = {f"XDG_{k}_HOME": str(tmp_path) for k in ("CONFIG", "DATA", "STATE", "CACHE")}
            volunteer = "import sys; from volunteer.__main__ import main; sys.exit(main())"
            words = ("--no-ui", "--device", "cpu", "--max-tasks", "2")
            joined = home | {"VOLUNTEER_JOIN": one.link, "PATH": "/usr/bin:/bin"}
            process = [sys.executable, "-c", volunteer, *words]
            done = subprocess.run(process, env=joined, capture_output=True, text=True, timeout=240)
            assert done.returncode == 0, done.stdout + done.stderr
            assert (await client.get(f"{url}/metrics")).status_code == 403
            assert (await client.get(f"http://127.0.0.1:{ports[0]}/metrics")).status_code == 200
        async with opened(settings) as coordinator:
            query = contributions.select()
            rows = await coordinator.db.read(lambda conn: list(conn.execute(query).mappings()))
            assert [
                row["state"] for row in rows if row["state"] not in ("accepted", "merged")
            ] == []
            assert len(rows) == 2
            assert (await coordinator.checks.run()).breaches == ()
        assert [seen for seen in wayward.seen if seen[0] == "PUT"]
        assert (one.stop(), two.stop()) == (0, 0)
