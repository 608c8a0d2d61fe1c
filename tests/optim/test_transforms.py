"""Clipping against torch's own functions, on gradients that are given."""

import pytest
import torch
from torch import nn

from gtracer import Clip
from gtracer.optim.step import Slice, Step
from gtracer.optim.transforms import transforms_of

LOSS = [torch.tensor([3.0, -4.0], dtype=torch.float64), torch.tensor([[12.0]], dtype=torch.float64)]
PENALTY = [torch.tensor([0.5, 1.0], dtype=torch.float64), torch.tensor([[-2.0]], dtype=torch.float64)]


def made_step():
    """With ∇L as its gradients, and ∇L + ρ∇T in `.grad`."""
    params = [nn.Parameter(torch.zeros_like(g)) for g in LOSS]
    step = Step([Slice({}, {}, params, [g.clone() for g in LOSS])], None, due=True)
    step.total = [g + h for g, h in zip(LOSS, PENALTY, strict=True)]
    return step


def clipped_by_torch(gradients, clip):
    """What is left of these, by torch's functions."""
    params = [nn.Parameter(torch.zeros_like(g)) for g in gradients]
    for p, g in zip(params, gradients, strict=True):
        p.grad = g.clone()
    if clip.norm is not None:
        nn.utils.clip_grad_norm_(params, clip.norm)
    if clip.value is not None:
        nn.utils.clip_grad_value_(params, clip.value)
    return [p.grad for p in params]


@pytest.mark.parametrize(
    "clip", [Clip(norm=2.0), Clip(value=3.0), Clip(norm=10.0, value=2.5), Clip(norm=99.0)], ids=str
)
def test_the_total_is_clipped(clip):
    step = made_step()
    clip(step, None)
    torch.testing.assert_close(step.total, clipped_by_torch(made_step().total, clip))
    torch.testing.assert_close(step.gradients, LOSS, rtol=0, atol=0)  # f learns from these


@pytest.mark.parametrize("clip", [Clip(norm=2.0, of="loss"), Clip(value=3.0, of="loss")], ids=str)
def test_the_gradient_of_the_loss_is_clipped_before_the_penalty_is_added(clip):
    step = made_step()
    clip(step, None)
    expected = [g + h for g, h in zip(clipped_by_torch(LOSS, clip), PENALTY, strict=True)]
    torch.testing.assert_close(step.total, expected)
    torch.testing.assert_close(step.gradients, LOSS, rtol=0, atol=0)


def test_what_one_factor_does():
    assert [Clip(norm=1.0).is_one_factor, Clip(value=1.0).is_one_factor, Clip(norm=1.0, of="loss").is_one_factor] == [
        True,
        False,
        False,
    ]


def test_clipping_comes_first():
    def other(step, damped):
        raise AssertionError

    clip = Clip(norm=1.0)
    assert transforms_of(clip, [other]) == (clip, other)
    assert transforms_of(None, (other,)) == (other,)
    assert transforms_of(None) == ()


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (lambda: Clip(), "Clip needs norm or value"),
        (lambda: Clip(norm=0.0), "norm must be"),
        (lambda: Clip(value=-1.0), "value must be"),
        (lambda: Clip(norm=1.0, of="penalty"), "of must be"),
        (lambda: transforms_of(1.0), "clip must be"),
        (lambda: transforms_of(None, Clip(norm=1.0)), "transforms must be a list"),
        (lambda: transforms_of(None, [Clip]), "transforms must be a list"),
        (lambda: transforms_of(None, [1.0]), "transforms must be a list"),
    ],
)
def test_refusals(made, why):
    with pytest.raises(ValueError, match=why):
        made()
