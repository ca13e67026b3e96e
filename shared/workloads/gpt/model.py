"""The GPT itself: pre-norm decoder with learned positions.

Shapes: B windows, T tokens, C width, H heads, D = C / H, V vocabulary. Weights are float32;
autocast is the caller's.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared.errors import InvalidFrame
from shared.workloads.gpt.config import GptConfig, schema
from shared.workloads.training.dropout import SampleDropout, SampleKeys


class Kept:
    """Keys and values of the tokens that one attention layer has seen, for generating token by
    token.
    """

    def __init__(self) -> None:
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values so far, each (B, H, T, D)."""
        if self._keys is not None and self._values is not None:
            keys = torch.cat([self._keys, keys], dim=2)
            values = torch.cat([self._values, values], dim=2)
        self._keys, self._values = keys, values
        return keys, values


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.heads = config.n_head
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor, kept: Kept | None) -> Tensor:
        B, T, C = x.shape
        qkv = self.qkv(x).view(B, T, 3, self.heads, C // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # (B, H, T, D) each
        if kept is not None:
            k, v = kept.extend(k, v)
        # A lone new token may look at everything kept; several tokens come only while nothing is.
        y = F.scaled_dot_product_attention(q, k, v, is_causal=T > 1)
        out: Tensor = self.proj(y.transpose(1, 2).reshape(B, T, C))
        return out


class Mlp(nn.Module):
    """Two layers with a GELU between them (the exact one: on CPUs it is twice as fast as its tanh
    form).
    """

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.down = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x)))
        return out


class Block(nn.Module):
    """Attention and MLP, each on a residual branch."""

    def __init__(self, config: GptConfig, keys: SampleKeys, place: int) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = Attention(config)
        self.ln2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = Mlp(config)
        self.drop_attn = SampleDropout(config.dropout, keys, place)
        self.drop_mlp = SampleDropout(config.dropout, keys, place + 1)

    def forward(self, x: Tensor, kept: Kept | None) -> Tensor:
        x = x + self.drop_attn(self.attn(self.ln1(x), kept))
        x = x + self.drop_mlp(self.mlp(self.ln2(x)))
        return x


def _embedding(count: int, width: int) -> nn.Embedding:
    """Without first values, which `build` brings: to draw them on the meta device imports PyTorch's
    compiler, for 2 s.
    """
    return nn.Embedding(count, width, _weight=torch.empty(count, width))


class Gpt(nn.Module):
    """Tokens (B, T) to logits (B, T, V)."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.samples = SampleKeys()  # that dropout goes by
        self.tok_emb = _embedding(config.vocab_size, config.n_embd)
        self.pos_emb = _embedding(config.block_size, config.n_embd)
        self.drop = SampleDropout(config.dropout, self.samples, 0)
        self.blocks = nn.ModuleList(
            Block(config, self.samples, 1 + 2 * layer) for layer in range(config.n_layer)
        )
        self.ln_f = nn.LayerNorm(config.n_embd, bias=config.bias)
        if not config.tie_head:
            self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self._tied = config.tie_head

    def hidden(self, tokens: Tensor, kept: list[Kept] | None = None, start: int = 0) -> Tensor:
        """The last layer's output (B, T, C) for tokens at positions `start`, `start` + 1, ..."""
        T = tokens.shape[1]
        x = self.tok_emb(tokens) + self.pos_emb.weight[start : start + T]  # (B, T, C)
        x = self.drop(x)
        for index, block in enumerate(self.blocks):
            x = block(x, kept[index] if kept is not None else None)
        out: Tensor = self.ln_f(x)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores (..., V) of hidden states (..., C)."""
        return F.linear(hidden, self.tok_emb.weight if self._tied else self.head.weight)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean loss in nats a token; `tokens` and `targets` are (B, T)."""
        logits = self.logits(self.hidden(tokens))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def build(config: GptConfig, weights: Mapping[str, Tensor], device: str) -> Gpt:
    """A model on `device` with its own copy of `weights`.

    Raises InvalidFrame when they are not this model's.
    """
    own: dict[str, Tensor] = {}
    for spec in schema(config):
        found = weights.get(spec.name)
        if found is None or tuple(found.shape) != spec.shape:
            has = "is missing" if found is None else f"has the shape {tuple(found.shape)}"
            raise InvalidFrame(f"{spec.name} {has}, but this model needs {spec.shape}")
        own[spec.name] = found.detach().to(device, torch.float32, copy=True)
    with torch.device("meta"):  # no memory, no random numbers: the weights come from outside
        model = Gpt(config)
    model.load_state_dict(own, strict=True, assign=True)
    return model
