"""Signatures: only what the coordinator signed is believed, and its key is nobody else's."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import x25519
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import BadSignature, Configuration
from shared.proofs.signing import (
    SigningKey,
    canonical,
    digest,
    fingerprint,
    fingerprint_fits,
    verify,
    verify_text,
)


@pytest.fixture
def key(tmp_path: Path) -> SigningKey:
    return SigningKey.load_or_create(tmp_path / "key.pem")


def test_a_key_survives_a_restart_and_belongs_to_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "key.pem"
    first = SigningKey.load_or_create(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert [found.name for found in path.parent.iterdir()] == ["key.pem"]
    again = SigningKey.load_or_create(path)
    assert again.public_key == first.public_key
    assert again.sign(b"x") == first.sign(b"x")


def test_two_starts_at_once_end_with_one_key(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        keys = list(pool.map(SigningKey.load_or_create, [tmp_path / "key.pem"] * 16))
    assert len({found.public_key for found in keys}) == 1
    assert len(list(tmp_path.iterdir())) == 1


def test_only_the_signed_bytes_verify(key: SigningKey) -> None:
    signature = key.sign(b"version 7")
    verify(key.public_key, b"version 7", signature)
    other = bytes([key.public_key[0] ^ 1]) + key.public_key[1:]
    for public, payload, claim in (
        (key.public_key, b"version 8", signature),
        (key.public_key, b"version 7", signature[:-1] + bytes([signature[-1] ^ 1])),
        (key.public_key, b"version 7", signature[:-1]),
        (key.public_key, b"version 7", b""),
        (other, b"version 7", signature),
        (b"short", b"version 7", signature),
    ):
        with pytest.raises(BadSignature):
            verify(public, payload, claim)
        with pytest.raises(BadSignature):
            verify_text(public.hex(), payload.decode(), claim.hex())
    verify_text(key.public_key.hex(), "version 7", signature.hex())
    with pytest.raises(BadSignature):
        verify_text(key.public_key.hex(), "version 7", "no hexadecimal")


def test_a_key_is_stored_on_a_file_system_without_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr("os.link", refuse)
    first = SigningKey.load_or_create(tmp_path / "key.pem")
    assert SigningKey.load_or_create(tmp_path / "key.pem").public_key == first.public_key


def test_signatures_are_those_of_rfc_8032(tmp_path: Path) -> None:
    seed = bytes.fromhex("4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb")
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = SigningKey(Ed25519PrivateKey.from_private_bytes(seed))
    assert (
        key.public_key.hex() == "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c"
    )
    assert key.sign(b"\x72").hex() == (
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
        "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00"
    )


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o620, 0o601])
def test_a_key_that_others_can_read_is_refused_with_the_remedy(tmp_path: Path, mode: int) -> None:
    SigningKey.load_or_create(tmp_path / "key.pem")
    (tmp_path / "key.pem").chmod(mode)
    with pytest.raises(Configuration, match="chmod 600"):
        SigningKey.load_or_create(tmp_path / "key.pem")


def test_a_file_that_is_no_signing_key_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    path.touch(0o600)
    foreign = x25519.X25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    for content in (b"", b"noise", foreign):
        path.write_bytes(content)
        with pytest.raises(Configuration, match=r"key\.pem"):
            SigningKey.load_or_create(path)
        assert path.read_bytes() == content


def test_a_place_that_cannot_hold_a_key_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Configuration, match="cannot be stored"):
        SigningKey.load_or_create(tmp_path / "file" / "key.pem")


def test_a_fingerprint_can_be_typed_as_people_type() -> None:
    public = bytes(range(32))
    found = fingerprint(public)
    assert found == "mmg4-2klg-yqzw-neis-krel-xms3"
    assert fingerprint_fits(public, found)
    assert fingerprint_fits(public, found.upper().replace("-", " "))
    for wrong in ("", found[:-1], found + "a", "a" + found[1:], "ä" + found[1:]):
        assert not fingerprint_fits(public, wrong)


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.text(max_size=5), values, max_size=6))
def test_the_canonical_form_does_not_depend_on_order(document: dict[str, object]) -> None:
    turned = dict(reversed(document.items()))
    assert canonical(turned) == canonical(document)
    assert canonical(msgspec.json.decode(canonical(document))) == canonical(document)


def test_structs_and_dicts_have_the_same_canonical_form() -> None:
    class Point(msgspec.Struct):
        y: int
        x: tuple[int, ...]

    assert canonical(Point(1, (2, 3))) == canonical({"y": 1, "x": [2, 3]}) == b'{"x":[2,3],"y":1}'
    assert digest(b"").startswith("e3b0c44298fc1c14")


def test_the_module_loads_without_cryptography() -> None:
    code = "import sys, shared.proofs.signing; sys.exit('cryptography' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
