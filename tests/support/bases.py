"""torch's optimisers, and arguments for them."""

import torch

SGD_ARGUMENTS = [
    {},
    {"momentum": 0.9},
    {"momentum": 0.9, "dampening": 0.3, "weight_decay": 1e-2},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 1e-2},
    {"momentum": 0.9, "maximize": True},
]


ADAM_ARGUMENTS = [
    {},
    {"betas": (0.0, 0.9), "eps": 1e-3},
    {"weight_decay": 0.1},
    {"weight_decay": 0.1, "maximize": True},
]


BASES = {
    name: cls
    for name, cls in vars(torch.optim).items()
    # LBFGS and SparseAdam need other gradients; Muon takes matrices only.
    if isinstance(cls, type) and name not in ("Optimizer", "LBFGS", "SparseAdam", "Muon")
}
