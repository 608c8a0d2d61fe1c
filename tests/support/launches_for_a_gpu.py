"""Launches a step's kernels as on a GPU, by a driver that only notes what it is handed: no GPU is needed."""

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver


class Driver:
    """What Triton asks one for."""

    def __init__(self):
        self.compiled, self.launched, self.utils = [], [], self

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_device_properties(self, device):
        return {"max_shared_mem": 2**18}

    def load_binary(self, name, *_):
        return "module", name, 0, 0, 1024

    def launcher_cls(self, source, metadata):
        name = source.fn.__name__
        self.compiled.append(name)
        # Before the kernel's own arguments: grid, stream, function, two kinds of metadata, hooks.
        return lambda *given: self.launched.append((name, given[9:]))


def step(sizes, rho, **options):
    """All kernels of a step of SGD with momentum."""
    params, g, momenta, f, ahead = ([torch.ones(size, dtype=torch.float32) for size in sizes] for _ in range(5))
    own = {"state": {}, "delta": 0.05, "betas": (0.9, 0.9), "decay": 0, "lr": 0.1} | options
    part = triton_kernels.Launched(params, g, momenta, f, rho=rho, **own)
    reached = part.reach()
    part.displace_(reached, 0.05)
    part.take(ahead, None, None)
    part.total(reached, 0.05)
    part.finish_(reached, 0.05, healthy=torch.tensor(True))


def described(x):
    return x.dtype if isinstance(x, torch.Tensor) else x


if __name__ == "__main__":
    driver.set_active(Driver())
    from gtracer.optim import triton_kernels

    step([5, 7], 0.02)
    step([5, 7], 0.02)
    step([16], 1, decay=0.1, seed=2**40)  # other numbers, of which Triton would make kernels of their own
    torch.set_default_dtype(torch.float64)  # of sums too
    step([5, 7], 0.02)
    print(*driver.active.compiled)
    for name, arguments in driver.active.launched:
        print(name, *map(described, arguments))
