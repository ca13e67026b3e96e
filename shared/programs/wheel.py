"""Wheel of the running program, built from its installed files or its source tree.

A coordinator serves the wheel, so that a joining volunteer installs the same version from the
address in the join link. An update keeps the wheel of the previous version, to go back to it. The
same files give the same bytes.
"""

from __future__ import annotations

import base64
import hashlib
import io
import zipfile
from functools import lru_cache
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import msgspec

from shared.errors import Configuration

PROJECT = "volunteer"  # the name in pyproject.toml; no index is asked for this name
PACKAGES = ("coordinator", "shared", "volunteer")
# files of the metadata that describe one installation
_LEFT_OUT = frozenset({"INSTALLER", "RECORD", "REQUESTED", "direct_url.json", "uv_cache.json"})
_INSTANT = (1980, 1, 1, 0, 0, 0)  # the earliest time that an archive can hold


class Wheel(msgspec.Struct, frozen=True, kw_only=True):
    """A wheel in memory."""

    name: str  # name of the file, in the form that installers want
    data: bytes
    sha256: str


@lru_cache(maxsize=1)
def own_wheel() -> Wheel:
    """Return the wheel of this program. Raises Configuration in a tree that was never installed."""
    try:
        installed = distribution(PROJECT)
    except PackageNotFoundError as error:
        raise Configuration(
            "this source tree was never installed, so there is no wheel of it: "
            "run `pip install -e .` in it"
        ) from error
    stem = f"{PROJECT}-{installed.version}"
    contents = _packages() | _metadata(installed, f"{stem}.dist-info")
    record = f"{stem}.dist-info/RECORD"
    lines = []
    for name, data in sorted(contents.items()):
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(data)}\n")
    contents[record] = "".join([*lines, f"{record},,\n"]).encode()
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        # by name, with the record last, as the format asks
        for name in sorted(contents, key=lambda name: (name == record, name)):
            entry = zipfile.ZipInfo(name, _INSTANT)
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o100644 << 16
            archive.writestr(entry, contents[name])
    data = file.getvalue()
    sha256 = hashlib.sha256(data).hexdigest()
    return Wheel(name=f"{stem}-py3-none-any.whl", data=data, sha256=sha256)


def _packages() -> dict[str, bytes]:
    root = Path(__file__).parents[2]
    files = (path for package in PACKAGES for path in (root / package).rglob("*"))
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in files
        if path.is_file() and "__pycache__" not in path.parts and not path.name.startswith(".")
    }


def _metadata(installed: Distribution, folder: str) -> dict[str, bytes]:
    listed = [Path(str(installed.locate_file(name))) for name in installed.files or ()]
    metadata_files = [
        path for path in listed if folder in path.parts and path.name not in _LEFT_OUT
    ]
    contents = {
        "/".join(path.parts[path.parts.index(folder) :]): path.read_bytes()
        for path in metadata_files
    }
    return contents | {f"{folder}/WHEEL": _WHEEL}


_WHEEL = b"Wheel-Version: 1.0\nGenerator: volunteer\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
