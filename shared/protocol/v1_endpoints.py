"""The OpenAI-compatible interface (docs/inference.md): `coordinator.v1` answers it, and refuses in
OpenAI's words.
"""

from __future__ import annotations

from typing import Any

from shared.protocol.endpoints import Endpoint
from shared.protocol.inference import (
    ChatRequest,
    CompletionRequest,
    ImageReply,
    ImageRequest,
    ModelCard,
    ModelList,
)

IMAGES_BYTES_MAX = 64 << 20  # a reply with the most pictures

MODEL = Endpoint(
    method="GET",
    path="/v1/models/{model}",
    root=True,
    summary="One of them: RUN, RUN@best or RUN@40",
    auth="key",
    reply=ModelCard,
)
IMAGES = Endpoint(
    method="POST",
    path="/v1/images/generations",
    root=True,
    summary="Pictures of an image run, as base64 PNG",
    auth="key",
    request=ImageRequest,
    reply=ImageReply,
    bytes_max=IMAGES_BYTES_MAX,
)
V1: tuple[Endpoint[Any], ...] = (
    Endpoint(
        method="GET",
        path="/v1/models",
        root=True,
        summary="Versions that I may ask, with licence, dataset, loss and price",
        auth="key",
        reply=ModelList,
    ),
    MODEL,
    Endpoint(
        method="POST",
        path="/v1/completions",
        root=True,
        summary="Continue a text; with `stream` as server-sent events",
        auth="key",
        request=CompletionRequest,
        reply=dict[str, Any],
    ),
    Endpoint(
        method="POST",
        path="/v1/chat/completions",
        root=True,
        summary="Continue a conversation; with `stream` as server-sent events",
        auth="key",
        request=ChatRequest,
        reply=dict[str, Any],
    ),
    IMAGES,
)
