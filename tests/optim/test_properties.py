"""Over shapes, dtypes and hyper-parameters: what must hold for all of them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gtracer import AdamTracer, SGDTracer, TracerPenalty, curvature, tensors
from support.problems import relative_error
from support.twin import AdamTwin, SGDTwin

shapes = st.lists(st.lists(st.integers(0, 3), max_size=3).map(tuple), min_size=1, max_size=4)
dtypes = st.sampled_from([torch.float32, torch.float64])
seeds = st.integers(0, 2**16)
options = st.fixed_dictionaries(
    {"rho": st.floats(0, 0.05), "delta": st.floats(1e-2, 10), "beta": st.floats(0, 1)},
    optional={"f0": st.floats(0, 10)},
)
tolerance = {torch.float32: 1e-4, torch.float64: 1e-10}


def a_problem(shapes, dtype, seed):
    """Parameters of these shapes under a smooth loss that couples all of them."""
    generator = torch.Generator().manual_seed(seed)
    params = [nn.Parameter(torch.randn(s, dtype=dtype, generator=generator)) for s in shapes]
    weights = torch.randn(sum(p.numel() for p in params), dtype=dtype, generator=generator)

    def loss_of():
        flat = torch.cat([p.reshape(-1) for p in params])
        return torch.log(1 + (flat**2).sum()) + torch.tanh(flat @ weights)

    return params, loss_of


@given(shapes, dtypes, seeds, options, st.floats(1e-4, 0.1), st.floats(0, 0.95), st.booleans())
@settings(max_examples=60, deadline=None)
def test_sgd_is_its_twin(shapes, dtype, seed, options, lr, momentum, maximize):
    (ours, loss_of), (twins, twin_loss_of) = a_problem(shapes, dtype, seed), a_problem(shapes, dtype, seed)
    opt = SGDTracer(ours, lr=lr, momentum=momentum, maximize=maximize, engine="exact", **options)
    twin = SGDTwin(twins, lr=lr, momentum=momentum, maximize=maximize, **options)
    for _ in range(3):
        opt.step(loss_of)
        twin.step(twin_loss_of())
    close(ours, twins, tolerance[dtype])


@given(shapes, seeds, options, st.floats(1e-4, 0.1), st.floats(0, 0.95), st.floats(0.5, 0.999))
@settings(max_examples=60, deadline=None)
def test_adam_is_its_twin(shapes, seed, options, lr, beta1, beta2):
    (ours, loss_of), (twins, twin_loss_of) = (a_problem(shapes, torch.float64, seed) for _ in range(2))
    options = {k: v for k, v in options.items() if k != "beta"}
    opt = AdamTracer(ours, lr=lr, betas=(beta1, beta2), eps=1e-3, engine="exact", **options)
    twin = AdamTwin(twins, lr=lr, betas=(beta1, beta2), eps=1e-3, **options)
    for _ in range(3):
        opt.step(loss_of)
        twin.step(twin_loss_of())
    close(ours, twins, 1e-9)


def close(ours, twins, tolerance):
    for a, b in zip(ours, twins, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def trace_ratio(loss_of, params, delta=0.0, steps=3):
    """T after some steps of f at fixed weights that differ from step to step through the loss's scale."""
    penalty = TracerPenalty(params, rho=0.0, delta=delta, beta=0.3)
    for step in range(steps):
        penalty(loss_of(step))
    return penalty.trace_ratio.item()


@given(seeds, st.floats(1e-3, 1e3))
@settings(max_examples=40, deadline=None)
def test_trace_ratio_ignores_the_scale_of_the_loss(seed, scale):
    params, losses = several_batches(seed)
    assert trace_ratio(lambda i: scale * losses(i), params) == pytest.approx(trace_ratio(losses, params), rel=1e-9)


@given(seeds)
@settings(max_examples=40, deadline=None)
def test_trace_ratio_ignores_diagonal_scalings(seed):
    """w = s ⊙ w': the same function in other units. With δ > 0 it would not be: checked too."""
    params, losses = several_batches(seed)
    generator = torch.Generator().manual_seed(seed)
    scales = [torch.exp(torch.randn(p.shape, dtype=p.dtype, generator=generator)) for p in params]
    scaled = [nn.Parameter(p.detach() / s) for p, s in zip(params, scales, strict=True)]

    def scaled_losses(i):
        return losses(i, [p * s for p, s in zip(scaled, scales, strict=True)])

    assert trace_ratio(scaled_losses, scaled) == pytest.approx(trace_ratio(losses, params), rel=1e-9)
    assert trace_ratio(scaled_losses, scaled, delta=1.0) != pytest.approx(
        trace_ratio(losses, params, delta=1.0), rel=1e-9
    )


def several_batches(seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(4, 3), (4,), (2, 4)]
    params = [nn.Parameter(torch.randn(s, dtype=torch.float64, generator=generator)) for s in shapes]
    x = torch.randn(3, 6, 3, dtype=torch.float64, generator=generator)

    def losses(i, weights=None):
        first, bias, second = params if weights is None else weights
        return torch.tanh(torch.tanh(x[i] @ first.T + bias) @ second.T).square().mean()

    return params, losses


@given(shapes, seeds)
def test_list_algebra_is_that_of_the_long_vector(shapes, seed):
    generator = torch.Generator().manual_seed(seed)
    xs, ys = ([torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes] for _ in range(2))
    flat = torch.cat([x.reshape(-1) for x in xs]), torch.cat([y.reshape(-1) for y in ys])
    torch.testing.assert_close(tensors.norm(xs), flat[0].norm())
    torch.testing.assert_close(tensors.dot(xs, ys), flat[0] @ flat[1])


@given(st.floats(0, 1), st.floats(0, 5), seeds)
def test_average_is_a_mixture(beta, delta, seed):
    generator = torch.Generator().manual_seed(seed)
    f, F = (torch.rand(4, dtype=torch.float64, generator=generator) for _ in range(2))
    average = f.clone()
    curvature.update_average_([average], [F], beta)
    torch.testing.assert_close(average, (1 - beta) * f + beta * F)
    if delta > 0:
        assert relative_error([curvature.trace_ratio([F], [f], delta)], [(F / (f + delta)).sum()]) < 1e-12
