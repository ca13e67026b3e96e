"""First weights of a run from elsewhere: refused when it is created, not when it is started."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from coordinator.database import runs, versions
from coordinator.runs.definition import definition
from coordinator.runs.version_files import read_weights
from shared.errors import InvalidRunFile
from shared.workloads.data.documents import Document
from shared.workloads.data.text_dataset import build_text
from shared.workloads.training.learner import momenta
from tests.support.local_coordinator import RUN, LocalCoordinator, local_coordinator

DOCUMENTS = [Document(str(n), f"{n} plus {n} is {n + n};\n" * 40) for n in range(40)]


def beginning(name: str, source: str, dataset: str = "sums") -> str:
    text = RUN.replace('"tiny"', f'"{name}"').replace('"sums"', f'"{dataset}"')
    return text + f'[train]\ninit_from = "{source}"\n'


async def exported(home: LocalCoordinator, folder: Path) -> Path:
    """An export of the run's version 0, and a dataset of the same texts and the same pieces, two of
    which have each other's number.
    """
    await home.start_run()
    written = await home.coordinator.export.export("tiny", folder / "out", 0)
    tokenizer = json.loads((Path(written.path) / "tokenizer.json").read_text())
    pieces = tokenizer["model"]["vocab"]
    first, second = list(pieces)[40:42]
    pieces[first], pieces[second] = pieces[second], pieces[first]
    build = partial(build_text, "swapped", DOCUMENTS, chunk_tokens=2048)
    await home.coordinator.datasets.add(partial(build, tokenizer=json.dumps(tokenizer).encode()))
    return Path(written.path)


async def test_weights_of_another_tokenizer_are_refused_and_nothing_is_stored(
    tmp_path: Path,
) -> None:
    async with local_coordinator(tmp_path / "home") as home:
        folder = await exported(home, tmp_path)
        runs = home.coordinator.runs
        for source in (str(folder), "tiny@0"):
            with pytest.raises(InvalidRunFile, match="another tokenizer than the dataset"):
                await runs.create(beginning("next", source, "swapped"))
            await runs.create(beginning(f"well-{len(source)}", source))
        assert len(await runs.queries.listing()) == 3


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("/nonexistent/x", "there is no /nonexistent/x/model.safetensors"),
        ("tiny@7", '"tiny" has no version 7'),
        ("other@0", r'line \d+: \[train\] init_from: there is no run called "other"'),
    ],
)
async def test_weights_that_are_not_there_are_refused_at_once(
    tmp_path: Path, source: str, why: str
) -> None:
    async with local_coordinator(tmp_path / "home") as home:
        await home.start_run()
        with pytest.raises(InvalidRunFile, match=why):
            await home.coordinator.runs.create(beginning("next", source))
        assert len(await home.coordinator.runs.queries.listing()) == 1


async def test_weights_of_another_shape_or_kind_are_refused_at_once(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path / "home") as home:
        folder = await exported(home, tmp_path)
        wide = beginning("wide", str(folder)).replace("n_embd = 8", "n_embd = 16")
        with pytest.raises(InvalidRunFile, match="has no tensor"):
            await home.coordinator.runs.create(wide)
        (folder / "model.safetensors").write_bytes(b"not one")
        with pytest.raises(InvalidRunFile, match="is no safetensors file"):
            await home.coordinator.runs.create(beginning("next", str(folder)))


async def test_a_run_that_shares_its_momentum_begins_with_none_where_the_weights_have_none(
    tmp_path: Path,
) -> None:
    async with local_coordinator(tmp_path / "home") as home:
        folder = await exported(home, tmp_path)
        for number, source in enumerate((str(folder), "tiny@0")):
            text = beginning(f"next{number}", source)
            text = text.replace("[model]\n", "[model]\nshared_momentum = true\n")
            await home.coordinator.runs.create(text.replace('codec = "float32"', 'codec = "int8"'))
            await home.coordinator.runs.start(f"next{number}")
            read = home.coordinator.db.read
            row = await read(partial(runs.by_name, name=f"next{number}"))
            first = await read(partial(versions.get, run_id=row.id, version=0))
            about = definition(row)
            weights = read_weights(
                await home.coordinator.blobs.local(first.published_sha256), about
            )
            assert list(weights) == [spec.name for spec in about.schema]
            assert not any(tensor.any() for tensor in momenta(weights).values())
            assert weights["tok_emb.weight"].any()
