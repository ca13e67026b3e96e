"""Build of a dataset of images: pictures -> one size -> shuffled chunks, a held-out share, and a
judge of generated ones.

Two builds from the same input give the same chunks. Pixels go through a temporary file, so memory
holds an index of the images and the judge's small copies. `image_sources.py` reads the sources,
`image_chunks.py` the chunks.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec
import numpy as np
from typing_extensions import override

from shared.errors import InvalidRunFile
from shared.workloads.base import ChunkRef, DatasetManifest, DatasetTerms
from shared.workloads.data.image_files import Pixels
from shared.workloads.data.image_sources import SourceImage, read_pictures
from shared.workloads.data.pass_order import permutation
from shared.workloads.data.resize import grey, resize, square
from shared.workloads.data.skipped_files import Skipped

Put = Callable[[bytes], str]  # stores a blob and returns its SHA-256 in hex

JUDGE = "judge"  # asset that measures generated images
_SIDES = (8, 512)
_IMAGES_MIN = 32
_CHUNK_BYTES = 8 << 20
_CHUNKS_MAX = 4096  # a manifest must stay small
_JUDGED = 4096  # images on which the judge is trained
_CLASSES_MAX = 1000
_CLASS_IMAGES_MIN = 5  # with fewer images on average, folders do not count as classes


class ImageBuild(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of a build. `total` is 0 while it is unknown."""

    stage: str  # "reading", "writing", "judge"
    done: int  # finished images, or steps of the judge
    total: int


class ImageSettings(DatasetTerms, frozen=True, kw_only=True):
    """Settings of a dataset of images: the middle square of each, at one size."""

    size: int = 64  # pixels of both sides
    channels: int = 3  # 1 = grey
    # images are shuffled across all chunks, so small chunks cost a task nothing
    chunk_images: int = 64

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        low, high = _SIDES
        if not low <= self.size <= high:
            raise InvalidRunFile(f"size {self.size} must lie between {low} and {high} pixels")
        if self.channels not in (1, 3):
            raise InvalidRunFile(f"channels {self.channels} must be 1 (grey) or 3 (colour)")
        if not 1 <= self.chunk_images <= 1 << 20:
            raise InvalidRunFile(f"chunk_images {self.chunk_images} must be at least 1")

    @property
    def image_bytes(self) -> int:
        return self.channels * self.size * self.size


class _ScratchImage(NamedTuple):
    """An image in the temporary file."""

    digest: bytes
    number: int
    label: str


Tell = Callable[[ImageBuild], None]


def build_images(
    name: str,
    sources: Iterable[str | Path | SourceImage],
    put: Put,
    *,
    on_progress: Tell | None = None,
    skipped: Skipped | None = None,
    **options: Any,
) -> DatasetManifest:
    """Store a dataset of images through `put` and return its manifest.

    Exact copies are dropped. The images with the smallest SHA-256 are held out, so that the split
    depends only on the pixels. Unreadable images are added to `skipped`. Raises InvalidRunFile for
    a wrong setting, a missing source, or fewer than 32 images.
    """
    settings = ImageSettings(**options)
    tell = on_progress or (lambda _: None)
    skipped = skipped if skipped is not None else Skipped()
    with tempfile.TemporaryFile() as spool:
        pictures = read_pictures(sources, skipped, settings.size)
        scratch, copies = _spool(pictures, spool, settings, tell)
        if len(scratch) < _IMAGES_MIN:
            few = (
                f"{len(scratch)} different images are too few to learn from"
                f" (at least {_IMAGES_MIN})"
            )
            why = "; ".join(skipped.sentences[:3])
            could = f"; {skipped.count} could not be used: {why}" if skipped.count else ""
            raise InvalidRunFile(few + could)
        corpus = _ImageScratch(spool, scratch, settings)
        train, heldout_images = corpus.split()
        writer = _ChunkWriter(corpus, put, tell, total=len(scratch))
        chunks, heldout = writer.write(train), writer.write(heldout_images)
        judge, about = _judge(corpus, train, heldout_images, tell)
    return DatasetManifest(
        name=name,
        kind="images",
        licence=settings.licence,
        source=settings.source,
        chunks=chunks,
        heldout=heldout,
        assets={JUDGE: ChunkRef(sha256=put(judge), size=len(judge), items=1)},
        meta={
            "size": settings.size,
            "channels": settings.channels,
            "images": len(train),
            "heldout_images": len(heldout_images),
            "copies": copies,
            "skipped": skipped.count,
            **about,
        },
    )


def fit(pixels: Pixels, size: int, channels: int) -> Pixels:
    """Return the middle square of an image as (C, size, size)."""
    fitted = resize(square(pixels), size, size)
    if channels == 1:
        return grey(fitted)[None]
    colour = fitted if fitted.ndim == 3 else np.repeat(fitted[..., None], 3, axis=-1)
    return np.ascontiguousarray(colour[..., :3].transpose(2, 0, 1))


def _spool(
    pictures: Iterable[SourceImage], spool: BinaryIO, settings: ImageSettings, tell: Tell
) -> tuple[list[_ScratchImage], int]:
    """Write every new image to the temporary file; return the index of the images, and the number
    of dropped copies.
    """
    digests: set[bytes] = set()
    scratch: list[_ScratchImage] = []
    copies = 0
    for picture in pictures:
        data = fit(picture.pixels, settings.size, settings.channels).tobytes()
        digest = hashlib.sha256(data).digest()
        if digest in digests:
            copies += 1
            continue
        digests.add(digest)
        spool.write(data)
        scratch.append(_ScratchImage(digest, len(scratch), picture.label))
        if len(scratch) % 64 == 0:
            tell(ImageBuild(stage="reading", done=len(scratch), total=0))
    return scratch, copies


class _ImageScratch:
    """Temporary file of images, and its index."""

    def __init__(
        self, spool: BinaryIO, pictures: list[_ScratchImage], settings: ImageSettings
    ) -> None:
        self._spool = spool
        self._stored = pictures
        self.settings = settings

    def split(self) -> tuple[list[_ScratchImage], list[_ScratchImage]]:
        """Return the training images, shuffled, and the held-out images in the order of their
        digests.
        """
        by_digest = sorted(self._stored)
        heldout_count = max(1, round(self.settings.heldout_share * len(by_digest)))
        rest = by_digest[heldout_count:]
        order = permutation(len(rest), self.settings.seed, 1)
        return [rest[index] for index in order], by_digest[:heldout_count]

    def pixels(self, images: Iterable[_ScratchImage]) -> Iterator[Pixels]:
        """Yield each image, (C, size, size)."""
        size, shape = self.settings.image_bytes, (self.settings.channels, *[self.settings.size] * 2)
        for image in images:
            self._spool.seek(image.number * size)
            yield np.frombuffer(self._spool.read(size), np.uint8).reshape(shape)


class _ChunkWriter:
    """Cuts a list of images into chunks."""

    def __init__(self, corpus: _ImageScratch, put: Put, tell: Tell, *, total: int) -> None:
        self._corpus = corpus
        self._put = put
        self._tell = tell
        self._done, self._total = 0, total
        settings = corpus.settings
        chunk_images = max(settings.chunk_images, -(-total // _CHUNKS_MAX))
        self._images = max(1, min(chunk_images, _CHUNK_BYTES // settings.image_bytes))

    def write(self, images: list[_ScratchImage]) -> tuple[ChunkRef, ...]:
        chunks = []
        for start in range(0, len(images), self._images):
            part = images[start : start + self._images]
            blob = b"".join(image.tobytes() for image in self._corpus.pixels(part))
            chunks.append(ChunkRef(sha256=self._put(blob), size=len(blob), items=len(part)))
            self._done += len(part)
            self._tell(ImageBuild(stage="writing", done=self._done, total=self._total))
        return tuple(chunks)


def _judge(
    corpus: _ImageScratch, train: list[_ScratchImage], heldout: list[_ScratchImage], tell: Tell
) -> tuple[bytes, dict[str, str | int | float]]:
    """Return the judge of this dataset, and its fields for the manifest."""
    tell(ImageBuild(stage="judge", done=0, total=0))
    from shared.workloads.data.classifier import cluster, shrink, train_judge

    train, heldout = train[:_JUDGED], heldout[:_JUDGED]
    some = shrink(corpus.pixels(train))
    real = shrink(corpus.pixels(heldout))
    counted = Counter(image.label for image in train)
    named = "" not in counted and 2 <= len(counted) <= _CLASSES_MAX
    if named and len(train) >= _CLASS_IMAGES_MIN * len(counted):
        label_places = {label: index for index, label in enumerate(sorted(counted))}
        labels = np.array([label_places[image.label] for image in train])
        expected = np.array([label_places.get(image.label, -1) for image in heldout])
        kind = "folders"
    else:
        labels, expected = cluster(some, real, corpus.settings.seed)
        kind = "clusters"

    def on_step(done: int, total: int) -> None:
        tell(ImageBuild(stage="judge", done=done, total=total))

    judged = train_judge(some, labels, real, expected, corpus.settings.seed, on_step)
    return judged.data, {
        "classes": judged.classes,
        "classes_from": kind,
        "judge_accuracy": judged.accuracy,
    }
