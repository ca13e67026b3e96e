"""Secrets of the organiser: read from private files only, and never told again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from coordinator.runs.model_hub import HubRepository
from coordinator.storage.secret_file import read_secret
from shared.errors import Configuration


def private(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    path.chmod(0o600)
    return path


def test_a_secret_is_the_line_of_its_file(tmp_path: Path) -> None:
    assert read_secret(private(tmp_path / "key", b" hf_abc\n"), "the key") == "hf_abc"
    assert read_secret(tmp_path / "none", "the key") == ""


@pytest.mark.parametrize(
    "content", [b"hf_a\nhf_b", b"hf a", "hf_\u00e4".encode(), b"\xff", b"a" * 5000]
)
def test_what_no_header_carries_is_refused_without_being_told(
    tmp_path: Path, content: bytes
) -> None:
    with pytest.raises(Configuration, match="must hold one line") as caught:
        read_secret(private(tmp_path / "key", content), "the key")
    assert "hf" not in caught.value.message.replace(str(tmp_path), "")


@pytest.mark.skipif(os.name != "posix", reason="of permissions")
def test_a_secret_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = private(tmp_path / "key", b"hf_abc")
    path.chmod(0o640)
    with pytest.raises(Configuration, match="others can read the key: chmod 600"):
        read_secret(path, "the key")


def test_a_token_that_breaks_a_request_is_in_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret\x01tail")
    with pytest.raises(Configuration, match="one line") as caught:
        HubRepository.of("hub:ann/model").publish(tmp_path, "a message")
    assert "hf_secret" not in caught.value.message


def test_a_mirror_that_repeats_the_token_does_not_leak_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    def refuses(*_: object, **__: object) -> None:
        raise ValueError("bad header Bearer hf_secret")

    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", refuses)
    with pytest.raises(Exception, match="bad header Bearer \\*\\*\\*") as caught:
        HubRepository("ann/model", "hf_secret").publish(tmp_path, "a message")
    assert "hf_secret" not in str(caught.value)
