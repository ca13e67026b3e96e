"""Shape of a DCGAN (Radford et al. 2016): its config, the schema of its weights, its cost.

This module does not import torch.

A side of b x 2^n pixels with b from 4 to 7 grows from b in n doublings: 64 = 4 x 2^4, 32 = 4 x 2^3,
28 = 7 x 2^2. Both networks get narrower by half with each doubling of the side. Names of
tensors never change: old checkpoints stay readable.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, NamedTuple

from msgspec import Meta

from shared.errors import InvalidRunFile
from shared.settings import Table
from shared.tensors.spec import Schema, TensorSpec
from shared.workloads.base import DatasetManifest

GENERATOR, DISCRIMINATOR = "generator", "discriminator"
KERNEL = 4  # kernel of every layer that doubles or halves the side


class Layer(NamedTuple):
    """One convolution. It doubles or halves the side, or converts between 1 x 1 and b x b
    pixels.
    """

    before: int  # channels
    after: int
    kernel: int
    normed: bool  # batch norm follows
    side: int  # pixels of a side of its input or output, whichever is larger


class DcganConfig(Table, frozen=True, kw_only=True):
    """Table `[model]`; by default the generator has 3,576,704 numbers, the discriminator
    2,765,568.
    """

    image_size: Annotated[int, Meta(ge=8, le=512)] = 64  # pixels, both sides
    channels: int = 3
    latent: Annotated[int, Meta(ge=1, le=4096)] = 100
    generator_width: Annotated[int, Meta(ge=1, le=1024)] = 64  # channels at half the full size
    discriminator_width: Annotated[int, Meta(ge=1, le=1024)] = 64

    def __post_init__(self) -> None:
        if self.channels not in (1, 3):
            raise InvalidRunFile(f"[model] channels {self.channels} must be 1 (grey) or 3 (colour)")
        if self.base << self.doublings != self.image_size:
            raise InvalidRunFile(
                f"[model] image_size {self.image_size} is not 4, 5, 6 or 7 doubled some times:"
                f" {self.base << self.doublings} or {(self.base + 1) << self.doublings} would be"
            )

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return the shape of an image, (C, H, W)."""
        return self.channels, self.image_size, self.image_size

    @property
    def doublings(self) -> int:
        """Return how many times the side doubles."""
        return self.image_size.bit_length() - 3

    @property
    def base(self) -> int:
        """Return the generator's initial side length."""
        return self.image_size >> self.doublings

    def generator(self) -> list[Layer]:
        """Return the layers from noise to an image."""
        widths = [self.generator_width << n for n in reversed(range(self.doublings))]
        ends = [*widths[1:], self.channels]
        first = Layer(self.latent, widths[0], self.base, True, self.base)
        return [first] + [
            Layer(before, after, KERNEL, index < len(ends) - 1, self.base << (index + 1))
            for index, (before, after) in enumerate(zip(widths, ends, strict=True))
        ]

    def discriminator(self) -> list[Layer]:
        """Return the layers from an image to one number."""
        widths = [self.discriminator_width << n for n in range(self.doublings)]
        begins = [self.channels, *widths[:-1]]
        return [
            Layer(before, after, KERNEL, index > 0, self.image_size >> index)
            for index, (before, after) in enumerate(zip(begins, widths, strict=True))
        ] + [Layer(widths[-1], 1, self.base, False, self.base)]


def config_for(raw: Mapping[str, object], manifest: DatasetManifest | None) -> DcganConfig:
    """Return the config of a run on this dataset, with its image size.

    Raises InvalidRunFile.
    """
    if manifest is None:
        return DcganConfig.from_dict(raw)
    if manifest.kind != "images":
        raise InvalidRunFile(
            f'the dataset "{manifest.name}" holds {manifest.kind}, but dcgan learns from images:'
            " make one with `coordinator dataset add NAME --images PATH`"
        )
    data_fields = {
        "image_size": manifest.meta.get("size"),
        "channels": manifest.meta.get("channels"),
    }
    for key, value in data_fields.items():
        if value is None:
            raise InvalidRunFile(f'the dataset "{manifest.name}" does not say its {key}')
        if raw.get(key, value) != value:
            raise InvalidRunFile(
                f'[model] {key} {raw[key]} does not fit the dataset "{manifest.name}", whose images'
                f" have {value}: leave it out, or add the images again with the other {key}"
            )
    return DcganConfig.from_dict({**data_fields, **raw})


def schema(config: DcganConfig) -> Schema:
    """Return every tensor of a version: both networks, each layer before its norm."""
    return (
        *_network(f"{GENERATOR}.up", f"{GENERATOR}.norm", config.generator(), transposed=True),
        *_network(
            f"{DISCRIMINATOR}.down",
            f"{DISCRIMINATOR}.norm",
            config.discriminator(),
            transposed=False,
        ),
    )


def _network(
    conv: str, norm: str, layers: list[Layer], *, transposed: bool
) -> Iterator[TensorSpec]:
    for index, layer in enumerate(layers):
        ends = (layer.before, layer.after) if transposed else (layer.after, layer.before)
        yield TensorSpec(f"{conv}{index}.weight", (*ends, layer.kernel, layer.kernel))
        if layer.normed:
            name, width = f"{norm}{index}", (layer.after,)
            yield TensorSpec(f"{name}.weight", width)
            yield TensorSpec(f"{name}.bias", width)
            yield TensorSpec(f"{name}.running_mean", width, role="buffer")
            yield TensorSpec(f"{name}.running_var", width, role="buffer")
            yield TensorSpec(f"{name}.num_batches_tracked", (), "I64", "counter")


def flops(layers: list[Layer]) -> float:
    """Return the forward FLOPs of one image: two for each multiplication."""
    total = 0.0
    for layer in layers:
        positions = 1 if layer.kernel == layer.side else (layer.side // 2) ** 2
        total += 2.0 * positions * layer.before * layer.after * layer.kernel**2
    return total


def flops_per_sample(config: DcganConfig) -> float:
    """Return the FLOPs of a step for each real image.

    Counted in forward passes: 3 for drawing a fake and learning from it; 6 for the discriminator
    to learn from both images; 2 for its judgement of the fake that the generator learns from.
    """
    return 3 * flops(config.generator()) + 8 * flops(config.discriminator())
