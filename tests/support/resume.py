"""Run in a fresh process: load a checkpoint of every optimiser, go on, and save where that leads."""

import sys
from pathlib import Path

import torch

from gtracer import RhoScheduler, SGDTracer, TracerPenalty, linear_warmup
from support.optimizers import MAKERS
from support.problems import conv_batch_norm, dropout_mlp, make

PROBLEMS = {"dropout": dropout_mlp, "batch-norm": conv_batch_norm}
ALL = {
    **MAKERS,
    "exact": lambda p, **k: SGDTracer(p, lr=0.1, momentum=0.9, rho=0.01, engine="exact", f0=0.1, **k),
    "interval": lambda p, **k: SGDTracer(p, lr=0.1, momentum=0.9, rho=0.01, interval=3, **k),
    "penalty": lambda p, **k: Penalised(list(p)),
}


class Penalised:
    """TracerPenalty beside a plain optimiser, saved as a user would."""

    def __init__(self, params):
        self.optimizer, self.penalty = torch.optim.Adam(params, 0.01), TracerPenalty(params, rho=0.01)
        self.param_groups = self.penalty.param_groups

    def step(self, closure):
        self.optimizer.zero_grad()
        self.penalty(closure()).backward()
        self.optimizer.step()

    def state_dict(self):
        return {"optimizer": self.optimizer.state_dict(), "penalty": self.penalty.state_dict()}

    def load_state_dict(self, state):
        self.optimizer.load_state_dict(state["optimizer"])
        self.penalty.load_state_dict(state["penalty"])


class Run:
    def __init__(self, name: str, problem: str) -> None:
        self.made = make(PROBLEMS[problem])
        self.opt = ALL[name](self.made.model.parameters(), model=self.made.model)
        self.schedule = RhoScheduler(self.opt, linear_warmup(6))
        self.done = 0

    def go_on(self, steps: int) -> None:
        for i in range(self.done, self.done + steps):
            self.opt.step(lambda i=i: self.made.loss_of(i))
            self.schedule.step()
        self.done += steps

    def save(self, path: Path) -> None:
        parts = {"model": self.made.model, "opt": self.opt, "schedule": self.schedule}
        state = {name: part.state_dict() for name, part in parts.items()}
        torch.save(state | {"random": torch.get_rng_state(), "done": self.done}, path)

    def load(self, path: Path) -> None:
        state = torch.load(path, weights_only=True)
        self.made.model.load_state_dict(state["model"])
        self.opt.load_state_dict(state["opt"])
        self.schedule.load_state_dict(state["schedule"])
        torch.set_rng_state(state["random"])
        self.done = state["done"]


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for name in ALL:
        for problem in PROBLEMS:
            run = Run(name, problem)
            run.load(folder / f"{name}-{problem}-middle.pt")
            run.go_on(5)
            run.save(folder / f"{name}-{problem}-resumed.pt")
