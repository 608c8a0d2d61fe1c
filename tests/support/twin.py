"""Slow twins, written straight from the paper with torch.autograd: one dict per parameter, no shared code.

Algorithm 1:  w ← w − α ∇[L(w) + ρ ⟨(∇L(w))², (f + δ)⁻¹⟩],  then  f ← (1 − β) f + β (∇L(w))².
"""

from __future__ import annotations

import torch
from torch import Tensor


def penalised_gradient(loss: Tensor, params: list[Tensor], f: list[Tensor] | None, rho, delta):
    """∇L and ∇[L + ρT] with f constant; f = None stands for the first squared gradient."""
    g = torch.autograd.grad(loss, params, create_graph=True)
    f = [x.detach() ** 2 for x in g] if f is None else f
    rhos = rho if isinstance(rho, list) else [rho] * len(params)
    deltas = delta if isinstance(delta, list) else [delta] * len(params)
    T = sum(r * (x**2 / (y + d)).sum() for x, y, r, d in zip(g, f, rhos, deltas, strict=True))
    total = torch.autograd.grad(loss + T, params)
    return [x.detach() for x in g], list(total), f


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
        self.params, self.lr, self.momentum, self.dampening = list(params), lr, momentum, dampening
        self.nesterov, self.weight_decay, self.sign = nesterov, weight_decay, -1.0 if maximize else 1.0
        self.rho, self.beta, self.delta = rho, beta, delta
        self.f = None if f0 is None else [torch.full_like(p, f0) for p in self.params]
        self.buffers = None

    def step(self, loss: Tensor) -> None:
        # To maximise L with a penalty is to minimise −L with the same penalty.
        g, total, f = penalised_gradient(self.sign * loss, self.params, self.f, self.rho, self.delta)
        d = [t + self.weight_decay * p.detach() for t, p in zip(total, self.params, strict=True)]
        if self.momentum:
            if self.buffers is None:
                self.buffers = [x.clone() for x in d]
            else:
                self.buffers = [
                    self.momentum * b + (1 - self.dampening) * x for b, x in zip(self.buffers, d, strict=True)
                ]
            d = [x + self.momentum * b for x, b in zip(d, self.buffers, strict=True)] if self.nesterov else self.buffers
        self.f = [(1 - self.beta) * y + self.beta * x**2 for x, y in zip(g, f, strict=True)]
        with torch.no_grad():
            for p, x in zip(self.params, d, strict=True):
                p -= self.lr * x


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
        self.params, self.lr, self.betas, self.eps = list(params), lr, betas, eps
        self.weight_decay, self.decoupled, self.sign = weight_decay, decoupled, -1.0 if maximize else 1.0
        self.rho, self.delta, self.f0, self.t = rho, delta, f0, 0
        self.m = [torch.zeros_like(p) for p in self.params]
        self.v = [torch.zeros_like(p) for p in self.params]

    def f(self):
        if self.f0 is not None:  # the average that was started at f0
            return [v + self.betas[1] ** self.t * self.f0 for v in self.v]
        return None if self.t == 0 else [v / (1 - self.betas[1] ** self.t) for v in self.v]

    def step(self, loss: Tensor) -> None:
        g, total, _ = penalised_gradient(self.sign * loss, self.params, self.f(), self.rho, self.delta)
        self.t += 1
        b1, b2 = self.betas
        with torch.no_grad():
            for i, p in enumerate(self.params):
                ridge = 0.0 if self.decoupled else self.weight_decay * p
                if self.decoupled:
                    p -= self.lr * self.weight_decay * p
                self.m[i] = b1 * self.m[i] + (1 - b1) * (total[i] + ridge)
                seen = g[i] if self.second_moment == "loss" else total[i]
                self.v[i] = b2 * self.v[i] + (1 - b2) * (seen + ridge) ** 2
                m, v = self.m[i] / (1 - b1**self.t), self.v[i] / (1 - b2**self.t)
                p -= self.lr * m / (v.sqrt() + self.eps)
