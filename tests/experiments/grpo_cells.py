"""Many runs of `grpo_reference` at once, each with its own weights, objective and rate, since
small models wait for launches on a card. Draws and warm models are the reference's.

Shapes: C runs, B answers, T tokens, P parameters of a model.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.experiments.grpo_reference import END, PAD, VOCABULARY, Settings, problems, right

HEADS = 4
KINDS = ("token", "sequence", "prefix", "mean", "traced", "none")


class Way(NamedTuple):
    """A form of the learner, beside the settings that all runs of a batch share."""

    lr: float = 4e-4
    lag: int = 0
    kind: str = "token"  # importance weight of tokens of better answers
    kind_worse: str = "token"  # and of worse ones
    low: float = 0.8  # tokens of worse answers below, and of better ones above, are left out
    high: float = 1.28
    most: float = 1e9  # largest weight in better answers
    most_worse: float = 4.0
    over_worse: bool = True  # a token of a worse answer above its largest weight is left out
    baseline: float = 0.0  # 1: the group's mean under the learning weights
    second: float = 0.0  # bound of the mean squared logarithm of a batch's ratios (M2PO)
    trust: float = 0.0  # mean squared logarithm above which the rate shrinks
    drop: float = 0.0  # answers whose ratio is further than this from one, as a logarithm
    beta1: float = 0.9
    beta2: float = 0.95
    decay: float = 0.0  # share of the rate that is lost by the end
    warmup: int = 0  # versions
    eps: float = 1e-8


class Cells:
    """Models of C runs."""

    def __init__(
        self, s: Settings, ways: list[tuple[Way, int]], warm: dict[int, dict[str, Tensor]]
    ) -> None:
        self.s, self.ways, self.seeds = s, ways, sorted({seed for _, seed in ways})
        self.shapes = {name: each.shape for name, each in warm[self.seeds[0]].items()}
        flat = {
            seed: torch.cat([each.reshape(-1) for each in warm[seed].values()])
            for seed in self.seeds
        }
        self.flat = torch.stack([flat[seed] for _, seed in ways]).to(s.device)
        self.own = torch.tensor([self.seeds.index(seed) for _, seed in ways], device=s.device)
        self.columns: dict[tuple[str, float], Tensor] = {}
        self.kinds = [
            torch.tensor([KINDS.index(getattr(way, name)) for way, _ in ways], device=s.device)
            for name in ("kind", "kind_worse")
        ]
        half = s.width // 8
        angles = torch.outer(torch.arange(4 * s.length), 1e4 ** (-torch.arange(half) / half))
        self.cos, self.sin = angles.cos().to(s.device), angles.sin().to(s.device)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        found, at = {}, 0
        for name, shape in self.shapes.items():
            found[name] = flat[:, at : at + shape.numel()].view(-1, *shape)
            at += shape.numel()
        return found

    def turned(self, x: Tensor, start: int, end: int) -> Tensor:
        """Rotate (N, H, T, D) by places."""
        pair = x.reshape(*x.shape[:-1], -1, 2)
        a, b = pair[..., 0], pair[..., 1]
        cos, sin = self.cos[start:end], self.sin[start:end]
        return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)

    def forward(
        self, p: dict[str, Tensor], tokens: Tensor, start: int = 0, past: Tensor | None = None
    ) -> Tensor:
        """Logits (C, B, T - start, V); `past` (layers, 2, C * B, H, T, D) is filled."""
        c, b, end = tokens.shape
        w, t = self.s.width, end - start
        causal = torch.ones(end, end, dtype=torch.bool, device=tokens.device).tril()
        eye = torch.eye(end, dtype=torch.bool, device=tokens.device)
        seen = ((tokens != PAD).view(c * b, 1, 1, end) & causal[start:]) | eye[start:]
        hot = F.one_hot(tokens[:, :, start:], VOCABULARY).to(p["embed.weight"].dtype)
        x = hot.view(c, b * t, VOCABULARY) @ p["embed.weight"]

        def norm(x: Tensor, name: str) -> Tensor:
            return F.rms_norm(x, (w,)) * p[name][:, None]

        def linear(x: Tensor, name: str) -> Tensor:
            return x @ p[name].transpose(1, 2)

        for n in range(self.s.layers):
            at = f"blocks.{n}."
            qkv = linear(norm(x, at + "norms.0.weight"), at + "qkv.weight")
            q, k, v = qkv.view(c * b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
            q, k = self.turned(q, start, end), self.turned(k, start, end)
            if past is not None:
                past[n, 0, :, :, start:end], past[n, 1, :, :, start:end] = k, v
                k, v = past[n, 0, :, :, :end], past[n, 1, :, :, :end]
            q = q * q.shape[-1] ** -0.5
            if t == 1:
                scores = (q * k).sum(-1)[:, :, None]
            else:
                scores = q @ k.transpose(-1, -2)
            shares = scores.masked_fill(~seen, -1e9).softmax(-1)
            y = (shares.transpose(-1, -2) * v).sum(2, keepdim=True) if t == 1 else shares @ v
            x = x + linear(y.transpose(1, 2).reshape(c, b * t, w), at + "out.weight")
            gate, up = linear(norm(x, at + "norms.1.weight"), at + "up.weight").chunk(2, -1)
            x = x + linear(F.silu(gate) * up, at + "down.weight")
        x = norm(x, "norm.weight") @ p["embed.weight"].transpose(1, 2)
        return x.view(c, b, t, VOCABULARY)

    @torch.no_grad()
    def answer(self, flat: Tensor, prompts: Tensor, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        """Answers (C, B, A) and their log-probabilities; the likeliest ones without noise."""
        p, (c, b, size) = self.views(flat), prompts.shape
        depth = self.s.width // HEADS
        past = flat.new_zeros(self.s.layers, 2, c * b, HEADS, 2 * size, depth)
        tokens, said, start = prompts, [], 0
        for place in range(size):
            shares = self.forward(p, tokens, start, past)[:, :, -1].log_softmax(-1)
            start = tokens.shape[2]
            drawn = shares if noise is None else shares - (-noise[place].log()).log()
            token = drawn.argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, token], 2)
            said.append(shares.gather(2, token))
        return tokens[:, :, size:], torch.cat(said, 2)

    def solved(self, flat: Tensor, count: int = 1024) -> list[float]:
        """Shares of held-out problems that the likeliest answers solve."""
        held = problems(count, self.s, torch.Generator().manual_seed(10**6))
        found = []
        for start in range(0, len(flat), 15):
            part = flat[start : start + 15]
            asked = held.expand(len(part), *held.shape)
            rows = correct(self.answer(part, asked, None)[0], asked).mean(1)
            found += rows.tolist()
        return found

    def column(self, name: str, dims: int = 3, none: float = 0.0) -> Tensor:
        """Return a setting of each run, with `none` in the place of zero."""
        key = (name, none)
        if key not in self.columns:
            values = [float(getattr(way, name)) or none for way, _ in self.ways]
            self.columns[key] = torch.tensor(values, device=self.s.device)
        return self.columns[key].view(-1, *[1] * (dims - 1))


def correct(tokens: Tensor, prompts: Tensor) -> Tensor:
    wanted = right(prompts.reshape(-1, prompts.shape[-1])).view_as(prompts)
    return ((tokens == wanted) | (wanted == PAD)).all(-1).float()


def gains(cells: Cells, rewards: Tensor, whole: Tensor) -> Tensor:
    """Advantages (C, B) from rewards and the log ratios of whole answers (C, B)."""
    grouped = rewards.view(len(rewards), -1, cells.s.group)
    weights = whole.clamp(-5, 5).exp().view_as(grouped)
    now = (weights * grouped).sum(-1, keepdim=True) / weights.sum(-1, keepdim=True)
    mix = cells.column("baseline")
    signal = grouped.amax(-1, keepdim=True) > grouped.amin(-1, keepdim=True)
    mean = grouped.mean(-1, keepdim=True)
    return ((grouped - mean - mix * (now - mean)) * signal).view_as(rewards)


def within(cells: Cells, log_ratio: Tensor, gain: Tensor, counted: Tensor) -> Tensor:
    """Tokens (C, B, A) that stay so that the mean squared log ratio is within `second`."""
    bound = cells.column("second", none=1e9)
    moved = ((log_ratio > 0) == (gain > 0)) & (gain != 0) & (counted > 0)
    squares = (log_ratio.square() * moved).flatten(1)
    ordered = squares.sort(1).values
    mean = ordered.cumsum(1) / counted.flatten(1).sum(1, keepdim=True)
    last = (mean <= bound[..., 0]).sum(1, keepdim=True).clamp(min=1) - 1
    return (squares <= ordered.gather(1, last)).view_as(log_ratio).float()


def weighed(cells: Cells, log_ratio: Tensor, gain: Tensor, counted: Tensor) -> Tensor:
    """What multiplies the gradient of each token's log-probability (C, B, A)."""
    whole = log_ratio.sum(2, keepdim=True)
    length = counted.sum(2, keepdim=True)
    kinds = torch.stack(
        [
            log_ratio,
            whole.expand_as(log_ratio),
            log_ratio.cumsum(2),
            (whole / length).expand_as(log_ratio),
            log_ratio.clamp(max=0).cumsum(2) + log_ratio.clamp(min=0),
            0 * log_ratio,
        ]
    )
    rows = torch.arange(len(log_ratio), device=log_ratio.device)
    better, worse = (kinds[each, rows] for each in cells.kinds)
    ratio, good = log_ratio.exp(), gain > 0
    weight = better.clamp(max=20).exp().minimum(cells.column("most"))
    most = cells.column("most_worse")
    over = (worse.exp() <= most) | (cells.column("over_worse") == 0)
    weight_worse = worse.clamp(max=20).exp().minimum(most) * over
    high, low = cells.column("high"), cells.column("low")
    kept = torch.where(good, weight * (ratio < high), weight_worse * (ratio > low))
    near = whole.abs() <= cells.column("drop", none=1e9)
    return kept * near * gain * within(cells, log_ratio, gain, counted)


class Adam:
    """AdamW without decay, each run with its own rate, after a clip of the norm at one."""

    def __init__(self, cells: Cells) -> None:
        self.mean, self.square = torch.zeros_like(cells.flat), torch.zeros_like(cells.flat)
        self.count = 0
        self.b1, self.b2 = cells.column("beta1", 2), cells.column("beta2", 2)
        self.eps = cells.column("eps", 2)

    def step(self, flat: Tensor, grad: Tensor, rate: Tensor) -> Tensor:
        self.count += 1
        grad = grad * (1 / (grad.norm(dim=1, keepdim=True) + 1e-6)).clamp(max=1.0)
        self.mean.lerp_(grad, 1 - self.b1)
        self.square.mul_(self.b2).addcmul_(1 - self.b2, grad * grad)
        mean = self.mean / (1 - self.b1**self.count)
        square = self.square / (1 - self.b2**self.count)
        return flat - rate[:, None] * mean / (square.sqrt() + self.eps)


def taught(cells: Cells, every: int) -> dict[str, list[list[float]]]:
    """Learn by rewards; shares solved, and how far ratios were, by run, each so many versions."""
    s, ways = cells.s, cells.ways
    draws = [torch.Generator().manual_seed(seed + 77) for seed in cells.seeds]
    lags = torch.tensor([way.lag for way, _ in ways], device=s.device)
    depth = int(lags.max()) + 1
    ring = cells.flat.expand(depth, *cells.flat.shape).clone() if depth > 1 else None
    rows, adam = torch.arange(len(ways), device=s.device), Adam(cells)
    solved, far, square = [cells.solved(cells.flat)], [], lags.float()
    lr, decay = cells.column("lr", 1), cells.column("decay", 1)
    warmup = cells.column("warmup", 1, none=1.0)
    trust = cells.column("trust", 1, none=1e9)
    count = s.problems * s.group
    for version in range(s.versions):
        asked = torch.stack([problems(s.problems, s._replace(device="cpu"), d) for d in draws])
        noise = torch.stack(
            [
                torch.stack([torch.rand(count, VOCABULARY, generator=d) for d in draws])
                for _ in range(s.length + 1)
            ]
        )
        parts = torch.stack([torch.randperm(count, generator=d) for d in draws])
        asked = asked.to(s.device).repeat_interleave(s.group, 1)[cells.own]
        old = cells.flat if ring is None else ring[(version - lags).clamp(min=0) % depth, rows]
        noisy = noise.to(s.device)[:, cells.own]
        tokens, said = cells.answer(old, asked, noisy)
        rewards = correct(tokens, asked)
        ends = tokens == END
        counted = (ends.cumsum(2) - ends.int() == 0).float()
        parts = parts.to(s.device)[cells.own]
        for part in range(s.steps):
            flat = cells.flat.requires_grad_()
            whole = torch.cat([asked, tokens[:, :, :-1]], 2)
            logits = cells.forward(cells.views(flat), whole)[:, :, s.length :]
            new = logits.log_softmax(-1).gather(3, tokens[..., None])[..., 0]
            log_ratio = ((new - said) * counted).detach()
            gain = gains(cells, rewards, log_ratio.sum(2))[..., None]
            size = counted.numel() / len(ways)
            kept = weighed(cells, log_ratio, gain, counted) * counted
            if s.steps > 1:
                chosen = torch.zeros_like(rewards).scatter_(
                    1, parts.chunk(s.steps, 1)[part], float(s.steps)
                )
                kept = kept * chosen[..., None]
            (grad,) = torch.autograd.grad(-(kept * new).sum() / size, flat)
            square = (log_ratio.square() * counted).sum((1, 2)) / counted.sum((1, 2))
            rate = lr * (1 - decay * version / s.versions) * ((version + 1) / warmup).clamp(max=1)
            rate = rate * (trust / square.clamp(min=1e-12)).clamp(max=1)
            cells.flat = adam.step(flat.detach(), grad, rate)
        if ring is not None:
            ring[(version + 1) % depth] = cells.flat
        if (version + 1) % every == 0:
            solved.append(cells.solved(cells.flat))
            far.append(square.sqrt().tolist())
    return {
        "solved": [list(each) for each in zip(*solved, strict=True)],
        "far": [list(each) for each in zip(*far, strict=True)],
    }
