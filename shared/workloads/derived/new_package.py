"""Files of a package with a new workload: a small CNN on pictures to change, and its test."""

from __future__ import annotations

_PYPROJECT = """\
[build-system]
requires = ["hatchling>=1.27"]
build-backend = "hatchling.build"

[project]
name = "volunteer-{name}"
version = "0.1.0"
description = "The workload {name} for volunteer"
dependencies = ["volunteer"]

[project.entry-points."volunteer.workloads"]
{name} = "{package}:{title}"
"""

_INIT = '''\
"""The workload {name}. This file loads without torch; the model is in model.py."""

from volunteer.workload import OwnModel


class {title}(OwnModel):
    name, code = "{name}", "{package}.model:code"
'''

_MODEL = '''\
"""A CNN that learns in which folder a picture is: folders 0, 1, 2, ..."""

from torch import nn
from torch.nn import functional as F

from volunteer.workload import ModelCode, pictures

SIDE = 16  # pixels


def model(width: int = 16, classes: int = 10) -> nn.Module:
    """Build the model; the parameters are the keys of [model] in a run file."""
    last = nn.Linear(width * (SIDE // 2) ** 2, classes)
    first = nn.Conv2d(3, width, 3, stride=2, padding=1, bias=False)
    return nn.Sequential(first, nn.BatchNorm2d(width), nn.ReLU(), nn.Flatten(), last)


def loss(net, batch):
    """Return the mean loss of a batch."""
    images, folders = batch
    return F.cross_entropy(net(images / 255), folders)


def samples(paths):
    """Yield a picture and the number of its folder for each file."""
    for image, folder in pictures(paths, size=SIDE, channels=3):
        yield image, int(folder)


code = ModelCode(model, loss, samples)
'''

_TEST = '''\
"""The workload {name} learns, and refuses what it does not know."""

import pytest
from {package} import {title}
from PIL import Image

from shared.errors import InvalidRunFile
from volunteer.workload import trial


def test_it_learns(tmp_path):
    for number in range(200):
        folder = tmp_path / str(number % 2)
        folder.mkdir(exist_ok=True)
        grey = number % 100 + 100 * (number % 2)  # pictures of folder 1 are brighter
        Image.new("RGB", (16, 16), (grey, number, grey)).save(folder / f"{{number}}.png")
    losses = trial({title}(), [tmp_path], steps=60, classes=2)
    assert losses.after < 0.7 * losses.before


def test_it_refuses_an_unknown_key():
    with pytest.raises(InvalidRunFile, match="width"):
        {title}().config({{"widht": 8}}, None)
'''


def package_texts(name: str) -> dict[str, str]:
    """Return the texts of the files of the package of a workload, by path."""
    package = "volunteer_" + name.replace("-", "_")
    words = {"name": name, "package": package, "title": name.title().replace("-", "")}
    return {
        "pyproject.toml": _PYPROJECT.format_map(words),
        f"{package}/__init__.py": _INIT.format_map(words),
        f"{package}/model.py": _MODEL,
        f"tests/test_{package}.py": _TEST.format_map(words),
    }
