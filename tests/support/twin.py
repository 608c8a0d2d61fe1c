"""Slow twins, written straight from the paper with torch.autograd: one dict per parameter, no shared code.

Algorithm 1:  w ← w − α ∇[L(w) + ρ ⟨(∇L(w))², (f + δ)⁻¹⟩],  then  f ← (1 − β) f + β (∇L(w))².
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def penalised_gradient(loss: Tensor, params: list[Tensor], f: list[Tensor] | None, rho, delta):
    """∇L and ∇[L + ρT] with f constant; f = None stands for the first squared gradient."""
    g = torch.autograd.grad(loss, params, create_graph=True)
    f = [x.detach() ** 2 for x in g] if f is None else f
    T = sum(r * (x**2 / (y + d)).sum() for x, y, r, d in zip(g, f, each(rho, params), each(delta, params), strict=True))
    total = torch.autograd.grad(loss + T, params)
    return [x.detach() for x in g], list(total), f


def each(value, params: list[Tensor]) -> list:
    """One for each parameter, which is what a list holds."""
    return value if isinstance(value, list) else [value] * len(params)


def filled(params: list[Tensor], f0) -> list[Tensor]:
    """f₀, where it is a number."""
    return [torch.full_like(p, x) for p, x in zip(params, each(f0, params), strict=True)]


# The updates: `step` is Algorithm 1, `update` what it does once the gradients are there.


class SGDTwin:
    def __init__(
        self,
        params,
        lr,
        momentum=0.0,
        dampening=0.0,
        nesterov=False,
        weight_decay=0.0,
        maximize=False,
        rho=0.0,
        beta=0.1,
        delta=1e-2,
        f0=None,
    ):
        self.params, self.momentum, self.dampening = list(params), momentum, dampening
        self.lr, self.weight_decay = lr, weight_decay  # of all parameters, or one for each in a list
        self.nesterov, self.sign = nesterov, -1.0 if maximize else 1.0
        self.rho, self.beta, self.delta = rho, beta, delta
        self.f = None if f0 is None else filled(self.params, f0)
        self.buffers = None

    def average(self, F):
        return F if self.f is None else self.f

    def step(self, loss: Tensor) -> None:
        # To maximise L with a penalty is to minimise −L with the same penalty.
        g, total, _ = penalised_gradient(self.sign * loss, self.params, self.f, self.rho, self.delta)
        self.update(total, g, [x**2 for x in g])

    def update(self, total, g, F, in_parts=False) -> None:
        decay = each(self.weight_decay, self.params)
        d = [t + w * p.detach() for t, w, p in zip(total, decay, self.params, strict=True)]
        if self.momentum:
            if self.buffers is None:
                self.buffers = [x.clone() for x in d]
            else:
                self.buffers = [
                    self.momentum * b + (1 - self.dampening) * x for b, x in zip(self.buffers, d, strict=True)
                ]
            d = [x + self.momentum * b for x, b in zip(d, self.buffers, strict=True)] if self.nesterov else self.buffers
        self.f = followed(self.average(F), F, self.beta)
        with torch.no_grad():
            for p, lr, x in zip(self.params, each(self.lr, self.params), d, strict=True):
                p -= lr * x


def followed(f, F, beta):
    """f ← (1 − β) f + β F."""
    return [(1 - b) * y + b * x for x, y, b in zip(F, f, each(beta, f), strict=True)]


class AdamTwin:
    def __init__(
        self,
        params,
        lr,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.0,
        decoupled=False,
        maximize=False,
        rho=0.0,
        delta=1e-2,
        f0=None,
        second_moment="total",
    ):
        self.second_moment = second_moment
        self.params, self.betas, self.eps = list(params), betas, eps
        self.lr, self.weight_decay = lr, weight_decay  # of all parameters, or one for each in a list
        self.decoupled, self.sign = decoupled, -1.0 if maximize else 1.0
        self.rho, self.delta, self.f0, self.t = rho, delta, f0, 0
        self.m = [torch.zeros_like(p) for p in self.params]
        self.v = [torch.zeros_like(p) for p in self.params]

    def f(self):
        if self.f0 is not None:  # the average that was started at f0
            return [v + self.betas[1] ** self.t * x for v, x in zip(self.v, each(self.f0, self.params), strict=True)]
        return None if self.t == 0 else [v / (1 - self.betas[1] ** self.t) for v in self.v]

    def average(self, F):
        f = self.f()
        return F if f is None else f

    def step(self, loss: Tensor) -> None:
        g, total, _ = penalised_gradient(self.sign * loss, self.params, self.f(), self.rho, self.delta)
        self.update(total, g, None)

    def update(self, total, g, F, in_parts=False) -> None:
        """F of a batch in parts is the second moment's; else it is of what the first moment averages, or of ∇L."""
        self.t += 1
        b1, b2 = self.betas
        with torch.no_grad():
            numbers = zip(self.params, each(self.lr, self.params), each(self.weight_decay, self.params), strict=True)
            for i, (p, lr, decay) in enumerate(numbers):
                ridge = 0.0 if self.decoupled else decay * p
                if self.decoupled:
                    p -= lr * decay * p
                self.m[i] = b1 * self.m[i] + (1 - b1) * (total[i] + ridge)
                seen = g[i] if self.second_moment == "loss" else total[i]
                self.v[i] = b2 * self.v[i] + (1 - b2) * (F[i] if in_parts else (seen + ridge) ** 2)
                m, v = self.m[i] / (1 - b1**self.t), self.v[i] / (1 - b2**self.t)
                p -= lr * m / (v.sqrt() + self.eps)


class BaseTwin:
    """Feeds the penalised gradient to a torch optimiser."""

    def __init__(self, base, rho=0.0, beta=0.1, delta=1e-2, f0=None):
        self.base, self.rho, self.beta, self.delta = base, rho, beta, delta
        self.params = [p for group in base.param_groups for p in group["params"]]
        self.f = None if f0 is None else filled(self.params, f0)

    def average(self, F):
        return F if self.f is None else self.f

    def step(self, loss):
        g, total, _ = penalised_gradient(loss, self.params, self.f, self.rho, self.delta)
        self.update(total, g, [x**2 for x in g])

    def update(self, total, g, F, in_parts=False):
        self.f = followed(self.average(F), F, self.beta)
        for p, x in zip(self.params, total, strict=True):
            p.grad = x
        self.base.step()


# What is added to ∇L, given f: functions of the loss (which may be asked for again), the parameters, ∇L, f, ρ and δ.


def gradient(loss_of: Callable[[], Tensor], params, displacement=None, factor=1.0):
    """∇L at the weights, or at a distance from them."""
    start = [p.detach().clone() for p in params]
    with torch.no_grad():
        for p, e in zip(params, displacement or (), strict=False):
            p += factor * e
    g = torch.autograd.grad(loss_of(), params)
    with torch.no_grad():
        for p, s in zip(params, start, strict=True):
            p.copy_(s)
    return list(g)


def norm(xs) -> Tensor:
    return sum((x**2).sum() for x in xs) ** 0.5


def exactly(loss_of, params, g, f, rho, delta):
    """ρ∇T by differentiating twice."""
    _, total, _ = penalised_gradient(loss_of(), params, f, rho, delta)
    return [t - x for t, x in zip(total, g, strict=True)]


def by_difference(radius, central):
    """ρ∇T = 2 H u with u = ρ ∇L/(f + δ), from gradients `radius` away along u."""

    def added(loss_of, params, g, f, rho, delta):
        u = [r * x / (y + d) for x, y, r, d in zip(g, f, rho, delta, strict=True)]
        if not norm(u):
            return [torch.zeros_like(x) for x in g]
        step = [radius * x / norm(u) for x in u]
        ahead = gradient(loss_of, params, step)
        behind = gradient(loss_of, params, step, -1.0) if central else g
        return [2 * (a - b) * norm(u) / (radius * (2 if central else 1)) for a, b in zip(ahead, behind, strict=True)]

    return added


def sharpness(adaptive=False, eta=0.01):
    """∇L(w + e) − ∇L(w), with e = ρ ∇L/‖∇L‖, or for ASAM e = ρ T²∇L/‖T∇L‖ where T = |w| + η."""

    def added(loss_of, params, g, f, rho, delta):
        T = [p.detach().abs() + eta if adaptive else torch.ones_like(p) for p in params]
        length = norm([t * x for t, x in zip(T, g, strict=True)])
        e = [r * t**2 * x / length for t, x, r in zip(T, g, rho, strict=True)]
        return [a - x for a, x in zip(gradient(loss_of, params, e), g, strict=True)]

    return added


class Twin:
    """A step with all that may be asked of it.

    Args:
        updates: One of the twins above, whose `update` is made.
        added: What is added to the gradient.
        rho, delta: Of all parameters, or one for each in a list.
        interval: Only every so many steps; between them the last again, times `reuse` in each.
        clip: Bounds for the total, or for the gradient of the loss.
        sign: −1 to maximise.
    """

    def __init__(self, updates, added, *, rho, delta=0.0, interval=1, reuse=None, clip=None, sign=1.0):
        self.updates, self.added, self.params = updates, added, updates.params
        self.rho, self.delta = each(rho, self.params), each(delta, self.params)
        self.interval, self.reuse, self.clip, self.sign = interval, reuse, clip, sign
        self.count, self.last = 0, None

    def step(self, losses: list[tuple[float, Callable[[], Tensor]]]) -> None:
        """Of a batch in parts, each with its share of the whole and a penalty of its own."""
        shares = [share for share, _ in losses]
        losses = [lambda loss_of=loss_of: self.sign * loss_of() for _, loss_of in losses]
        gs = [gradient(loss_of, self.params) for loss_of in losses]
        g = mean(gs, shares)
        F = mean([[x**2 for x in part] for part in gs], shares)
        f = self.updates.average(F)
        since = self.count % self.interval
        if since == 0 and any(self.rho):
            parts = [
                self.added(loss_of, self.params, part, f, self.rho, self.delta)
                for loss_of, part in zip(losses, gs, strict=True)
            ]
            added = self.last = mean(parts, shares)
        elif self.reuse is not None and self.last is not None:
            added = [self.reuse**since * x for x in self.last]
        else:
            added = [torch.zeros_like(x) for x in g]
        self.updates.update(self.clipped(g, added), g, F, in_parts=len(losses) > 1)
        self.count += 1

    def clipped(self, g, added):
        total = [x + a for x, a in zip(g, added, strict=True)]
        if self.clip is None:
            return total
        if self.clip.of == "loss":
            return [x + a for x, a in zip(bounded(g, self.clip), added, strict=True)]
        return bounded(total, self.clip)


def bounded(xs, clip):
    """As torch's `clip_grad_norm_` and `clip_grad_value_` have it."""
    if clip.norm is not None:
        factor = min(1.0, clip.norm / (float(norm(xs)) + 1e-6))
        xs = [factor * x for x in xs]
    return xs if clip.value is None else [x.clamp(-clip.value, clip.value) for x in xs]


def mean(parts, shares):
    return [sum(share * x for share, x in zip(shares, xs, strict=True)) for xs in zip(*parts, strict=True)]
