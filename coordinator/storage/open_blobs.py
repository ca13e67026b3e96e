"""Opening of the blob store named by a setting."""

from __future__ import annotations

from pathlib import Path

from coordinator.storage.announced_blobs import Announcer, unannounced
from coordinator.storage.blobs import BlobStore, DiskBlobs
from coordinator.storage.folders import is_address
from shared.errors import Configuration


def open_blobs(url: str, cache: Path, announce: Announcer = unannounced) -> BlobStore:
    """Open the blob store at `url`: a directory, or `s3://bucket/prefix`. `cache` is the folder for
    local copies of an object store's blobs. Raises Configuration.
    """
    if url.startswith("s3://") and url.removeprefix("s3://").partition("/")[0]:
        from coordinator.storage.s3 import S3Blobs  # needs an extra

        return S3Blobs(url, cache, announce)
    if is_address(url):
        raise Configuration(f'blobs must be a directory or s3://bucket/prefix, not "{url}"')
    try:
        return DiskBlobs(Path(url).expanduser().absolute(), announce)
    except OSError as error:
        raise Configuration(f"the blob directory {url} cannot be used: {error.strerror}") from error
