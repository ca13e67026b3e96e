"""Byte order marks, which mean nothing in any file that is read, and pipes without a writer."""

from __future__ import annotations

import codecs
import os
import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from coordinator.admin.datasets import _read as tokenizer
from coordinator.certificates import given, own
from coordinator.cli.people import _names as names
from coordinator.cli.runs import _read as run_file
from coordinator.simulate.scenario import _run_table as scenario
from coordinator.storage.secret_file import read_secret
from shared.files.text_file import BYTES_MAX, read_text
from shared.proofs.signing import SigningKey
from shared.settings import read_file
from shared.workloads.causal_lm.model_folder import _json as model_settings
from shared.workloads.data.chat_template import settings_of, template_beside
from shared.workloads.data.dialogue_forms import FIELDS
from shared.workloads.data.documents import read_documents
from shared.workloads.data.record_files import records
from shared.workloads.data.skipped_files import Skipped
from shared.workloads.data.table_rows import licence_and_source
from shared.workloads.data.task_suite import read_suite
from volunteer.files import read_record
from volunteer.settings.settings import save

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = '{"prompt": "1 + 1 = ", "choices": ["2", "3"], "answer": 0}'
DIALOGUE = '{"messages": [{"role": "user", "content": "a"}]}'


class Kept(msgspec.Struct):
    a: int


def texts(path: Path) -> list[str]:
    return [each.text for each in read_documents([path], Skipped())]


def dialogues(path: Path) -> list[object]:
    skipped = Skipped()
    found = [record.fields for record in records(path, FIELDS, skipped)]
    assert not skipped.count
    return [*found]


def saved(path: Path) -> str:
    save(path, {"threads": 2})
    return read_text(path)


def template(path: Path) -> object:
    return template_beside(path.with_name("tokenizer.json"))


def key(path: Path) -> bytes:
    path.write_bytes(path.read_bytes().replace(b"KEY", _KEY))
    return SigningKey.load(path).public_key


READERS: dict[str, tuple[str, str, Callable[[Path], object]]] = {
    "run file": ("a.toml", 'name = "a"\n', run_file),
    "run file of a scenario": (
        "a.toml", 'name = "a"\n', lambda path: scenario({"file": path.name}, path.parent)
    ),
    "settings": ("config.toml", "threads = 1\n", read_file),
    "settings that are changed": ("config.toml", "threads = 1\n", saved),
    "list of names": ("names.csv", "name\nAnn\n", names),
    "suite": ("a.jsonl", EXAMPLE, lambda path: read_suite(path.read_bytes(), "a")),
    "token": ("token", "secret\n", lambda path: read_secret(path, "the token")),
    "record": ("a.json", '{"a": 1}', lambda path: read_record(path, Kept)),
    "tokenizer": ("tokenizer.json", "{}", tokenizer),
    "template": ("chat_template.jinja", "{{ messages }}", template),
    "settings of a tokenizer": ("tokenizer_config.json", '{"chat_template": "{{ a }}"}', template),
    "settings of tokens": ("a.json", '{"a": 1}', settings_of),
    "model": ("config.json", '{"a": 1}', lambda path: model_settings(path.parent, path.name, 99)),
    "text": ("a.txt", "text", texts),
    "lines": ("a.jsonl", '{"text": "a"}\n', texts),
    "array": ("a.json", '[{"text": "a"}]', texts),
    "table": ("a.csv", "text,b\na,1\n", texts),
    "lines of dialogues": ("a.jsonl", DIALOGUE, dialogues),
    "array of dialogues": ("a.json", f"[{DIALOGUE}]", dialogues),
    "table of dialogues": ("a.csv", "prompt,b\na,1\n", dialogues),
    "card of a dataset": (
        "README.md", "---\nlicense: mit\n---\n", lambda path: licence_and_source([path.parent])
    ),
    "signing key": ("key.pem", "KEY", key),
}  # fmt: skip
_KEY = b""


@pytest.mark.parametrize("name", READERS)
def test_a_byte_order_mark_means_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    SigningKey.load_or_create(tmp_path / "made.pem")
    monkeypatch.setitem(globals(), "_KEY", (tmp_path / "made.pem").read_bytes())
    file, text, read = READERS[name]
    found = []
    for mark in (b"", codecs.BOM_UTF8):
        path = tmp_path / f"{len(mark)}" / file
        path.parent.mkdir()
        path.write_bytes(mark + text.encode())
        path.chmod(0o600)
        found.append(read(path))
    assert found[0] == found[1]


def test_no_reader_has_its_own_way_with_marks() -> None:
    alone = {"shared/files/text_file.py"}
    ours = {"volunteer/i18n/catalogue.py", "coordinator/cli/runs.py"}  # files that we wrote
    ours |= {"coordinator/runs/run_recipe.py", "coordinator/pages/templates.py"}
    ours |= {"coordinator/upkeep/backup.py", "coordinator/runs/example.py"}
    ours |= {"coordinator/demo/runs.py", "coordinator/simulate/scenario.py"}
    ours |= {"volunteer/machine/system_calls.py"}
    system = {"shared/programs/machine_limits.py", "volunteer/settings/host_profile.py"}
    system |= {"volunteer/machine/devices.py", "volunteer/machine/energy.py"}
    found = set()
    for package in ("shared", "volunteer", "coordinator"):
        for path in (ROOT / package).rglob("*.py"):
            own_way = r"utf-8-sig|BOM_UTF8|\\xef\\xbb\\xbf|\.read_text\(encoding"
            if re.search(own_way, path.read_text(encoding="utf-8")):
                found.add(path.relative_to(ROOT).as_posix())
    assert found <= alone | ours | system


def test_a_pipe_without_a_writer_is_empty(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert read_text(tmp_path / "pipe") == ""


def test_a_file_without_end_is_refused() -> None:
    with pytest.raises(OSError, match="File too large"):
        read_text(Path("/dev/zero"))
    assert BYTES_MAX < 1 << 30


def test_tls_files_are_refused_in_words(tmp_path: Path) -> None:
    from shared.errors import Configuration

    (tmp_path / "other").mkdir()
    mine, other = own(tmp_path), own(tmp_path / "other")
    with pytest.raises(Configuration, match="belongs to another certificate"):
        given(mine.cert, other.key)
    mine.key.write_text("no key")
    with pytest.raises(Configuration, match="give PEM files"):
        given(mine.cert, mine.key)
