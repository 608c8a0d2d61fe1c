"""TracerPenalty: state, groups, evaluation, bad losses. (Its numbers: test_twin.)"""

import math

import pytest
import torch
from torch import nn

from gtracer import TracerPenalty
from support.problems import make, relative_error, tanh_mlp
from support.twin import SGDTwin


def test_state_dict_goes_on_alike():
    made = make(tanh_mlp)
    penalty = TracerPenalty(made.model.parameters(), rho=0.1)
    penalty(made.loss_of(0))
    other = TracerPenalty(made.model.parameters(), rho=0.7)
    other.load_state_dict(penalty.state_dict())
    assert other.param_groups[0]["rho"] == 0.1
    assert torch.equal(other(made.loss_of(1)), penalty(made.loss_of(1)))


def test_a_loaded_state_is_a_copy():
    made = make(tanh_mlp)
    penalty, other = TracerPenalty(made.model.parameters()), TracerPenalty(made.model.parameters())
    penalty(made.loss_of(0))
    other.load_state_dict(penalty.state_dict())
    before = [f.clone() for f in penalty.state.values()]
    other(made.loss_of(1))
    assert all(torch.equal(a, b) for a, b in zip(before, penalty.state.values(), strict=True))


def test_state_of_other_parameters_is_refused():
    penalty = TracerPenalty([nn.Parameter(torch.ones(2))])
    other = nn.Parameter(torch.ones(3))
    theirs = TracerPenalty([other])
    theirs(other.sum())
    with pytest.raises(ValueError, match=r"\(3,\).*\(2,\)"):
        penalty.load_state_dict(theirs.state_dict())


def test_groups_and_names():
    ours, twins = make(tanh_mlp), make(tanh_mlp)
    groups = [{"params": ours.model[0].named_parameters(), "rho": 0.02}, {"params": ours.model[2].parameters()}]
    penalty = TracerPenalty(groups, rho=0.0, delta=0.1)
    optimizer = torch.optim.SGD(ours.model.parameters(), 0.1)
    twin = SGDTwin(twins.model.parameters(), lr=0.1, rho=[0.02, 0.02, 0.0, 0.0], delta=0.1)
    for i in range(4):
        optimizer.zero_grad()
        penalty(ours.loss_of(i)).backward()
        optimizer.step()
        twin.step(twins.loss_of(i))
    assert relative_error(ours.weights(), twins.weights()) < 1e-12


def test_evaluation_leaves_loss_and_f_alone():
    made = make(tanh_mlp)
    penalty = TracerPenalty(made.model.parameters(), rho=0.5)
    with torch.no_grad():
        loss = made.loss_of(0)
        assert penalty(loss) is loss
    assert not penalty.state


def test_unused_parameters_are_passed_over():
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    penalty = TracerPenalty([used, unused], rho=0.5)
    penalty((used**2).sum()).backward()
    assert unused.grad is None
    assert unused not in penalty.state


def test_trace_ratio_is_told():
    w = nn.Parameter(torch.tensor([2.0]))
    penalty = TracerPenalty([w], rho=0.5, delta=1.0, f0=3.0)
    penalty((w**2).sum() / 2)
    assert penalty.trace_ratio.item() == 1.0  # 4 / (3 + 1)


@pytest.mark.parametrize("loss", [1.0, torch.tensor(1.0), None], ids=str)
def test_losses_without_graph(loss):
    with pytest.raises(RuntimeError, match="TracerPenalty needs"):
        TracerPenalty([nn.Parameter(torch.ones(1))])(loss)


def test_non_finite():
    w = nn.Parameter(torch.ones(2))
    penalty = TracerPenalty([w])
    penalty((w**2).sum())
    before = penalty.state[w].clone()
    with pytest.raises(FloatingPointError, match="the loss is nan"):
        penalty((w * math.nan).sum())
    assert torch.equal(penalty.state[w], before)
    penalty.nonfinite = "skip"
    assert math.isnan(penalty((w * math.nan).sum()).item())
    assert torch.equal(penalty.state[w], before)


def two_parameters(*, used=(True, True), dtype=torch.float32):
    """A penalty in two groups that has seen the parameters that are `used`, and its parameters."""
    params = [nn.Parameter(torch.tensor([2.0, 1.0], dtype=dtype)), nn.Parameter(torch.tensor([3.0], dtype=dtype))]
    penalty = TracerPenalty([{"params": params[:1], "beta": 0.3}, {"params": params[1:]}], rho=0.5, delta=0.25)
    penalty(sum((p**2).sum() for p, wanted in zip(params, used, strict=True) if wanted))
    return penalty, params


def test_loading_forgets_what_the_state_does_not_hold():
    """f of a parameter that the loaded one has never seen starts anew, and the groups' numbers are the loaded ones."""
    theirs, (first, second) = two_parameters(used=(True, False))
    ours, (mine, other) = two_parameters()
    ours.param_groups[0].update(rho=7.0, beta=0.9, delta=3.0, f0=1.0)
    ours.load_state_dict(theirs.state_dict())
    assert list(ours.state) == [mine]
    assert torch.equal(ours.state[mine], theirs.state[first])
    assert torch.equal(ours.state[mine], torch.tensor([16.0, 4.0]))  # (2w)²
    assert ours.state_dict()["param_groups"] == theirs.state_dict()["param_groups"]
    ours((other**2).sum())
    assert ours.trace_ratio.item() == pytest.approx(36 / (36 + 0.25))  # f₀ is the first squared gradient
    assert second not in theirs.state


def test_a_state_is_loaded_in_the_precision_of_the_parameters():
    theirs, _ = two_parameters()
    ours, params = two_parameters(dtype=torch.float64)
    ours.load_state_dict(theirs.state_dict())
    assert [ours.state[p].dtype for p in params] == [torch.float64] * 2
    assert ours.state[params[1]].item() == 36.0


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content["f"].pop(),  # a group fewer
        lambda content: content["f"].append([]),
        lambda content: content["f"][0].append(None),  # a parameter more, of no known shape
        lambda content: content["f"][1].clear(),
        lambda content: content["f"][1].__setitem__(0, torch.ones(2)),
    ],
    ids=["fewer groups", "more groups", "more parameters", "fewer parameters", "another shape"],
)
def test_a_refused_state_changes_nothing(change):
    penalty, params = two_parameters()
    content = penalty.state_dict()
    content["param_groups"][0]["rho"] = 9.0
    change(content)
    before = {p: f.clone() for p, f in penalty.state.items()}
    with pytest.raises(ValueError, match="this penalty has"):
        penalty.load_state_dict(content)
    assert penalty.param_groups[0]["rho"] == 0.5
    assert all(torch.equal(penalty.state[p], before[p]) for p in params)
