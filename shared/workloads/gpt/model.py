"""GPT: a pre-norm decoder.

Shapes: B windows, T tokens, C width, H heads (K of keys and values), D = C / H, V vocabulary.
Weights are float32; the caller sets autocast.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from shared.workloads.base import Weights, fit_weights
from shared.workloads.gpt.config import GptConfig, schema
from shared.workloads.training.dropout import SampleDropout, SampleKeys

EPSILON = 1e-5  # epsilon of the norms
ROTARY_BASE = 10_000.0  # the slowest pair turns by one radian in about so many places


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self._heads, self._key_heads = config.n_head, config.key_heads
        key_width = config.key_heads * config.head_width  # C, if each head has keys of its own
        self._widths = [config.n_embd, key_width, key_width]
        self.qkv = nn.Linear(config.n_embd, sum(self._widths), bias=config.bias)
        self.proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)

    def split(self, x: Tensor, turn: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries (B, H, T, D), keys, values (B, K, T, D) of inputs (B, T, C). If `turn` is
        given, it rotates the queries and the keys.
        """
        B, T, _ = x.shape
        q, k, v = self.qkv(x).split(self._widths, dim=-1)
        q = q.view(B, T, self._heads, -1).transpose(1, 2)
        k = k.view(B, T, self._key_heads, -1).transpose(1, 2)
        v = v.view(B, T, self._key_heads, -1).transpose(1, 2)
        return (q, k, v) if turn is None else (_turned(q, turn), _turned(k, turn), v)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False
    ) -> Tensor:
        """Return the attention of the queries (B, T, C), each over the keys marked in `mask`."""
        shape, grouped = q.shape, self._key_heads < self._heads
        if grouped and shape[2] == 1:  # heads that share keys are rows of one product
            q, grouped = q.reshape(shape[0], self._key_heads, -1, shape[3]), False
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=grouped)
        y = y.reshape(shape)
        output: Tensor = self.proj(y.transpose(1, 2).flatten(2))
        return output

    @override
    def forward(self, x: Tensor, turn: Tensor | None) -> Tensor:
        return self.attend(*self.split(x, turn), causal=True)


def rotary(places: int, width: int) -> Tensor:
    """Return cosines and sines (2, places, D) that rotate a head's first half against its
    second.
    """
    steps = ROTARY_BASE ** (-torch.arange(0, width, 2, device="cpu", dtype=torch.float32) / width)
    angles = torch.outer(torch.arange(places, device="cpu", dtype=torch.float32), steps)
    angles = torch.cat([angles, angles], dim=-1)
    return torch.stack([angles.cos(), angles.sin()])


def _turned(x: Tensor, turn: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    cosines, sines = turn
    turned: Tensor = x * cosines + torch.cat([-second, first], dim=-1) * sines
    return turned.type_as(x)  # with autocast, attention needs the type of its values


class Mlp(nn.Module):
    """Two layers with the exact GELU between them, on CPUs twice as fast as the tanh form."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.n_embd, config.mlp_width, bias=config.bias)
        self.down = nn.Linear(config.mlp_width, config.n_embd, bias=config.bias)

    @override
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x)))
        return out


class GatedMlp(nn.Module):
    """Gated MLP: two layers; the SiLU of a third layer multiplies the values between them."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.n_embd, config.mlp_width, bias=False)
        self.up = nn.Linear(config.n_embd, config.mlp_width, bias=False)
        self.down = nn.Linear(config.mlp_width, config.n_embd, bias=False)

    @override
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


def _norm(config: GptConfig) -> nn.Module:
    if config.architecture == "llama":
        return nn.RMSNorm(config.n_embd, eps=EPSILON)
    return nn.LayerNorm(config.n_embd, eps=EPSILON, bias=config.bias)


class Block(nn.Module):
    """Attention and MLP, each on a residual branch."""

    def __init__(self, config: GptConfig, keys: SampleKeys, place: int) -> None:
        super().__init__()
        self.ln1 = _norm(config)
        self.attn = Attention(config)
        self.ln2 = _norm(config)
        self.mlp = GatedMlp(config) if config.architecture == "llama" else Mlp(config)
        self.drop_attn = SampleDropout(config.dropout, keys, place)
        self.drop_mlp = SampleDropout(config.dropout, keys, place + 1)

    @override
    def forward(self, x: Tensor, turn: Tensor | None) -> Tensor:
        x = x + self.drop_attn(self.attn(self.ln1(x), turn))
        x = x + self.drop_mlp(self.mlp(self.ln2(x)))
        return x


def _embedding(count: int, width: int) -> nn.Embedding:
    """Return an uninitialised embedding, which `build` fills: drawing values on the meta device
    would import PyTorch's compiler, for 2 s.
    """
    return nn.Embedding(count, width, _weight=torch.empty(count, width))


class Gpt(nn.Module):
    """Tokens (B, T) to logits (B, T, V)."""

    turns: Tensor  # rotary table, if positions are not learned

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.samples = SampleKeys()  # keys of the samples, for dropout
        self._spares = False  # recomputes blocks in the backward pass to save memory
        self.tok_emb = _embedding(config.vocab_size, config.n_embd)
        self._rotary = config.architecture == "llama"
        if self._rotary:
            table = rotary(config.block_size, config.head_width)
            self.register_buffer("turns", table, persistent=False)
        else:
            self.pos_emb = _embedding(config.block_size, config.n_embd)
        self.drop = SampleDropout(config.dropout, self.samples, 0)
        self.blocks = nn.ModuleList(
            Block(config, self.samples, 1 + 2 * layer) for layer in range(config.n_layer)
        )
        self.ln_f = _norm(config)
        if not config.tie_head:
            self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self._tied = config.tie_head

    def placed(self, tokens: Tensor, places: Tensor | slice) -> tuple[Tensor, Tensor | None]:
        """Return embeddings of tokens, and the rotation for attention; the rotation is None if
        learned positions are added to the embeddings.

        `places` is a slice of T places or a tensor with one for each token, shaped like `tokens`.
        """
        x: Tensor = self.tok_emb(tokens)
        if not self._rotary:
            return x + self.pos_emb.weight[places], None
        turn: Tensor = self.turns[:, places]
        return x, turn if isinstance(places, slice) else turn.unsqueeze(2)  # for all heads

    def hidden(self, tokens: Tensor) -> Tensor:
        """Return the last layer's output (B, T, C)."""
        x, turn = self.placed(tokens, slice(0, tokens.shape[1]))  # (B, T, C)
        x = self.drop(x)
        for block in self.blocks:
            if self._spares and torch.is_grad_enabled():
                x = checkpoint(block, x, turn, use_reentrant=False)
            else:
                x = block(x, turn)
        out: Tensor = self.ln_f(x)
        return out

    def gradient_checkpointing_enable(self, how: Mapping[str, bool]) -> None:
        """Recompute blocks in the backward pass from now on; named as in the library."""
        self._spares = True

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the scores (..., V) of hidden states (..., C)."""
        return F.linear(hidden, self.tok_emb.weight if self._tied else self.head.weight)

    @override
    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss in nats a token; `tokens` and `targets` are (B, T)."""
        return self.losses(tokens, targets).mean()

    def losses(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the loss (B, T) of each target, in nats."""
        logits = self.logits(self.hidden(tokens)).flatten(0, 1).float()
        return F.cross_entropy(logits, targets.flatten(), reduction="none").view_as(targets)


def build(config: GptConfig, weights: Weights, device: str) -> Gpt:
    """Return a model on `device` with its own copy of `weights`. Raises InvalidFrame for weights of
    another model.
    """
    tensors = {
        name: tensor.to(device, torch.float32, copy=True)
        for name, tensor in fit_weights(schema(config), weights).items()
    }
    with torch.device("meta"):  # no memory, no random numbers: the weights are loaded
        model = Gpt(config)
    model.load_state_dict(tensors, strict=True, assign=True)
    return model.to(device)  # including the rotary table, which is computed, not loaded
