"""An estimator's value on a case, and the truth to compare it with."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from gtracer import SGDTracer
from gtracer import curvature as c


def evaluate(case, estimator, differentiable=False):
    with c.Recording(case.model) as recording:
        output = case.model(case.x)
    losses = case.loss(output, case.y, reduction="none").reshape(len(case.y), -1).mean(1)
    loss = case.loss(output, case.y)
    return estimator(c.Evaluation(loss, case.params, recording, differentiable=differentiable, losses=losses))


def example_squares(case):
    """mean_i g_i², one example at a time."""
    n = len(case.y)
    g = [torch.autograd.grad(case.example(i), case.params) for i in range(n)]
    return [sum(gi[j] ** 2 for gi in g) / n for j in range(len(case.params))]


def refusal(model, curvature, x, loss=cross_entropy, y=None, **options):
    opt = SGDTracer(model.parameters(), lr=0.1, curvature=curvature, model=model, **options)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match="use |pass ") as caught:
        opt.step(lambda: loss(model(x), torch.zeros(len(x), dtype=torch.long) if y is None else y))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    return str(caught.value)


def weights_function(case, function):
    """A function of the model's output as one of all weights in one vector."""
    shapes = [(name, p.shape, p.numel()) for name, p in case.model.named_parameters()]

    def of(w):
        parts = w.split([size for _, _, size in shapes])
        named = {name: part.reshape(shape) for (name, shape, _), part in zip(shapes, parts, strict=True)}
        return function(torch.func.functional_call(case.model, named, (case.x,)))

    return of, torch.cat([p.detach().flatten() for p in case.params])


def diagonal(case, matrix):
    """The diagonal of a dense matrix, cut into the parameters' shapes."""
    parts = matrix.diagonal().split([p.numel() for p in case.params])
    return [part.reshape(p.shape) for part, p in zip(parts, case.params, strict=True)]
