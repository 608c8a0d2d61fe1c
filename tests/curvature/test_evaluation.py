"""What an estimator may ask of an evaluation, and what it is told that it lacks."""

import pytest
import torch
from torch import nn

from gtracer import SGDTracer
from gtracer import curvature as c
from support.networks import make, mlp


def test_a_closure_that_calls_backward_is_refused_where_the_graph_is_needed():
    made = make(mlp)
    opt = SGDTracer(made.params, lr=0.1, average=c.per_example, model=made.model)

    def closure():
        loss = made.loss_of()
        loss.backward()
        return loss

    with pytest.raises(RuntimeError, match=r"without calling backward\(\)"):
        opt.step(closure)


def test_an_evaluation_says_what_it_lacks():
    made = make(mlp)
    at = c.Evaluation(made.loss_of(), made.params)
    with pytest.raises(ValueError, match="pass model="):
        c.per_example(at)
    with pytest.raises(ValueError, match="losses one by one"):
        c.micro_batch(2)(at)


def test_a_loss_that_depends_on_nothing_is_refused():
    made = make(mlp)
    opt = SGDTracer(made.params, lr=0.1, curvature=c.per_example, engine="exact", model=made.model)
    other = nn.Parameter(torch.ones(()))
    with pytest.raises((ValueError, RuntimeError), match="none of the optimiser's parameters|model="):
        opt.step(lambda: made.model(made.x).detach().sum() * other)
