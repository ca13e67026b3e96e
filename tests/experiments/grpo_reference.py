"""Group-relative policy optimisation in plain torch, independent of the product: a small model of
Llama's shape, warmed by supervised steps on short problems, learns to sort longer ones by rewards.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

END, COLON, PAD, VOCABULARY = 10, 11, 12, 13  # the tokens 0 to 9 are digits


class Settings(NamedTuple):
    """Sizes and rates of one run; problems are digits to sort."""

    length: int = 10  # digits of the longest problems; the shortest have three
    width: int = 64
    layers: int = 2
    warm_length: int = 4  # of the longest problems of the supervised steps
    warm_steps: int = 300
    warm_lr: float = 2e-3  # falls to a twentieth
    problems: int = 32  # of a version
    group: int = 8  # answers to a problem
    versions: int = 400
    lr: float = 4e-4
    clip: tuple[float, float] = (0.2, 0.28)
    mean: str = "length"  # a fixed one, under the sum of an answer; or all "tokens", as DAPO
    scaled: bool = False  # by the deviation of a group
    lag: int = 0  # versions between the weights that sample and those that learn
    steps: int = 1  # of a version, on equal shares of its answers
    times: int = 1  # that an answer is learnt from
    form: str = "tapered"  # answers worse than their group weigh at most one; or "clipped"
    decay: float = 0.0  # share of the rate that is gone by the last version
    device: str = "cpu"


class Block(nn.Module):
    """Attention with rotated places, and a gated layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = 8 * width // 3 // 8 * 8
        self.norms = nn.ModuleList([nn.RMSNorm(width), nn.RMSNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width, False), nn.Linear(width, width, False)
        self.up, self.down = nn.Linear(width, 2 * inner, False), nn.Linear(inner, width, False)

    @override
    def forward(self, x: Tensor, turn: Tensor, seen: Tensor, past: list[Tensor]) -> Tensor:
        b, t, w = x.shape
        qkv = self.qkv(self.norms[0](x)).float().view(b, t, 3, 4, -1).permute(2, 0, 3, 1, 4)
        pairs = torch.view_as_complex(qkv[:2].reshape(*qkv[:2].shape[:-1], -1, 2)) * turn
        q, k = torch.view_as_real(pairs).flatten(-2)
        k, v = torch.cat([*past[:1], k], 2), torch.cat([*past[1:], qkv[2]], 2)
        past[:] = [k, v]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, w))
        gate, up = self.up(self.norms[1](x)).chunk(2, -1)
        found: Tensor = x + self.down(F.silu(gate) * up)
        return found


class Llama(nn.Module):
    """Decoder; logits (B, T, V) of tokens (B, T)."""

    def __init__(self, s: Settings) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCABULARY, s.width), nn.RMSNorm(s.width)
        self.blocks = nn.ModuleList(Block(s.width) for _ in range(s.layers))
        half = s.width // 8
        angles = torch.outer(torch.arange(4 * s.length), 1e4 ** (-torch.arange(half) / half))
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles))
        for each in self.parameters():
            if each.ndim > 1:
                nn.init.normal_(each, std=0.02)

    @override
    def forward(self, tokens: Tensor, past: list[list[Tensor]] | None = None) -> Tensor:
        """Read tokens (B, T), of which the last ones are new where there is a `past`."""
        past = [[] for _ in self.blocks] if past is None else past
        start, end = past[0][0].shape[2] if past[0] else 0, tokens.shape[1]
        full = torch.ones(end, end, dtype=torch.bool, device=tokens.device)
        seen = ((tokens != PAD)[:, None, None] & full.tril()[start:]) | (full.tril() & full.triu())[
            start:
        ]
        x, turn = self.embed(tokens[:, start:]), self.get_buffer("turns")[start:end]
        for block, own in zip(self.blocks, past, strict=True):
            x = block(x, turn, seen, own)
        return F.linear(self.norm(x), self.embed.weight)


def problems(count: int, s: Settings, draws: torch.Generator, longest: int = 0) -> Tensor:
    """Prompts (N, length + 1): digits and a colon, padded on the left; some only to `longest`."""
    digits = torch.randint(10, (count, s.length), generator=draws)
    sizes = torch.randint(3, (longest or s.length) + 1, (count, 1), generator=draws)
    digits[torch.arange(s.length) < s.length - sizes] = PAD
    return torch.cat([digits, torch.full((count, 1), COLON)], 1).to(s.device)


def right(prompts: Tensor) -> Tensor:
    """Right answers (N, length + 1): the digits in order, the end, and padding."""
    digits = prompts[:, :-1].sort(1).values  # padding comes last
    answers = torch.cat([digits, torch.full_like(prompts[:, :1], PAD)], 1)
    return answers.scatter(1, (digits != PAD).sum(1, keepdim=True), END)


@torch.no_grad()
def answer(model: Llama, prompts: Tensor, draws: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Answers (N, A) and their tokens' log-probabilities; the likeliest ones without `draws`."""
    past: list[list[Tensor]] = [[] for _ in model.blocks]
    tokens, said = prompts, list[Tensor]()
    for _ in range(prompts.shape[1]):
        shares = model(tokens, past)[:, -1].log_softmax(-1)
        noise = (
            0 * shares if draws is None else torch.rand(shares.shape, generator=draws).to(shares)
        )
        token = (shares if draws is None else shares - (-noise.log()).log()).argmax(
            -1, keepdim=True
        )
        tokens, said = torch.cat([tokens, token], 1), [*said, shares.gather(1, token)]
    return tokens[:, prompts.shape[1] :], torch.cat(said, 1)


def correct(tokens: Tensor, prompts: Tensor) -> Tensor:
    """One for a right answer (N, A), up to its end, else zero."""
    wanted = right(prompts)
    return ((tokens == wanted) | (wanted == PAD)).all(1).float()


def solved(model: Llama, s: Settings, count: int = 1024) -> float:
    """Share of held-out problems that the likeliest answer solves."""
    held = problems(count, s, torch.Generator().manual_seed(10**6))
    return float(correct(answer(model, held, None)[0], held).mean())


def stepped(model: Llama, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """Make one step of the optimiser."""
    torch.autograd.backward(loss)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def warmed(s: Settings, seed: int) -> Llama:
    """Model after supervised steps on short problems alone."""
    torch.manual_seed(seed)
    model, draws = Llama(s).to(s.device), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), s.warm_lr, betas=(0.9, 0.95))
    for step in range(s.warm_steps):
        optimizer.param_groups[0]["lr"] = s.warm_lr * max(0.05, 1 - step / s.warm_steps)
        asked = problems(64, s, draws, s.warm_length)
        whole = torch.cat([asked, right(asked)], 1)
        logits, wanted = model(whole[:, :-1])[:, s.length :], whole[:, s.length + 1 :]
        stepped(model, optimizer, F.cross_entropy(logits.transpose(1, 2), wanted, ignore_index=PAD))
    return model


def objective(
    model: Llama,
    s: Settings,
    asked: Tensor,
    tokens: Tensor,
    said: Tensor,
    gain: Tensor,
    part: Tensor,
) -> Tensor:
    """Loss of a part of a version's answers, of which `said` are the log-probabilities."""
    asked, tokens, said, gain = asked[part], tokens[part], said[part], gain[part]
    ends = tokens == END
    counted = (ends.cumsum(1) - ends.int() == 0).float()
    logits = model(torch.cat([asked, tokens[:, :-1]], 1))[:, s.length :]
    new = logits.log_softmax(-1).gather(2, tokens[..., None])[..., 0]
    log_ratio = (new - said) * counted
    if s.form == "clipped":
        ratio = log_ratio.exp().clamp(max=4.0)  # of an answer worse than its group
        kept = torch.min(ratio * gain, ratio.clamp(1 - s.clip[0], 1 + s.clip[1]) * gain)
    else:
        weight = log_ratio.sum(1, keepdim=True).exp().clamp(max=1.0).detach()
        kept = torch.where(gain > 0, gain, weight * gain) * new
    size = counted.sum() if s.mean == "tokens" else counted.numel()
    loss: Tensor = -(kept * counted).sum() / size
    return loss


def taught(model: Llama, s: Settings, seed: int) -> Iterator[tuple[int, float, float]]:
    """Learn by rewards; yields version, share of right answers, share of groups with signal."""
    optimizer = torch.optim.AdamW(model.parameters(), s.lr, betas=(0.9, 0.95), weight_decay=0.0)
    draws, old = torch.Generator().manual_seed(seed + 77), [copy.deepcopy(model)]
    for version in range(1, s.versions + 1):
        optimizer.param_groups[0]["lr"] = s.lr * (1 - s.decay * (version - 1) / s.versions)
        asked = problems(s.problems, s, draws).repeat_interleave(s.group, 0)
        tokens, said = answer(old[0], asked, draws)
        rewards = correct(tokens, asked).view(-1, s.group)
        gain = rewards - rewards.mean(1, keepdim=True)
        gain = (gain / (rewards.std(1, keepdim=True) + 1e-6) if s.scaled else gain).view(-1, 1)
        order = torch.randperm(len(tokens), generator=draws).to(s.device)
        for part in order.repeat(s.times).chunk(s.steps):
            stepped(model, optimizer, objective(model, s, asked, tokens, said, gain, part))
        old = [*old, copy.deepcopy(model)][-1 - s.lag :]
        yield version, float(rewards.mean()), float((rewards.std(1) > 0).float().mean())
