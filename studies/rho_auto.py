"""Does `rho="auto"` hold what it promises: never much worse than the base optimiser, and near the best fixed ρ?

    python studies/rho_auto.py --out records/rho-auto/runs.jsonl --seeds 5 6 7

Small problems that take seconds each on one core: right and noisy labels, with and without batch norm, few images,
tables, sequences, a regression with outliers; SGD and Adam, learning rates 0.005 to 0.1. With `--cifar FOLDER`, which
holds `cifar-100-python`, also a ResNet on images of CIFAR-100 at half their size, of minutes each.

Columns are the base optimiser; the best of eight fixed values of ρ, each trained without a tenth of the data, which
judges it, and the best then trained on all of it; 0.003; and ρ that sets itself, told how long an epoch is, and by a
tenth of the data that is held out. Runs that are in the file already are not made again. The table has the
accuracy on clean test data at the last epoch (R² of the regression), in per cent.
"""

from __future__ import annotations

import argparse
import json
import math
import pickle
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits, make_classification
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, cross_entropy, mse_loss

from gtracer import AdamTracer, NonFiniteError, SGDTracer
from gtracer.optim import TwoPassOptimizer

BATCH, HELD_OUT = 50, 0.1
FIXED = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
METHODS = ("base", "best fixed", "0.003", "auto", "auto, held out")
Data = tuple[Tensor, Tensor, int]  # all examples, how many of them are for training


@dataclass(frozen=True)
class Problem:
    """A data set with a net for it, and how it is trained."""

    data: Callable[[int], Data]
    model: Callable[[], nn.Module]
    noise: float = 0.0
    adam: bool = False
    lr: float = 0.02
    epochs: int = 40
    batch: int = BATCH


def digits(seed: int) -> Data:
    """8 × 8 pixels; 1,000 for training."""
    x, y = load_digits(return_X_y=True)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(100 + seed))
    return torch.tensor(x, dtype=torch.float32)[order] / 8 - 1, torch.tensor(y)[order], 1000


def table(seed: int) -> Data:
    """20 features, 5 classes."""
    x, y = make_classification(3200, 20, n_informative=10, n_redundant=5, n_classes=5, class_sep=1.2, random_state=seed)
    numbers = torch.tensor(x, dtype=torch.float32)
    return (numbers - numbers.mean(0)) / numbers.std(0), torch.tensor(y), 1200


def shapes(seed: int) -> Data:
    """Discs, squares, crosses and triangles in noise, 16 × 16; 600 for training."""
    draw = np.random.default_rng(seed)
    y = draw.integers(0, 4, 1600)
    rows, columns = np.mgrid[:16, :16]
    x = np.zeros((1600, 1, 16, 16), np.float32)
    for image, kind in zip(x, y, strict=True):
        dy, dx = rows - draw.uniform(5, 11), columns - draw.uniform(5, 11)
        size = draw.uniform(3, 5)
        far = np.maximum(abs(dy), abs(dx))
        inside = [
            dy**2 + dx**2 < size**2,
            far < 0.88 * size,
            ((abs(dy) < 1.3) | (abs(dx) < 1.3)) & (far < size),
            (dy > -size) & (dy < 0.7 * size) & (abs(dx) < 0.6 * (dy + size)),
        ]
        image[0] = inside[kind]
    x += 0.35 * draw.standard_normal(x.shape)
    return torch.tensor(x, dtype=torch.float32) - 0.2, torch.tensor(y), 600


def sequences(seed: int) -> Data:
    """Which of four ordered pairs of symbols is in twelve."""
    draw = np.random.default_rng(seed + 7)
    x, y = draw.integers(8, 16, (2000, 12)), draw.integers(0, 4, 2000)
    for row, kind in zip(x, y, strict=True):
        first, second = sorted(draw.choice(12, 2, replace=False))
        row[first], row[second] = [(0, 1), (1, 0), (0, 2), (2, 0)][kind]
        row[draw.choice([i for i in range(12) if i not in (first, second)])] = draw.integers(3, 8)
    return torch.tensor(x), torch.tensor(y), 1000


def clusters(seed: int) -> Data:
    """Ten clusters in 20 dimensions; 400 points for training."""
    generator = torch.Generator().manual_seed(seed)
    centres, y = 2 * torch.randn(10, 20, generator=generator), torch.randint(10, (2400,), generator=generator)
    return centres[y] + torch.randn(2400, 20, generator=generator), y, 400


def curve(seed: int) -> Data:
    """A smooth function of eight numbers, with a tenth of the training values far off."""
    generator = torch.Generator().manual_seed(seed + 5)
    x = torch.randn(1600, 8, generator=generator)
    y = torch.sin(2 * x[:, 0]) + x[:, 1] * x[:, 2] / 2 + x[:, 3].abs() / 2 + 0.3 * x[:, 4]
    y = (y - y.mean()) / y.std()
    y[:600] += 0.1 * torch.randn(600, generator=generator)
    off = torch.rand(600, generator=generator) < 0.1
    y[:600] += 2 * torch.randn(600, generator=generator) * off
    return x, y, 600


@cache
def cifar(folder: Path) -> list[tuple[Tensor, Tensor]]:
    """Images of 16 × 16 with the 20 coarse labels: for training, for testing."""
    parts = []
    for name in ("train", "test"):
        rows = pickle.loads((folder / "cifar-100-python" / name).read_bytes(), encoding="latin1")
        images = torch.tensor(np.asarray(rows["data"])).reshape(-1, 3, 32, 32).float() / 255
        parts.append((avg_pool2d(images, 2), torch.tensor(rows["coarse_labels"])))
    mean, std = (f(parts[0][0], (0, 2, 3), keepdim=True) for f in (torch.mean, torch.std))
    return [((x - mean) / std, y) for x, y in parts]


def images(folder: Path, seed: int) -> Data:
    """8,000 of them, and 3,000 for testing."""
    (x, y), (test_x, test_y) = cifar(folder)
    kept, tested = (torch.randperm(len(z), generator=torch.Generator().manual_seed(seed)) for z in (y, test_y))
    kept, tested = kept[:8000], tested[:3000]
    return torch.cat([x[kept], test_x[tested]]), torch.cat([y[kept], test_y[tested]]), 8000


def mlp(sizes: tuple[int, ...], norm: bool = False, activation: type[nn.Module] = nn.ReLU) -> nn.Module:
    layers: list[nn.Module] = []
    for width, after in pairwise(sizes[:-1]):
        layers += [nn.Linear(width, after), *([nn.BatchNorm1d(after)] if norm else []), activation()]
    return nn.Sequential(*layers, nn.Linear(sizes[-2], sizes[-1]))


def cnn(norm: bool) -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((1, 16), (16, 32)):
        layers += [nn.Conv2d(before, after, 3, padding=1), *([nn.BatchNorm2d(after)] if norm else [])]
        layers += [nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 4))


class Reader(nn.Module):
    """A small transformer or LSTM, and the mean over positions."""

    def __init__(self, recurrent: bool) -> None:
        super().__init__()
        self.symbols, self.places = nn.Embedding(16, 32), nn.Parameter(0.1 * torch.randn(12, 32))
        layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, "gelu", batch_first=True, norm_first=True)
        self.inner: Any = (
            nn.LSTM(32, 32, batch_first=True)
            if recurrent
            else nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        )
        self.recurrent, self.out = recurrent, nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        found = self.inner(self.symbols(x) + (0 if self.recurrent else self.places))
        out: Tensor = self.out((found[0] if self.recurrent else found).mean(1))
        return out


class Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(*convolution(before, after, stride), nn.ReLU(), *convolution(after, after, 1))
        short = [nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)]
        self.shortcut = nn.Identity() if before == after else nn.Sequential(*short)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.inner(x) + self.shortcut(x))


def convolution(before: int, after: int, stride: int) -> list[nn.Module]:
    return [nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after)]


def resnet8() -> nn.Module:
    blocks = Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2)
    return nn.Sequential(
        *convolution(3, 16, 1), nn.ReLU(), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 20)
    )


DEEP, WIDE = (64, 96, 96, 96, 96, 96, 10), (64, 256, 256, 10)
PROBLEMS = {
    "digits": Problem(digits, partial(mlp, (64, 128, 128, 10), True), epochs=30),
    "digits, 50% noise": Problem(digits, partial(mlp, (64, 128, 128, 10), True), 0.5, epochs=50),
    "digits, 80% noise": Problem(digits, partial(mlp, (64, 128, 128, 10), True), 0.8, epochs=50),
    "digits, 50% noise, lr 0.005": Problem(digits, partial(mlp, (64, 128, 128, 10), True), 0.5, lr=0.005, epochs=60),
    "digits, 50% noise, Adam": Problem(digits, partial(mlp, (64, 128, 128, 10), True), 0.5, True, 1e-3, 50),
    "digits, five layers, 50% noise": Problem(digits, partial(mlp, DEEP, True), 0.5, epochs=50),
    "digits, batch 10": Problem(digits, partial(mlp, (64, 128, 128, 10), True), epochs=15, batch=10),
    "digits, 50% noise, batch 10": Problem(digits, partial(mlp, (64, 128, 128, 10), True), 0.5, epochs=25, batch=10),
    "digits, wider net, 50% noise, lr 0.1": Problem(digits, partial(mlp, WIDE, True), 0.5, lr=0.1, epochs=50, batch=64),
    "digits, wider net, 50% noise, batch 128": Problem(digits, partial(mlp, WIDE, True), 0.5, epochs=50, batch=128),
    "digits, GELU, no batch norm": Problem(digits, partial(mlp, (64, 128, 128, 10), False, nn.GELU), lr=0.1, epochs=30),
    "clusters, 50% noise, lr 0.05": Problem(clusters, partial(mlp, (20, 128, 10), True), 0.5, lr=0.05),
    "table, 40% noise": Problem(table, partial(mlp, (20, 96, 96, 5)), 0.4, epochs=50),
    "table, Adam": Problem(table, partial(mlp, (20, 96, 96, 5)), adam=True, lr=1e-3),
    "shapes, batch norm": Problem(shapes, partial(cnn, True)),
    "shapes, batch norm, lr 0.1": Problem(shapes, partial(cnn, True), lr=0.1),
    "shapes, batch norm, 40% noise": Problem(shapes, partial(cnn, True), 0.4),
    "shapes, no batch norm": Problem(shapes, partial(cnn, False)),
    "sequences, transformer, 30% noise, Adam": Problem(sequences, partial(Reader, False), 0.3, True, 1e-3, 45),
    "sequences, LSTM, lr 0.1": Problem(sequences, partial(Reader, True), lr=0.1, epochs=60),
    "regression with outliers": Problem(curve, partial(mlp, (8, 64, 64, 1)), epochs=25),
}


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out = model(x)
    return cross_entropy(out, y) if y.dtype == torch.int64 else mse_loss(out[:, 0], y)


def noisy(y: Tensor, rate: float, seed: int) -> Tensor:
    """This share of the labels drawn anew."""
    generator = torch.Generator().manual_seed(1000 + seed)
    drawn = torch.randint(int(y.max()) + 1, y.shape, generator=generator) if rate else y
    return torch.where(torch.rand(len(y), generator=generator) < rate, drawn, y)


def with_images(folder: Path) -> dict[str, Problem]:
    """The problems that want CIFAR-100."""
    data = partial(images, folder)
    return {
        "images, ResNet-8, lr 0.1": Problem(data, resnet8, lr=0.1, epochs=15),
        "images, ResNet-8, 40% noise, lr 0.1": Problem(data, resnet8, 0.4, lr=0.1, epochs=30),
    }


def optimizer(problem: Problem, model: nn.Module, method: str, steps: int, held_out: Callable[[], Tensor]) -> Any:
    params, lr = model.parameters(), problem.lr
    if method == "base":
        return torch.optim.Adam(params, lr) if problem.adam else torch.optim.SGD(params, lr, momentum=0.9)
    own: dict[str, Any] = {
        "auto": {"steps_per_epoch": steps},
        "auto, held out": {"held_out": held_out},
    }.get(method) or ({} if method.startswith("auto") else {"rho": float(method)})
    if problem.adam:
        return AdamTracer(params, lr, model=model, **own)
    return SGDTracer(params, lr, 0.9, model=model, **own)


def run(problem: Problem, name: str, method: str, seed: int) -> dict[str, Any]:
    """One row of the file: a training, or for the best fixed ρ a training of each, and of the best once more."""
    torch.set_num_threads(1)
    if method != "best fixed":
        kept = HELD_OUT if method == "auto, held out" else 0.0
        rho, _, test = train(problem, method, seed, kept)
        return {"problem": name, "method": method, "seed": seed, "test": test, "rho": rho}
    judged = {rho: train(problem, f"{rho:g}", seed, HELD_OUT)[1] for rho in FIXED}
    best = max(judged, key=lambda rho: -math.inf if judged[rho] is None else judged[rho])
    _, _, test = train(problem, f"{best:g}", seed, 0.0)
    return {"problem": name, "method": method, "seed": seed, "test": test, "rho": [best], "held_out": judged}


def train(problem: Problem, method: str, seed: int, kept: float) -> tuple[list[float], float | None, float | None]:
    """ρ after each epoch, and the score on what is held out and on test data; None where training diverged."""
    x, y, count = problem.data(seed)
    train_x, train_y = x[:count], noisy(y[:count], problem.noise, seed)
    held = int(count * kept)
    held_x, held_y, train_x, train_y = train_x[:held], train_y[:held], train_x[held:], train_y[held:]
    torch.manual_seed(seed)
    model = problem.model()
    steps = len(train_y) // problem.batch
    opt = optimizer(problem, model, method, steps, lambda: loss_of(model, held_x, held_y))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, problem.epochs * steps)
    rhos = []
    try:
        for _ in range(problem.epochs):
            for rows in batches(len(train_y), problem.batch):
                step(opt, model, train_x[rows], train_y[rows])
                schedule.step()
            rhos.append(opt.param_groups[0].get("rho", 0.0))
    except NonFiniteError:
        return rhos, None, None
    return rhos, score(model, held_x, held_y) if held else None, score(model, x[count:], y[count:])


def batches(size: int, batch: int = BATCH) -> Iterator[Tensor]:
    yield from torch.split(torch.randperm(size)[: size // batch * batch], batch)


def step(opt: Any, model: nn.Module, x: Tensor, y: Tensor) -> None:
    if isinstance(opt, TwoPassOptimizer):
        opt.step(lambda x, y: loss_of(model, x, y), x, y)
        return
    opt.zero_grad()
    loss_of(model, x, y).backward()
    opt.step()


@torch.no_grad()
def score(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Accuracy, or R², in per cent."""
    model.eval()
    out = model(x)
    if y.dtype == torch.int64:
        return 100 * (out.argmax(1) == y).double().mean().item()
    return 100 * (1 - mse_loss(out[:, 0], y).item() / y.var().item())


def print_table(runs: list[dict[str, Any]], methods: list[str]) -> None:
    print("| | " + " | ".join(methods) + " |\n|" + " --- |" * (1 + len(methods)))
    for name in dict.fromkeys([*PROBLEMS, *(r["problem"] for r in runs)]):
        cells = []
        for method in methods:
            own = [r["test"] for r in runs if (r["problem"], r["method"]) == (name, method)]
            found = [test for test in own if test is not None]
            spread = f" ± {statistics.stdev(found) / math.sqrt(len(found)):.1f}" if len(found) > 1 else ""
            lost = f" ({len(own) - len(found)} of {len(own)} diverged)" if len(found) < len(own) else ""
            cells.append(f"{statistics.mean(found):.1f}{spread}{lost}" if found else lost or "not run")
        print(f"| {name} | " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a file of one run a line, added to")
    parser.add_argument("--seeds", type=int, nargs="+", default=[5, 6, 7])
    parser.add_argument("--methods", nargs="+", default=METHODS, help="or any ρ")
    parser.add_argument("--cifar", type=Path, help="a folder that holds cifar-100-python: two more problems")
    parser.add_argument("--workers", type=int, default=2)
    asked = parser.parse_args()
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    runs = [json.loads(line) for line in asked.out.read_text().splitlines()] if asked.out.exists() else []
    made = {(r["problem"], r["method"], r["seed"]) for r in runs}
    problems = PROBLEMS | (with_images(asked.cifar) if asked.cifar else {})
    wanted = [(name, method, seed) for seed in asked.seeds for method in asked.methods for name in problems]
    with ProcessPoolExecutor(asked.workers) as pool, asked.out.open("a") as file:
        left = [pool.submit(run, problems[one[0]], *one) for one in wanted if one not in made]
        for future in as_completed(left):
            runs.append(future.result())
            file.write(json.dumps(runs[-1]) + "\n")
            file.flush()
    print_table(runs, asked.methods)


if __name__ == "__main__":
    main()
