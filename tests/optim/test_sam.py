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


def test_asams_eta():
    """e = ρ T² ∇L / ‖T ∇L‖ with T = |w| + η: a weight of 0 moves by η² alone; 0.01 where nothing is said."""
    g, rho = torch.tensor([3.0, 4.0], dtype=torch.float64), 0.5
    for given, eta in (({}, 0.01), ({"eta": 0.25}, 0.25), ({"eta": 0.0}, 0.0)):
        w = torch.nn.Parameter(torch.tensor([0.0, -2.0], dtype=torch.float64))
        seen = []
        opt = SAM(torch.optim.SGD([w], lr=0.0), rho=rho, adaptive=True, **given)
        opt.step(lambda w=w, seen=seen: seen.append(w.detach().clone()) or w @ g)
        T = torch.tensor([eta, 2 + eta], dtype=torch.float64)
        torch.testing.assert_close(seen[1] - seen[0], rho * T**2 * g / (T * g).norm(), rtol=1e-12, atol=0)


def test_bad_eta():
    base = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(ValueError, match="eta"):
        SAM(base, adaptive=True, eta=-0.01)


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_an_overflow_displaces_to_nowhere(adaptive, bad):
    """With a scaler, which skips the step afterwards, and no `model=`: what batch norm sees there nobody puts back."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    opt = SAM(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.1, adaptive=adaptive)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    x, seen = torch.randn(6, 3), []
    start = [p.detach().clone() for p in model.parameters()]

    def closure():
        seen.append(model[0].weight.detach().clone())
        loss = model(x).square().mean()
        if len(seen) == 1:
            model[0].weight.register_hook(lambda g: torch.where(g == g[0, 0], bad, g))
        return loss

    opt.step(closure, scaler=scaler)
    scaler.update()
    assert len(seen) == 2
    assert seen[1].isfinite().all()
    assert all(b.isfinite().all() for b in model.buffers())
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), start, strict=True))
    assert scaler.get_scale() == 2.0**9


def test_a_gradient_whose_square_overflows():
    """Its length is infinite in float32, and 1/∞ is 0: no displacement, and no NaN in it."""
    w, seen = torch.nn.Parameter(torch.ones(2)), []
    opt = SAM(torch.optim.SGD([w], lr=0.0), rho=0.1, nonfinite="ignore")
    opt.step(lambda: seen.append(w.detach().clone()) or (w * 3e38).sum() / 2)
    assert torch.equal(seen[1], seen[0])


def test_its_rho_does_not_set_itself():
    """For all groups, for one of them, and for one that comes later."""
    here, later = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    for groups, own in (([here], {"rho": "auto"}), ([{"params": [here], "rho": "auto"}], {})):
        with pytest.raises(ValueError, match=r"rho = 'auto' is for TRACER.*pass a number, such as 0.05, or let"):
            SAM(torch.optim.SGD(groups, lr=0.1), **own)
    opt = SAM(torch.optim.SGD([here], lr=0.1))
    with pytest.raises(ValueError, match="SAM's rho is another quantity"):
        opt.add_param_group({"params": [later], "rho": "auto"})
    assert len(opt.param_groups) == len(opt.base.param_groups) == 1
