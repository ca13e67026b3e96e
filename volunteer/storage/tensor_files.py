"""Tensors in the volunteer's own files: snapshots of unfinished tasks."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from shared.errors import StorageFull, why
from shared.files.deletions import delete_file
from shared.files.disk_writes import PARTIAL_SUFFIX
from shared.sentences import Sentence

if TYPE_CHECKING:
    import torch


def store(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Replace `path` by these CPU tensors, atomically. Raises StorageFull if the disk refuses."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{PARTIAL_SUFFIX}")
    try:
        save_file({name: value.contiguous() for name, value in tensors.items()}, temporary)
        temporary.replace(path)
    except (OSError, SafetensorError) as error:
        raise StorageFull(
            Sentence("{path} cannot be written: {why}", path=path, why=why(error))
        ) from error
    finally:
        delete_file(temporary, "scratch")


def load(path: Path) -> dict[str, torch.Tensor] | None:
    """Return the tensors of a file; None if it cannot be read. A damaged file is removed."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except OSError:  # missing, or this process may open no more files
        return None
    except SafetensorError:
        delete_file(path, "copy")
        return None
