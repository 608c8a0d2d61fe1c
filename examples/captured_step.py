"""A whole step of SGD-TRACER as one CUDA graph.

A GPU is done with a small net's kernels before Python has started the next: captured once and replayed, a step starts
them all at once. The graph reads the batch and the learning rate where they lay when it was captured, so both are
written there. No dropout, whose masks a graph would not draw the same in both passes.
"""

import torch
from torch.nn.functional import cross_entropy

from gtracer import SGDTracer

EAGER = 3  # first steps, which make what a graph cannot: the optimiser's state, torch's workspaces


def batches(count: int):
    """Made-up images."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        x = torch.randn(64, 3, 8, 8, generator=generator)
        yield x, (x.mean((1, 2, 3)) > 0).long()


def network() -> torch.nn.Module:
    """Two layers, the first with batch norm."""
    torch.manual_seed(0)
    conv, pool = torch.nn.Conv2d(3, 16, 3, bias=False), torch.nn.AdaptiveAvgPool2d(1)
    return torch.nn.Sequential(
        conv, torch.nn.BatchNorm2d(16), torch.nn.ReLU(), pool, torch.nn.Flatten(), torch.nn.Linear(16, 2)
    )


def train(device: str, count: int = 30, *, captured: bool = True) -> list[float]:
    """The loss of every step; captured, which takes a GPU, or made one by one."""
    model = network().to(device)
    lr = torch.tensor(0.1, device=device)
    opt = SGDTracer(
        model.parameters(),
        lr=lr,
        momentum=0.9,
        rho=1e-3,
        model=model,
        fused=True,  # where torch makes the update: its others read the learning rate back
        nonfinite="ignore",  # or the losses would be
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, count)  # fills the tensor
    x, y = torch.empty(64, 3, 8, 8, device=device), torch.empty(64, dtype=torch.long, device=device)

    def step() -> torch.Tensor:
        return opt.step(lambda: cross_entropy(model(x), y))

    graph, stream = None, torch.cuda.Stream() if captured else None
    losses = []
    with torch.cuda.stream(stream):  # of its own: torch wants the steps before a capture off the default one
        for i, (images, labels) in enumerate(batches(count)):
            x.copy_(images)
            y.copy_(labels)
            if captured and i == EAGER:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream):  # nothing is computed yet
                    loss = step()
            if graph is not None:
                graph.replay()
            else:
                loss = step()
            losses.append(loss.item())  # a wait for the GPU: every hundredth step would do
            schedule.step()
    return losses


if __name__ == "__main__":
    has_gpu = torch.cuda.is_available()
    if not has_gpu:
        print("no GPU: the steps are made one by one")
    losses = train("cuda" if has_gpu else "cpu", captured=has_gpu)
    print(f"loss {losses[0]:.3f}, after {len(losses)} steps {losses[-1]:.3f}")
