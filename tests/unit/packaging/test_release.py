"""`make release`: an sdist that holds every file, a tour that is the README's."""

from __future__ import annotations

import importlib.util
import subprocess
from types import ModuleType

import pytest
from hatchling.builders.sdist import SdistBuilder

from tests.support.sources import ROOT

README = """# volunteer
```sh
make demo
```
## Ten minutes
```sh
coordinator serve   # no option
ls
```
Then `volunteer status`.
```sh
volunteer join 'http://host/join#key=..' --name ada
```
## Later
```sh
coordinator check
```
"""


@pytest.fixture(scope="module")
def release() -> ModuleType:
    spec = importlib.util.spec_from_file_location("release", ROOT / "packaging" / "release.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="an unpacked sdist has no list of files")
def test_the_sdist_holds_every_file_of_the_repository() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    tracked = {name for name in listed.stdout.splitlines() if (ROOT / name).exists()}
    packed = {file.distribution_path for file in SdistBuilder(str(ROOT)).recurse_included_files()}
    assert tracked - packed - {".gitignore"} == set()  # hatchling adds that one by itself


def test_the_tour_is_every_command_of_its_section(release: ModuleType) -> None:
    join = ["volunteer", "join", "http://host/join#key=..", "--name", "ada"]
    assert release.tour(README) == [["coordinator", "serve"], join]
    with pytest.raises(release.Failed, match="no commands below"):
        release.tour("# volunteer\n```sh\ncoordinator serve\n```\n")


def test_the_readme_has_a_tour_that_can_be_travelled(release: ModuleType) -> None:
    serve, *rest = release.tour((ROOT / "README.md").read_text(encoding="utf-8"))
    assert serve == ["coordinator", "serve"]
    assert [words[:2] for words in rest].count(["volunteer", "join"]) == 1
    assert ["volunteer", "--no-ui"] in rest
    assert ["coordinator", "check"] in rest


def test_what_fails_says_its_command_and_its_last_lines(release: ModuleType) -> None:
    with pytest.raises(release.Failed, match=r"`sh -c 'echo why; exit 3'` ended with 3:\nwhy"):
        release.run("sh", "-c", "echo why; exit 3")
    with pytest.raises(release.Failed, match="no-such-tool is not installed: make setup"):
        release.run("no-such-tool")
