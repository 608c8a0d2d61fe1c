"""Training scripts in the style of timm's, where the optimiser says whether it wants `create_graph`.

Such a loop calls `loss.backward(create_graph=second_order)` and `optimizer.step()`, with no closure. Two ways in:
`TracerPenalty` on the loss, which any loop can add in one line, and `perturbed()` around a second pass. Neither wants
`create_graph`: the penalty makes its own graph, the second pass needs none.
"""

import torch
from torch.nn.functional import cross_entropy

from gtracer import SGDTracer, TracerPenalty


def batches(count: int = 12):
    """Made-up images."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        x = torch.randn(16, 3, 32, 32, generator=generator)
        yield x, (x.mean((1, 2, 3)) > 0).long()


def network() -> torch.nn.Module:
    """One of timm's, where it is installed."""
    torch.manual_seed(0)
    try:
        from timm import create_model

        return create_model("resnet10t", num_classes=2)
    except ImportError:
        conv, pool = torch.nn.Conv2d(3, 8, 3), torch.nn.AdaptiveAvgPool2d(1)
        return torch.nn.Sequential(conv, torch.nn.ReLU(), pool, torch.nn.Flatten(), torch.nn.Linear(8, 2))


def with_penalty() -> float:
    """The loop as it is, with one line more."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    penalty = TracerPenalty(model.parameters(), rho=1e-3, delta=1e-2)
    second_order = getattr(optimizer, "is_second_order", False)
    for x, y in batches():
        optimizer.zero_grad()
        loss = penalty(cross_entropy(model(x), y))  # the one addition
        loss.backward(create_graph=second_order)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return loss.item()


def with_second_pass() -> float:
    """First-order passes only: any layer, any attention, compiled models."""
    model = network()
    optimizer = SGDTracer(model.parameters(), lr=0.05, momentum=0.9, rho=1e-3, delta=1e-2, model=model)
    for x, y in batches():
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        with optimizer.perturbed():  # the addition
            cross_entropy(model(x), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return loss.item()


if __name__ == "__main__":
    print(f"penalty in the loss: {with_penalty():.3f}; second pass: {with_second_pass():.3f}")
