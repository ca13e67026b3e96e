"""Datasets of images: what is read from folders and archives, what is refused, and what comes of
it.
"""

from __future__ import annotations

import hashlib
import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from shared.errors import InvalidRunFile
from shared.workloads.data.classifier import load_judge
from shared.workloads.data.image_dataset import build_images
from shared.workloads.data.image_files import Pixels
from shared.workloads.data.image_sources import SourceImage, digit_pictures, read_pictures
from shared.workloads.data.skipped_files import Skipped
from tests.support.workloads.tiny_dcgan import digits


class Store:
    """Blobs in memory."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}

    def put(self, data: bytes) -> str:
        name = hashlib.sha256(data).hexdigest()
        self.blobs[name] = data
        return name


def encoded(
    seed: int, kind: str = "PNG", size: tuple[int, int] = (12, 10), mode: str = "RGB"
) -> bytes:
    rng = np.random.default_rng(seed)
    image = Image.fromarray(rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))
    out = io.BytesIO()
    image.convert(mode).save(out, kind)
    return out.getvalue()


def folder(root: Path, count: int = 40) -> Path:
    """Two classes in folders, PNG and JPEG, and files that are no images."""
    for index in range(count):
        place = root / ("cat" if index % 2 else "dog")
        place.mkdir(parents=True, exist_ok=True)
        kind, suffix = (("PNG", "png"), ("JPEG", "JPG"))[index % 3 == 0]
        (place / f"{index:03}.{suffix}").write_bytes(encoded(index, kind))
    (root / "readme.txt").write_text("not an image")
    (root / ".hidden.png").write_bytes(b"x")
    return root


OPTIONS: dict[str, Any] = {
    "size": 8,
    "channels": 3,
    "chunk_images": 16,
    "heldout_share": 0.2,
    "licence": "CC0-1.0",
}


def test_a_folder_becomes_chunks_of_pixels_and_a_held_out_share(tmp_path: Path) -> None:
    store = Store()
    manifest = build_images("pets", [folder(tmp_path)], store.put, **OPTIONS)
    assert (manifest.kind, manifest.licence) == ("images", "CC0-1.0")
    assert [chunk.items for chunk in manifest.chunks] == [16, 16]
    assert [chunk.items for chunk in manifest.heldout] == [8]
    assert all(chunk.size == chunk.items * 3 * 8 * 8 for chunk in manifest.chunks)
    assert all(len(store.blobs[chunk.sha256]) == chunk.size for chunk in manifest.chunks)
    assert manifest.meta["classes"] == 2
    assert manifest.meta["classes_from"] == "folders"
    images = {
        store.blobs[chunk.sha256][start : start + 192]
        for chunk in (*manifest.chunks, *manifest.heldout)
        for start in range(0, chunk.size, 192)
    }
    assert len(images) == 40


def test_two_builds_give_the_same_bytes_and_copies_count_once(tmp_path: Path) -> None:
    root = folder(tmp_path / "images")
    (root / "cat" / "copy.png").write_bytes((root / "cat" / "001.png").read_bytes())
    first = build_images("pets", [root], Store().put, **OPTIONS)
    assert first == build_images("pets", [root], Store().put, **OPTIONS)
    assert first.meta["copies"] == 1
    assert first != build_images("pets", [root], Store().put, **(OPTIONS | {"seed": 1}))


def test_broken_files_are_refused_one_by_one_and_named(tmp_path: Path) -> None:
    root = folder(tmp_path / "images")
    good = encoded(77, "JPEG", (64, 64))
    (root / "cut.jpg").write_bytes(good[: len(good) // 2])
    (root / "text.png").write_bytes(b"hello")
    (root / "gif.png").write_bytes(encoded(78, "GIF"))
    (root / "thin.png").write_bytes(encoded(79, size=(1, 500)))
    Image.new("L", (64, 64)).save(root / "exif.png", exif=b"Exif\0\0garbage")
    (root / "some.zip").write_bytes(b"PK\x03\x04 archive")
    skipped = Skipped()
    manifest = build_images("pets", [root], Store().put, skipped=skipped, **OPTIONS)
    assert int(manifest.meta["images"]) + int(manifest.meta["heldout_images"]) == 41
    assert manifest.meta["skipped"] == skipped.count == 5
    text = "\n".join(skipped.sentences)
    for name in ("cut.jpg", "text.png", "thin.png", "exif.png", ".zip 1"):
        assert name in text
    assert (
        "text.png: cannot be decoded (not a PNG or JPEG or WEBP or GIF or BMP or TIFF image)"
        in text
    )


def test_an_archive_is_to_be_unpacked_first(tmp_path: Path) -> None:
    archive = tmp_path / "some.zip"
    archive.write_bytes(b"PK\x03\x04 archive")
    skipped = Skipped()
    assert not list(read_pictures([archive], skipped, 8))
    assert skipped.sentences == ["some.zip: it is an archive: unpack it first"]


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "I;16", "RGB"])
def test_every_kind_of_pixel_becomes_grey_or_colour(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "a.png"
    if mode == "I;16":
        Image.fromarray(np.full((9, 9), 0x8000, np.uint16)).save(path)
    else:
        Image.new("RGB", (9, 9), (200, 200, 200)).convert(mode).save(path)
    skipped = Skipped()
    (picture,) = read_pictures([path], skipped, 8)
    assert picture.pixels.dtype == np.uint8
    assert picture.pixels.shape[:2] == (9, 9)
    assert 100 <= picture.pixels.mean() <= 255


def test_what_is_transparent_is_white(tmp_path: Path) -> None:
    Image.new("RGBA", (9, 9), (0, 0, 0, 0)).save(tmp_path / "a.png")
    (picture,) = read_pictures([tmp_path / "a.png"], Skipped(), 8)
    assert int(picture.pixels.min()) == 255


def test_large_images_come_smaller(tmp_path: Path) -> None:
    for name, kind in (("a.png", "PNG"), ("b.jpg", "JPEG")):
        (tmp_path / name).write_bytes(encoded(1, kind, (1000, 700)))
    for picture in read_pictures([tmp_path], Skipped(), 32):
        assert 64 <= min(picture.pixels.shape[:2]) < 140


def drawn(count: int) -> list[SourceImage]:
    def pixels(seed: int) -> Pixels:
        return np.random.default_rng(seed).integers(0, 256, (8, 8), dtype=np.uint8)

    return [SourceImage(str(seed), pixels(seed)) for seed in range(count)]


def test_images_without_folders_are_grouped_by_how_they_look() -> None:
    manifest = build_images("noise", drawn(64), Store().put, size=8, channels=1)
    assert manifest.meta["classes_from"] == "clusters"
    assert 2 <= int(manifest.meta["classes"]) <= 10


def test_a_set_without_images_says_why(tmp_path: Path) -> None:
    (tmp_path / "text.png").write_bytes(b"hello")
    with pytest.raises(InvalidRunFile, match=r"0 different images are too few.*text\.png: cannot"):
        build_images("none", [tmp_path], Store().put)
    with pytest.raises(InvalidRunFile, match="there is no such file"):
        build_images("none", [tmp_path / "absent"], Store().put)
    with pytest.raises(InvalidRunFile, match="31 different images are too few"):
        build_images("few", [*drawn(31), *drawn(31)], Store().put, size=8, channels=1)


@pytest.mark.parametrize(
    "options", [{"size": 4}, {"channels": 2}, {"heldout_share": 0.9}, {"chunk_images": 0}]
)
def test_options_that_make_no_sense_are_named(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRunFile, match=next(iter(options))):
        build_images("bad", drawn(40), Store().put, **options)


@pytest.mark.slow
def test_without_scikit_learn_digits_are_drawn_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    drawn_here = list(digit_pictures())
    assert len(drawn_here) == 1797
    assert {picture.pixels.shape for picture in drawn_here} == {(8, 8)}
    data = digits(tmp_path)
    assert data.manifest.meta["classes"] == 10
    assert float(data.manifest.meta["judge_accuracy"]) > 0.9


@pytest.mark.slow
def test_the_digits_are_real_and_their_judge_knows_them(tmp_path: Path) -> None:
    data = digits(tmp_path)
    assert len(list(digit_pictures())) == 1797
    assert data.manifest.meta["images"] == 1797 - 180
    assert data.manifest.meta["classes"] == 10
    assert float(data.manifest.meta["judge_accuracy"]) > 0.9
    judge = load_judge(data.asset("judge"), 1)
    assert judge.shares == pytest.approx([0.1] * 10, abs=0.02)
    assert float(judge.real.covariance.trace()) == pytest.approx(100, rel=1e-3)
    assert 0 < judge.floor < 10


@pytest.mark.parametrize("kind", ["webp", "gif", "bmp", "tiff", "png", "jpeg"])
def test_images_of_many_kinds_are_read(tmp_path: Path, kind: str) -> None:
    Image.new("RGB", (12, 12), (200, 10, 10)).save(tmp_path / f"red.{kind}")
    (tmp_path / "note.doc").write_text("no picture")
    skipped = Skipped()
    (found,) = read_pictures([tmp_path], skipped, side=4)
    assert found.pixels.shape == (12, 12, 3)
    assert skipped.sentences == [f"{tmp_path}: files of other kinds were not read: .doc 1"]
