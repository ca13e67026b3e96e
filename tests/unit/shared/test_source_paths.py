"""Sources that a person names: an address and a place without a file get a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.errors import BadRequest
from shared.files.source_paths import existing_path


def test_a_file_gets_its_whole_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").touch()
    assert existing_path(Path("a.txt")) == tmp_path / "a.txt"


@pytest.mark.parametrize(
    ("named", "sentence"),
    [
        ("absent/a.txt", "there is no file or folder /"),
        ("c:/books", "there is no file or folder /"),
        ("https://example.org/a.txt", "https://example.org/a.txt is an address: download what"),
        ("s3://bucket/texts", "s3://bucket/texts is an address"),
    ],
)
def test_what_is_not_there_is_refused_by_its_kind(named: str, sentence: str) -> None:
    with pytest.raises(BadRequest) as caught:
        existing_path(Path(named))
    assert caught.value.message.startswith(sentence)
