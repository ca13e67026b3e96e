"""Task suites of a run: versions are measured on them beside their held-out loss, and the scores
before and after stand wherever the run is shown.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from coordinator.admin.datasets import AddDataset
from coordinator.admin.datasets import add as add_dataset
from coordinator.admin.runs import CreateRun
from coordinator.admin.runs import create as create_run
from coordinator.database import datasets, evaluations, runs, versions
from coordinator.merging import suites
from coordinator.pages.views import Views
from coordinator.runs.datasets import heldout
from coordinator.runs.public_runs import PublicRuns
from shared import decoding
from shared.errors import InvalidRunFile
from shared.protocol.versions import VersionManifest
from shared.workloads.data.chat_dataset import build_chat
from shared.workloads.data.chat_template import ChatTemplate
from shared.workloads.data.tokenizer import train_tokenizer
from shared.workloads.generation import suite_score
from tests.support.local_coordinator import RUN, LocalCoordinator, local_coordinator
from tests.support.workloads import tiny_causal

LLAMA = ", ".join(
    f"{key} = {value!r}".replace("'", '"') for key, value in tiny_causal.LLAMA.items()
)
CAUSAL = f"""
name = "tiny"
workload = "causal-lm"
dataset = "sums"
[model]
context = 32
train = "lora"
config = {{ {LLAMA} }}
[task]
local_steps = 2
batch_size = 2
min_steps = 1
[plan]
quorum = 2
codec = "float32"
"""
SUITES = '[evaluation]\nsuites = ["sums-choice", "sums-exact"]\nsuites_every = {every}\n'


async def add_suite(home: LocalCoordinator, path: Path, name: str, lines: list[Any]) -> None:
    file = path / f"{name}.jsonl"
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    await add_dataset.run(
        home.coordinator, AddDataset(name=name, suite=(str(file),), licence="MIT")
    )


async def add_suites(home: LocalCoordinator, path: Path) -> None:
    choices = [
        {"prompt": f"{n} plus {n} is", "choices": [f" {2 * n}", f" {n}", " 7"], "answer": 0}
        for n in range(10, 22)
    ]
    await add_suite(home, path, "sums-choice", choices)
    exact = [{"prompt": f"{n} plus {n} is", "answer": str(2 * n), "stop": ";"} for n in range(5)]
    await add_suite(home, path, "sums-exact", exact)


async def merged(home: LocalCoordinator, workload: str, count: int) -> None:
    """Merge and evaluate so many versions."""
    people = [await home.join(name, workloads=[workload]) for name in ("Ann", "Bob")]
    for version in range(1, count + 1):
        for number, worker in enumerate(people):
            assert (await worker.work(10 * version + number)).state == "accepted"
        assert await home.coordinator.merger.merge_if_due(1)
        while await home.coordinator.evaluation.evaluate_next():
            pass


@pytest.mark.parametrize(
    ("workload", "text"), [("gpt", RUN), ("causal-lm", CAUSAL)], ids=["gpt", "causal-lm"]
)
async def test_versions_are_measured_before_and_after(
    tmp_path: Path, workload: str, text: str
) -> None:
    async with local_coordinator(tmp_path / "home") as home:
        await add_suites(home, tmp_path)
        await home.start_run(text + SUITES.format(every=2))
        queries = home.coordinator.runs.queries
        assert await home.coordinator.evaluation.evaluate_next()
        assert (await queries.info("tiny")).loss is not None  # before any suite
        while await home.coordinator.evaluation.evaluate_next():
            pass
        info = await queries.info("tiny")
        assert [each.name for each in info.suites] == ["sums-choice", "sums-exact"]
        assert all(s.first is not None and s.newest is None for s in info.suites)
        await merged(home, workload, 3)
        info = await queries.info("tiny")
        for course, (total, chance) in zip(info.suites, ((12, 1 / 3), (5, 0.0)), strict=True):
            assert course.total == total
            assert course.chance == pytest.approx(chance, abs=1e-6)
            assert course.first is not None
            assert course.newest is not None
            assert (course.first.version, course.newest.version) == (0, 2)  # not 1, not yet 3
            share = course.newest.share
            assert course.newest.error == pytest.approx((share * (1 - share) / total) ** 0.5)
        assert info.bits is not None
        assert info.bits_first is not None
        manifest = decoding.decode((await queries.manifest("tiny")).payload, VersionManifest)
        files = [tmp_path / f"{name}.jsonl" for name in ("sums-choice", "sums-exact")]
        assert manifest.suites == {path.stem: sha256(path) for path in files}
        await home.coordinator.runs.stop("tiny")  # its last version is measured too
        watch = home.coordinator.signals.watch("run:1")
        assert await home.coordinator.evaluation.evaluate_next()
        assert await watch.wait(0)  # whoever looks at the run sees its scores
        assert not await home.coordinator.evaluation.evaluate_next()
        last = [each.newest for each in (await queries.info("tiny")).suites]
        assert [each.version for each in last if each] == [3, 3]
        exported = await home.coordinator.export.export("tiny", tmp_path / "out", 2)
        card = (Path(exported.path) / "README.md").read_text()
        assert "| suite | by chance | before | after |" in card
        assert "| sums-choice | 33.3% | " in card
        assert "(version 2, 12 examples) |" in card
        assert "bits a byte of held-out text: " in card
        page = Views(home.coordinator, PublicRuns(*_shown(home)))
        body = (await page.run("tiny")).body.decode()
        assert "<bdi>sums-exact</bdi>" in body
        assert "version 3</small>" in body
        reply = await (await home.join("Eve")).get("/blobs/" + sha256(files[0]))
        assert reply.status_code in (403, 404)  # nobody learns it by heart


def _shown(home: LocalCoordinator) -> tuple[Any, Any, Any]:
    return home.coordinator.db, home.coordinator.clock, home.coordinator.settings


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


async def test_a_suite_that_does_not_fit_is_refused_when_the_run_is_created(
    tmp_path: Path,
) -> None:
    async with local_coordinator(tmp_path / "home") as home:
        await add_suites(home, tmp_path)
        await home.start_run()
        for said, error, sentence in (
            ('"nowhere"', InvalidRunFile, 'there is no dataset "nowhere"'),
            ('"sums"', InvalidRunFile, '"sums" holds tokens: a suite is added with'),
            ('"sums-exact", "sums-exact"', InvalidRunFile, "names one of them twice"),
        ):
            text = RUN.replace('"tiny"', '"other"') + f"[evaluation]\nsuites = [{said}]\n"
            with pytest.raises(error, match=sentence):
                await create_run.run(home.coordinator, CreateRun(text=text))
        many = ", ".join('"sums-exact"' for _ in range(9))
        text = RUN.replace('"tiny"', '"other"') + f"[evaluation]\nsuites = [{many}]\n"
        with pytest.raises(InvalidRunFile, match=r"suites: expected at most 8"):
            await create_run.run(home.coordinator, CreateRun(text=text))
        text = RUN.replace('"sums"', '"sums-exact"').replace('"tiny"', '"other"')
        with pytest.raises(
            InvalidRunFile, match=r'"sums-exact" holds suite: .*NAME --text PATH. makes one'
        ):
            await create_run.run(home.coordinator, CreateRun(text=text))


async def test_suites_that_cannot_be_measured_leave_the_loss_alone(
    tmp_path: Path,
) -> None:
    """Its file is gone at first; a process that begins anew measures version 0 all the same."""
    async with local_coordinator(tmp_path / "home") as home:
        await add_suites(home, tmp_path)
        await home.start_run(RUN + SUITES.format(every=1))
        broken = tmp_path / "sums-exact.jsonl"
        await home.coordinator.blobs.delete(sha256(broken), "asked")
        while await home.coordinator.evaluation.evaluate_next():
            pass
        info = await home.coordinator.runs.queries.info("tiny")
        assert info.loss is not None
        assert all(course.first is None for course in info.suites)
        row = await home.coordinator.db.read(lambda conn: runs.by_name(conn, "tiny"))
        assert row.best == 0
        seen = await home.coordinator.db.read(lambda c: evaluations.evaluation(c, row.id, 0))
        assert (seen.state, "suite sums-exact: " in seen.message) == ("done", True)
    async with local_coordinator(tmp_path / "home") as home:
        await home.coordinator.blobs.put_bytes(broken.read_bytes())
        assert await home.coordinator.evaluation.evaluate_next()
        courses = (await home.coordinator.runs.queries.info("tiny")).suites
        assert [course.first.version for course in courses if course.first] == [0, 0]


async def test_a_late_suite_gets_all_the_time_that_the_earlier_ones_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 24 s, where each example takes a second: a suite of three and one of twenty."""
    clock = [0.0]

    def second() -> bool:
        clock[0] += 1
        return False

    for module in (suites, suite_score):
        monkeypatch.setattr(module, "monotonic", lambda: clock[0])
    monkeypatch.setattr(suites, "BUDGET_S", 24.0)
    lines = [{"prompt": f"{n} is", "choices": [f" {n}", " x"], "answer": 0} for n in range(20)]
    async with local_coordinator(tmp_path / "home") as home:
        for name, count in (("few", 3), ("many", 20)):
            await add_suite(home, tmp_path, name, lines[:count])
        await home.start_run(RUN + '[evaluation]\nsuites = ["few", "many"]\n')
        coordinator = home.coordinator
        run = await coordinator.db.read(lambda conn: runs.by_name(conn, "tiny"))
        version = await coordinator.db.read(lambda conn: versions.get(conn, run.id, 0))
        row = await coordinator.db.read(lambda conn: datasets.by_name(conn, "sums"))
        data = await heldout(row.manifest, coordinator.blobs, {})
        weights = await coordinator.blobs.local(version.published_sha256)
        files = [
            suites.SuiteFile(name=name, file=str(tmp_path / f"{name}.jsonl"))
            for name in ("few", "many")
        ]
        outcome = await asyncio.to_thread(
            suites.measure_suites, second, run, weights, data, tuple(files)
        )
    assert {name: tally.examples for name, tally in outcome.scores.items()} == {
        "few": 3,
        "many": 20,
    }


async def test_a_run_of_dialogues_is_asked_by_its_template(tmp_path: Path) -> None:
    talk = tmp_path / "talk.jsonl"
    lines = [{"prompt": f"{n} plus {n}?", "completion": f"{2 * n}."} for n in range(200)]
    talk.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    texts = [f"<user>{n} plus {n}? <assistant>{2 * n}." for n in range(200)]
    template = ChatTemplate(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}",
        eos_token="<|endoftext|>",
    )
    tokenizer = train_tokenizer(texts, 300)
    async with local_coordinator(tmp_path / "home") as home:
        await add_suites(home, tmp_path)
        await home.coordinator.datasets.add(
            lambda put: build_chat("sums", [talk], put, tokenizer=tokenizer, template=template)
        )
        await create_run.run(home.coordinator, CreateRun(text=CAUSAL + SUITES.format(every=1)))
        await home.coordinator.runs.start("tiny")
        while await home.coordinator.evaluation.evaluate_next():
            pass
        info = await home.coordinator.runs.queries.info("tiny")
        assert [(each.chat, each.first is not None) for each in info.suites] == [(True, True)] * 2
        exported = await home.coordinator.export.export("tiny", tmp_path / "out", 0)
        assert "asked by the chat template" in (Path(exported.path) / "README.md").read_text()
