"""Releases that a coordinator announces: signed, newer, and never anything but a version."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.accounts.server_identity import _signed_release as signed_release
from shared.errors import BadRequest, BadSignature
from shared.protocol.accounts import Release, SignedRelease
from shared.signing import SigningKey, canonical
from volunteer.account.releases import announced, check_file, is_newer, notice, steps
from volunteer.i18n.catalogue import Choice, choose, shown, use

SHA = "ab" * 32


@pytest.fixture
def key(tmp_path: Path) -> SigningKey:
    return SigningKey.load_or_create(tmp_path / "key")


def signed(key: SigningKey, document: object) -> SignedRelease:
    payload = canonical(document)
    return SignedRelease(payload=payload.decode(), signature=key.sign(payload).hex())


def test_what_the_organiser_sets_is_what_a_volunteer_reads(key: SigningKey) -> None:
    made = signed_release(f"0.2.0 sha256:{SHA}", key)
    found = announced(made, key.public_key.hex())
    assert found == Release(kind="release", version="0.2.0", sha256=SHA)
    assert signed_release("", key) is None
    assert announced(None, key.public_key.hex()) is None


def test_another_key_or_another_word_is_refused(key: SigningKey, tmp_path: Path) -> None:
    made = signed_release(f"0.2.0 sha256:{SHA}", key)
    assert made is not None
    other = SigningKey.load_or_create(tmp_path / "other")
    with pytest.raises(BadSignature):
        announced(made, other.public_key.hex())
    forged = SignedRelease(payload=made.payload.replace("0.2.0", "9.9.9"), signature=made.signature)
    with pytest.raises(BadSignature):
        announced(forged, key.public_key.hex())
    with pytest.raises(BadSignature) as caught:
        announced(SignedRelease(payload="", signature="no hex"), key.public_key.hex())
    use(choose("de"))
    try:
        assert shown(caught.value.message) == "die Unterschrift passt nicht"
    finally:
        use(Choice())


@pytest.mark.parametrize(
    "document",
    [
        {"kind": "release", "version": "1.0; rm -rf /", "sha256": SHA},
        {"kind": "release", "version": "1.0\u001b[31m", "sha256": SHA},
        {"kind": "release", "version": "1.0", "sha256": "short"},
        {"kind": "manifest", "version": "1.0", "sha256": SHA},
        {"run": "r", "version": 3},
    ],
)
def test_a_signed_document_that_is_no_release_is_refused(key: SigningKey, document: object) -> None:
    with pytest.raises(BadRequest):
        announced(signed(key, document), key.public_key.hex())


@pytest.mark.parametrize(
    ("version", "own", "newer"),
    [
        ("0.2.0", "0.1.0", True),
        ("0.10", "0.9.9", True),
        ("1.0", "1.0.0", False),
        ("0.1.0", "0.2.0", False),
        ("1.0.0", "0", True),
        ("x", "0.1", False),
    ],
)
def test_newer(version: str, own: str, newer: bool) -> None:
    assert is_newer(version, own) is newer


@given(st.text(max_size=30), st.text(max_size=30))
def test_any_two_texts_can_be_compared(one: str, two: str) -> None:
    assert not (is_newer(one, two) and is_newer(two, one))


def test_a_file_is_compared_and_the_commands_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.whl"
    path.write_bytes(b"wheel")
    found = Release(kind="release", version="0.2.0", sha256=hashlib.sha256(b"wheel").hexdigest())
    assert check_file(found, path)
    path.write_bytes(b"another")
    assert not check_file(found, path)
    with pytest.raises(BadRequest, match="cannot be read: no such file"):
        check_file(found, tmp_path / "none")
    assert "volunteer update" in notice(found)
    assert [name for name, _ in steps(found)] == ["get", "check", "install"]
