"""What flows through a step: the passes that are driven, and ∇L + ρ∇T put together, in closed form."""

import math

import pytest
import torch
from torch import nn

from gtracer.optim.step import Slice, Step, combine, drive, scale_of

LOSS, PENALTY = torch.tensor([3.0, 4.0], dtype=torch.float64), torch.tensor([-6.0, 8.0], dtype=torch.float64)


def made_step(**own):
    p = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    step = Step([Slice({"maximize": False}, {"rho": 0.1}, [p], [LOSS.clone()])], 1.5, due=True)
    step.penalty = [PENALTY.clone()]
    for name, value in own.items():
        setattr(step, name, value)
    return step


def test_the_gradients_at_each_place_are_sent_to_the_passes():
    def passes():
        first = yield [torch.tensor(1.0)]
        second = yield [torch.tensor(2.0)]
        return [first[0] + 10 * second[0]]

    assert drive(passes(), lambda place: [place[0] * 3]) == [torch.tensor(63.0)]


def test_passes_that_need_none():
    def passes():
        return [torch.tensor(4.0)]
        yield

    assert drive(passes(), None) == [torch.tensor(4.0)]


@pytest.mark.parametrize(
    ("most", "factor", "scale"),
    [(None, None, 1.0), (10.0, None, 1.0), (0.5, None, 0.25), (None, 0.2, 0.2), (0.5, 0.2, 0.2), (0.1, 0.2, 0.05)],
)
def test_the_penalty_is_bounded_by_the_gradient(most, factor, scale):
    """‖∇L‖ is 5 and ‖ρ∇T‖ 10: what it is multiplied by, and the total."""
    factor = None if factor is None else torch.tensor(factor, dtype=torch.float64)
    found = scale_of(factor, most, LOSS.norm(), PENALTY.norm())
    assert (1.0 if found is None else found.item()) == pytest.approx(scale)
    step = made_step(most=most, factor=factor, renewed=True)
    combine(step)
    torch.testing.assert_close(step.total, [LOSS + scale * PENALTY])
    torch.testing.assert_close(step.gradients, [LOSS])
    assert step.penalty is None
    assert step.stats.penalty_ratio == pytest.approx(scale * 2)


def test_a_penalty_that_is_used_again_is_not_scaled_again():
    step = made_step(factor=torch.tensor(0.2, dtype=torch.float64), renewed=False)
    combine(step)
    torch.testing.assert_close(step.total, [LOSS + PENALTY])


def test_without_a_penalty_the_gradient_stays():
    step = made_step(penalty=None)
    combine(step)
    torch.testing.assert_close(step.total, [LOSS])
    assert (step.stats.loss, step.stats.penalty_ratio) == (1.5, 0.0)


def test_parameters_whose_gradient_was_taken_away():
    a, b, c = (nn.Parameter(torch.zeros(1)) for _ in range(3))
    kept, gone = Slice({}, {}, [a, b], [torch.ones(1), torch.full((1,), 2.0)]), Slice({}, {}, [c], [torch.ones(1)])
    kept.curvature = [torch.full((1,), 3.0), torch.full((1,), 4.0)]
    step = Step([kept, gone], None, due=False)
    b.grad = torch.ones(1)
    step.drop_parameters_without_gradient()
    assert [(part.params, part.gradients, part.curvature) for part in step.slices] == [
        ([b], [torch.full((1,), 2.0)], [torch.full((1,), 4.0)])
    ]


def test_f_is_fed_with_squares_or_with_what_was_measured():
    part = made_step().slices[0]
    torch.testing.assert_close(part.measured, [LOSS**2])
    part.curvature = [PENALTY]
    assert part.measured == [PENALTY]
    assert [part.signed_rho, Slice({"maximize": True}, {"rho": 0.1}, [], []).signed_rho] == [0.1, -0.1]


def test_the_loss_of_a_closure_that_gives_none_is_unknown():
    assert Step([], None, due=False).loss is None
    assert Step([], 2.0, due=False).loss == torch.tensor(2.0)
    assert math.isnan(Step([], torch.tensor(math.nan), due=False).loss)
