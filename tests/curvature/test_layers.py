"""Gradients per example: layer by layer where there is a formula, by torch.func elsewhere."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from gtracer import curvature as c
from gtracer import variational
from gtracer.curvature import evaluation, layers, products
from support.estimates import diagonal, evaluate, example_squares, weights_function
from support.networks import CASES, attention, conv, encoder, group_norm, make, mlp
from support.problems import relative_error


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("room", [products.ROOM, 1], ids=["whole", "in chunks"])
def test_per_example_is_the_mean_of_squared_gradients(case, room, monkeypatch):
    monkeypatch.setattr(products, "ROOM", room)
    made = make(case)
    assert relative_error(evaluate(made, c.per_example), example_squares(made)) < 1e-12


@pytest.mark.parametrize("case", CASES)
def test_of_one_example_it_is_the_square_of_its_gradient(case):
    made = make(case)
    one = type(made)(made.model, made.x[:1], made.y[:1])
    squares = [g.square() for g in torch.autograd.grad(one.loss_of(), one.params)]
    assert relative_error(evaluate(one, c.per_example), squares) < 1e-12


@pytest.mark.parametrize("case", [mlp, conv, group_norm, encoder])
def test_fast_paths_agree_with_torch_func(case, monkeypatch):
    made = make(case)
    fast = evaluate(made, c.per_example)
    monkeypatch.setattr(layers, "FAST", {})
    assert relative_error(fast, evaluate(made, c.per_example)) < 1e-12


def test_fast_paths_are_taken(monkeypatch):
    """They would agree with torch.func also if they were never used."""

    def refuse(*args):
        raise AssertionError("not a fast path")

    monkeypatch.setattr(evaluation, "vectorised_squares", refuse)
    for case in (mlp, conv, group_norm, encoder):
        evaluate(make(case), c.per_example)
    with pytest.raises(AssertionError, match="not a fast path"):
        evaluate(make(attention), c.per_example)


def test_per_example_is_what_variational_calls_the_empirical_fisher():
    made = make(mlp)
    of, w = weights_function(made, lambda out: cross_entropy(out, made.y, reduction="none"))
    assert relative_error(evaluate(made, c.per_example), diagonal(made, variational.empirical_fisher(of)(w))) < 1e-12


def test_frozen_and_unused_parameters_are_left_out():
    made = make(mlp)
    made.model[0].weight.requires_grad_(False)
    params = [p for p in made.params if p.requires_grad] + [nn.Parameter(torch.ones(2))]
    with c.Recording(made.model) as recording:
        loss = made.loss_of()
    at = c.Evaluation(loss, params, recording)
    truth = example_squares(type(made)(copy.deepcopy(made.model).requires_grad_(True), made.x, made.y))
    assert relative_error(c.per_example(at), truth[1:]) < 1e-12
    assert len(at.params) == len(params) - 1


def test_a_frozen_batch_norm_is_a_layer_like_others():
    made = make(group_norm)
    made.model[1] = nn.BatchNorm2d(4).double().eval()
    assert relative_error(evaluate(made, c.per_example), example_squares(made)) < 1e-12
