"""Networks of a DCGAN: the generator draws images, the discriminator distinguishes them from real
ones.

Shapes: B images, L latent, C channels, S side. Images lie in -1 ... 1. Weights are float32; the
caller sets autocast.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from typing_extensions import override

from shared.workloads.base import Weights, fit_weights
from shared.workloads.dcgan.config import DcganConfig, Layer, schema

_SLOPE = 0.2  # slope of the leaky activation


class Dcgan(nn.Module):
    """Generator and discriminator, with the schema's names of tensors."""

    def __init__(self, config: DcganConfig) -> None:
        super().__init__()
        self.generator = nn.Sequential(OrderedDict(_generator(config.generator())))
        self.discriminator = nn.Sequential(OrderedDict(_discriminator(config.discriminator())))

    def draw(self, noise: Tensor) -> Tensor:
        """Return images (B, C, S, S) from noise (B, L)."""
        out: Tensor = self.generator(noise[:, :, None, None])
        return out

    def judge(self, images: Tensor) -> Tensor:
        """Return one number (B,) for each image: the log odds that it is real."""
        out: Tensor = self.discriminator(images)  # (B, 1, 1, 1)
        return out.flatten()


def _generator(layers: list[Layer]) -> Iterator[tuple[str, nn.Module]]:
    for index, layer in enumerate(layers):
        # The first layer makes b x b of one point, the others double the side.
        stride, padding = (1, 0) if index == 0 else (2, 1)
        yield (
            f"up{index}",
            nn.ConvTranspose2d(
                layer.before, layer.after, layer.kernel, stride, padding, bias=False
            ),
        )
        if layer.normed:
            yield f"norm{index}", nn.BatchNorm2d(layer.after)
            yield f"act{index}", nn.ReLU(inplace=True)
    yield "out", nn.Tanh()


def _discriminator(layers: list[Layer]) -> Iterator[tuple[str, nn.Module]]:
    for index, layer in enumerate(layers):
        last = index == len(layers) - 1
        stride, padding = (1, 0) if last else (2, 1)
        yield (
            f"down{index}",
            nn.Conv2d(layer.before, layer.after, layer.kernel, stride, padding, bias=False),
        )
        if layer.normed:
            yield f"norm{index}", nn.BatchNorm2d(layer.after)
        if not last:
            yield f"act{index}", nn.LeakyReLU(_SLOPE, inplace=True)


def build(config: DcganConfig, weights: Weights, device: str) -> Dcgan:
    """Build both networks on `device` with copies of `weights`. Raises InvalidFrame."""
    specs = schema(config)
    tensors = fit_weights(specs, weights)
    for spec in specs:
        dtype = torch.int64 if spec.role == "counter" else torch.float32
        tensors[spec.name] = tensors[spec.name].to(device, dtype, copy=True)
    with torch.device("meta"):  # no memory, no random numbers: the weights are loaded
        model = Dcgan(config)
    model.load_state_dict(tensors, strict=True, assign=True)
    return model


class Generator(nn.Module):
    """Generator alone."""

    def __init__(self, model: Dcgan) -> None:
        super().__init__()
        self.generator = model.generator

    @override
    def forward(self, noise: Tensor) -> Tensor:
        """Return images (B, C, S, S) of noise (B, L)."""
        out: Tensor = self.generator(noise[:, :, None, None])
        return out


@contextmanager
def statistics_kept(network: nn.Module) -> Iterator[None]:
    """Leave the running averages of batch norms unchanged in the block, in which batches are
    normalised by their own statistics.
    """
    norms = [module for module in network.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        norm.track_running_stats = False
    try:
        yield
    finally:
        for norm in norms:
            norm.track_running_stats = True
