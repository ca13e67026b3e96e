"""Manifests of versions, accepted only with the signature of the pinned coordinator key."""

from __future__ import annotations

from shared.decoding import MALFORMED, decode
from shared.errors import InvalidFrame
from shared.proofs.signing import verify_text
from shared.protocol.versions import SignedManifest, VersionManifest
from shared.sentences import Sentence


def verified_manifest(signed: SignedManifest, public_key: str) -> VersionManifest:
    """Return the manifest if `public_key` signed it. Raises BadSignature, InvalidFrame for an
    unreadable manifest.
    """
    verify_text(public_key, signed.payload, signed.signature)
    try:
        return decode(signed.payload, VersionManifest)
    except MALFORMED as error:
        raise InvalidFrame(
            Sentence("the manifest of a version cannot be read: {error}", error=error)
        ) from error
