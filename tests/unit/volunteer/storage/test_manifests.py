"""What the coordinator signed and nobody can read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from shared.errors import InvalidFrame
from shared.proofs.signing import SigningKey
from shared.protocol.transparency import SignedReceipt
from shared.protocol.versions import SignedManifest
from volunteer.storage.manifests import verified_manifest
from volunteer.storage.receipts import read_receipt


@pytest.mark.parametrize(
    "read",
    [
        lambda payload, made, key: verified_manifest(
            SignedManifest(payload=payload, signature=made), key
        ),
        lambda payload, made, key: read_receipt(
            SignedReceipt(payload=payload, signature=made), key
        ),
    ],
    ids=["manifest", "receipt"],
)
@pytest.mark.parametrize("payload", ["{", '{"a": ' + "[" * 100_000], ids=["cut off", "too deep"])
def test_a_signed_payload_that_is_damaged_is_refused(
    tmp_path: Path, payload: str, read: Callable[[str, str, str], object]
) -> None:
    key = SigningKey.load_or_create(tmp_path / "key.pem")
    made = key.sign(payload.encode()).hex()
    with pytest.raises(InvalidFrame, match="cannot be read"):
        read(payload, made, key.public_key.hex())
