"""What a recording of a model's layers refuses, by name, and that nothing of it stays."""

import pytest
import torch
from torch import nn

from gtracer import SGDTracer, TracerPenalty
from gtracer import curvature as c
from support.estimates import refusal
from support.networks import make, mlp


def test_hooks_and_graphs_are_gone_after_a_step():
    made = make(mlp)
    opt = SGDTracer(made.params, lr=0.1, curvature=c.per_example, model=made.model)
    opt.step(made.loss_of)
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in made.model.modules())
    assert not any(p.grad.requires_grad for p in made.params)


def test_the_penalty_forgets_its_recording():
    made = make(mlp)
    penalty = TracerPenalty(made.params, curvature=c.per_example, model=made.model)
    penalty(made.loss_of())
    assert penalty._recording.calls == []
    with torch.no_grad():
        made.model(made.x)
    assert penalty._recording.calls == []


def test_batch_norm_is_refused_by_name():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False))
    with pytest.raises(ValueError, match=r"layer '1' \(BatchNorm1d\).*GroupNorm.*micro_batch"):
        SGDTracer(model.parameters(), lr=0.1, curvature=c.per_example, model=model)
    model.eval()
    opt = SGDTracer(model.parameters(), lr=0.1, curvature=c.per_example, model=model)
    model.train()
    with pytest.raises(ValueError, match="BatchNorm1d"):
        opt.step(lambda: model(torch.randn(3, 4)).square().mean())


def test_a_layer_used_twice_is_refused_by_name():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x):
            return self.inner(torch.tanh(self.inner(x)))

    assert "layer 'inner' are used twice" in refusal(Twice(), c.per_example, torch.randn(3, 4))


def test_tied_weights_are_refused_by_name():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    assert "layer '1' are used twice in one pass (the other time in layer '0')" in refusal(
        model, c.per_example, torch.randn(3, 4)
    )


def test_batch_not_first_is_refused_by_name():
    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 3)

        def forward(self, x):
            return self.inner(x.transpose(0, 1)).mean(0)

    assert "layer 'inner' (Linear) was given a tensor of shape (5, 3, 4)" in refusal(
        Turned(), c.per_example, torch.randn(3, 5, 4)
    )


def test_random_numbers_inside_a_layer_are_refused_by_name():
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return nn.functional.dropout(x * self.scale, 0.5)

    assert "layer '1' (Noisy) cannot be taken example by example" in refusal(
        nn.Sequential(nn.Linear(4, 4), Noisy()), c.per_example, torch.randn(3, 4)
    )


def test_an_embedding_that_mixes_examples_is_refused_by_name():
    model = nn.Sequential(nn.Embedding(5, 4, scale_grad_by_freq=True), nn.Flatten(), nn.Linear(8, 3))
    with pytest.raises(ValueError, match=r"layer '0' \(Embedding\) has max_norm or scale_grad_by_freq"):
        SGDTracer(model.parameters(), lr=0.1, curvature=c.per_example, model=model)


def test_a_model_that_the_closure_does_not_call_is_refused():
    used, other = nn.Linear(4, 3), nn.Linear(4, 3)
    params = [*used.parameters(), *other.parameters()]
    opt = SGDTracer(params, lr=0.1, curvature=c.per_example, model=other)
    with pytest.raises(ValueError, match="model="):
        opt.step(lambda: used(torch.randn(3, 4)).square().mean())


def test_a_parameter_outside_of_the_model_is_refused():
    model, extra = nn.Linear(4, 3), nn.Parameter(torch.ones(3))
    opt = SGDTracer([*model.parameters(), extra], lr=0.1, curvature=c.per_example, model=model)
    with pytest.raises(ValueError, match=r"shape \(3,\) .* in no layer of model="):
        opt.step(lambda: (model(torch.randn(3, 4)) * extra).square().mean())
