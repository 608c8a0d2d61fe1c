"""Small runs of every kind that can share a process."""

from dataclasses import replace

from gtracer.lab.config import Config
from gtracer.lab.results.record import Record
from gtracer.lab.sweeps.launchers.cuda_graphs import CudaGraphs

# 1347 examples: five batches of 256 and one of 67.
SMALL = Config(label_noise=0.5, epochs=3, width=16, batch_size=256, holdout=0.0, device="cpu", delta=0.01)


RUNS = [
    replace(SMALL, optimizer="sgd", seed=1, clip=0.5),
    replace(SMALL, optimizer="sam", rho=0.5, warmup=0.3),
    replace(SMALL, optimizer="sgd-tracer", rho=0.003, weight_decay=5e-4, seed=2),
    replace(SMALL, optimizer="sgd-tracer", rho=0.003, engine="exact", model="mlp-ln", holdout=0.2),
    replace(SMALL, optimizer="adamw-tracer", rho=0.003, lr=1e-3, weight_decay=0.01),
    replace(SMALL, optimizer="adam-sam", rho=0.05, lr=1e-3, clip=0.5),
    replace(SMALL, optimizer="sgd-tracer", rho=0.003, interval=4, reuse=0.5),
    replace(SMALL, optimizer="sgd-tracer", rho=0.003, reuse="previous"),
]


def trained(configs, folder, width):
    """Their records, and how each ended."""
    cells = [(config, folder / str(index)) for index, config in enumerate(configs)]
    ends = {event.config: event.failure for event in CudaGraphs(width)(cells) if event.ended}
    return [Record.read(path) for _, path in cells], [ends[config] for config in configs]
