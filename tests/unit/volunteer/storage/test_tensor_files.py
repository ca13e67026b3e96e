"""Snapshots and optimiser states in the volunteer's own files."""

import resource
from pathlib import Path

import torch

from volunteer.storage import tensor_files


def test_damaged_file_is_removed_and_read_as_none(tmp_path: Path) -> None:
    path = tmp_path / "inner"
    path.write_bytes(b"not tensors")
    assert tensor_files.load(path) is None
    assert not path.exists()


def test_file_survives_a_process_without_free_descriptors(tmp_path: Path) -> None:
    path = tmp_path / "inner"
    tensor_files.store(path, {"weight": torch.ones(3)})
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        assert tensor_files.load(path) is None
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    loaded = tensor_files.load(path)
    assert loaded is not None
    assert loaded["weight"].tolist() == [1.0, 1.0, 1.0]
