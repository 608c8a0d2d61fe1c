"""SAM and ASAM against their papers' formulas, written out."""

import pytest
import torch

from gtracer import SAM
from support.problems import PROBLEMS, make, relative_error


class SAMTwin:
    """w ← w − α ∇L(w + e), e = ρ T² ∇L / ‖T ∇L‖ with T = 1 (SAM) or |w| + η (ASAM)."""

    def __init__(self, model, lr, rho, adaptive, eta, maximize=False):
        self.params, self.lr, self.rho = list(model.parameters()), lr, rho
        self.adaptive, self.eta, self.sign = adaptive, eta, -1.0 if maximize else 1.0

    def step(self, loss_of):
        random = torch.get_rng_state()
        g = torch.autograd.grad(self.sign * loss_of(), self.params)
        T = [p.detach().abs() + self.eta if self.adaptive else torch.ones_like(p) for p in self.params]
        norm = sum(((t * x) ** 2).sum() for t, x in zip(T, g, strict=True)).sqrt()
        start = [p.detach().clone() for p in self.params]
        with torch.no_grad():
            for p, t, x in zip(self.params, T, g, strict=True):
                p += self.rho * t**2 * x / norm
        torch.set_rng_state(random)
        g = torch.autograd.grad(self.sign * loss_of(), self.params)
        with torch.no_grad():
            for p, w, x in zip(self.params, start, g, strict=True):
                p.copy_(w - self.lr * x)


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize(("adaptive", "rho"), [(False, 0.05), (True, 0.5)])
@pytest.mark.parametrize("maximize", [False, True])
def test_against_the_formula(problem, adaptive, rho, maximize):
    ours, twins = make(problem), make(problem)
    base = torch.optim.SGD(ours.model.parameters(), 0.05, maximize=maximize)
    opt = SAM(base, rho=rho, adaptive=adaptive, eta=0.02)
    twin = SAMTwin(twins.model, 0.05, rho, adaptive, 0.02, maximize)
    for i in range(6):
        torch.manual_seed(i)
        opt.step(lambda i=i: ours.loss_of(i))
        torch.manual_seed(i)
        twin.step(lambda i=i: twins.loss_of(i))
        assert relative_error(ours.weights(), twins.weights()) < 1e-12


def test_vanished_gradient():
    w = torch.nn.Parameter(torch.zeros(2))
    SAM(torch.optim.SGD([w], 0.1), rho=0.1).step(lambda: (w**2).sum())
    assert torch.equal(w.detach(), torch.zeros(2))
