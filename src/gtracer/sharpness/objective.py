"""The mean loss over a data set as a function of the weights, and its derivatives: each is a sweep over the batches."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from gtracer import checks
from gtracer.scopes import Signals, displaced, uninterrupted
from gtracer.sharpness.losses import Loss, SplitLoss, examples_in
from gtracer.sharpness.merging import LARGE, Merging
from gtracer.sharpness.model import Kept, Settings, checked
from gtracer.sharpness.products import GGN, Products, explained, require_model
from gtracer.sharpness.progress import Telling
from gtracer.tensors import Tensors

SAME = 1e-3  # what the loss at the same weights may differ by from sweep to sweep, of its size: bfloat16 is coarse

T = TypeVar("T")


@dataclass(frozen=True)
class Value:
    """The mean loss, and the accuracy where the loss tells it."""

    loss: float
    accuracy: float | None = None


class Told(NamedTuple):
    """What is known of a batch: numbers still on the device, so that nothing has waited for them."""

    examples: float
    loss: Any
    right: Tensor | None = None  # the share of its examples


@contextmanager
def opened(
    model: nn.Module, loss_of: Loss, batches: Iterable[Any], settings: Settings | None = None
) -> Iterator[Objective]:
    """The objective; at the end, also after an error or Ctrl-C, all is in the model as it was.

    Ctrl-C is held back and looked at between batches.
    """
    settings = settings or Settings()
    params = checked(model, loss_of, batches, settings)
    with uninterrupted() as signals:
        kept = Kept(model, params, batches)
        try:
            kept.forget_gradients()
            model.train(settings.train_mode)
            with torch.inference_mode(False), torch.enable_grad():
                objective = Objective(loss_of, batches, params, settings, kept, signals)
                try:
                    yield objective
                except RuntimeError as error:
                    if not _is_of_memory(error):
                        raise
                    raise torch.OutOfMemoryError(objective.needs_memory()) from error
                objective.telling.end()
        finally:
            kept.restore()


class Objective:
    """The mean over examples of a loss over batches. Displacements and derivatives are flat vectors."""

    def __init__(
        self,
        loss_of: Loss,
        batches: Iterable[Any],
        params: Tensors,
        settings: Settings,
        kept: Kept,
        signals: Signals | None = None,
    ) -> None:
        self.loss_of, self.batches, self.params, self.kept, self._signals = loss_of, batches, params, kept, signals
        self._settings = settings
        self._examples_of = settings.examples_of or examples_in
        self.telling = Telling(settings.progress)
        self.size = sum(p.numel() for p in params)
        self.home = params[0].device
        self.dtype = torch.promote_types(torch.float32, params[0].dtype)
        for p in params:
            self.dtype = torch.promote_types(self.dtype, p.dtype)
        self.examples = 0.0
        self.counts: list[float] = []  # examples of each batch
        self.evaluated: defaultdict[str, float] = defaultdict(float)  # examples, by what was computed of them
        self.at_weights: float | None = None  # the loss there
        self._products = Products(loss_of, params)
        self._looked = False  # how a product is to be had
        self._merging, self._agreed = self._how_to_merge(), False

    # Vectors.

    def flat(self, parts: Tensors) -> Tensor:
        """One vector of these tensors, which are shaped as the parameters."""
        return torch.cat([x.detach().reshape(-1).to(self.home, self.dtype) for x in parts])

    def pieces(self, vector: Tensor) -> list[Tensor]:
        """A vector in the shapes of the parameters, where they lie."""
        parts = torch.split(vector, [p.numel() for p in self.params])
        return [x.view(p.shape).to(p.device, p.dtype) for x, p in zip(parts, self.params, strict=True)]

    def weights(self) -> Tensor:
        """The weights as one vector."""
        return self.flat(self.params)

    def random(self, generator: torch.Generator, signs: bool = False) -> Tensor:
        """Independent standard normal numbers, or signs; the same on every device."""
        if signs:
            drawn = torch.randint(0, 2, (self.size,), generator=generator) * 2.0 - 1.0
        else:
            drawn = torch.randn(self.size, generator=generator, dtype=self.dtype)
        return drawn.to(self.home, self.dtype)

    # Sweeps.

    def plan(self, sweeps: int) -> None:
        """Say how many sweeps there will be, for the progress."""
        self.telling.total = max(1, sweeps)

    def doing(self, what: str, sweeps: float = 1, weight: float = 1) -> None:
        """Say what the sweeps from here on are for, how many are planned, and how many one of them is worth."""
        self.telling.begin(what, sweeps, weight)

    def sweep(self, merged: bool = False) -> Iterator[tuple[Any, float]]:
        """Each batch and its examples, or each of the larger ones that they are merged to; the same in every sweep."""
        self.kept.restart()
        yield from self._merging.batches(self._each()) if merged else self._each()
        self.telling.swept()

    def _each(self) -> Iterator[tuple[Any, float]]:
        total, index = 0.0, -1
        for index, batch in enumerate(self.batches):
            examples = float(self._examples_of(batch))
            if not examples > 0 or not math.isfinite(examples):
                raise ValueError(f"batch {index} of batches holds {examples:g} examples: leave it out")
            if index >= len(self.counts):
                self.counts.append(examples)
            total += examples
            yield batch, examples
            self._let_through()
            self.telling.batch(index + 1, len(self.counts))
        if index < 0:
            raise ValueError("batches holds no batch" + (": it can be read only once" if self.examples else ""))
        if self.examples and total != self.examples:
            raise ValueError(
                f"batches held {self.examples:g} examples at first and {total:g} now: they must be the same each time"
            )
        self.examples = total

    def _how_to_merge(self) -> Merging:
        """Examples are independent of each other only in evaluation mode, and a mean only where each counts once."""
        settings, most = self._settings, self._settings.merge
        independent = not settings.train_mode and settings.examples_of is None
        merge = self.loss_of.merge if isinstance(self.loss_of, SplitLoss) and independent else None
        most = (LARGE if self.home.type == "cuda" else 0) if most is None else most
        return Merging(merge if most else None, most)

    def _merged(self, make: Callable[[], T]) -> T:
        """What sweeps over merged batches make; where the memory has no room for these, over smaller ones."""
        while True:
            try:
                self._agree()
                return make()
            except RuntimeError as error:
                if not _is_of_memory(error) or not self._merging.shrink(max(self.counts)):
                    raise

    def settle(self) -> None:
        """Compare with the loss by merged batches from here on: on a GPU their sums are made in another order."""
        self._merged(lambda: None)
        if self._merging.merge is not None:
            self.at_weights = self.value().loss

    def _agree(self) -> None:
        """Merge nothing, unless merged batches have the outputs and the loss of those that they are made of."""
        if self._agreed or self._merging.merge is None or not isinstance(self.loss_of, SplitLoss):
            return
        self.kept.restart()
        for group in self._merging.groups(self._each()):
            if not self._merging.agrees(self.loss_of, group):
                self._merging.merge = None
                break
        else:
            self.evaluated["evaluation"] += 2 * self.examples
        self._agreed = True

    def needs_memory(self) -> str:
        """What to do about it."""
        return (
            f"there is not enough memory for batches of {max(self.counts, default=0):g} examples and a model of "
            f"{self.size:,} parameters: pass smaller batches, or fewer steps"
        )

    def _let_through(self) -> None:
        """A Ctrl-C, to whoever handles it: it need not end the measurement, as where training stops after its epoch."""
        signals = self._signals
        if signals is not None and signals.held is not None and signals.handler is not None:
            held, signals.held = signals.held, None
            signals.handler(*held)

    def value(self, displacement: Tensor | None = None) -> Value:
        """The loss, where the weights are moved so."""
        with self._moved(displacement), torch.no_grad():
            return self.value_here()

    @torch.no_grad()
    def value_here(self) -> Value:
        """The loss at the weights that the model has."""
        each = self._merged(lambda: [self._evaluated(batch, examples) for batch, examples in self.sweep(merged=True)])
        self.evaluated["evaluation"] += self.examples
        return self.mean(each)

    def gradients(self, displacement: Tensor | None = None, merged: bool = False) -> Iterator[tuple[Told, Tensor]]:
        """Of each batch: what it tells, where batches are not merged also the share that is right, and its gradient."""
        with self._moved(displacement):
            for batch, examples in self.sweep(merged):
                told = self._evaluated(batch, examples, judged=not merged)
                checks.loss(told.loss, "sharpness")
                try:
                    found = torch.autograd.grad(told.loss, list(self.params), allow_unused=True)
                except RuntimeError as error:
                    raise explained(error, "gradient") from error
                require_model(found)
                dense = [
                    torch.zeros_like(p) if g is None else _dense(g) for g, p in zip(found, self.params, strict=True)
                ]
                yield told._replace(loss=told.loss.detach()), self.flat(dense)
        self.evaluated["gradient"] += self.examples

    def gradient(self, displacement: Tensor | None = None) -> tuple[float, Tensor]:
        """The loss and its gradient."""
        return self._merged(lambda: self._gradient(displacement))

    def _gradient(self, displacement: Tensor | None) -> tuple[float, Tensor]:
        total, each = torch.zeros(self.size, dtype=self.dtype, device=self.home), []
        for told, g in self.gradients(displacement, merged=True):
            total.add_(g, alpha=told.examples)
            each.append(told)
        return self.mean(each).loss, total.div_(self.examples)

    def products(self, matrix: str, vectors: list[Tensor]) -> list[Tensor]:
        """The Hessian or the Gauss-Newton matrix times each of these."""
        each, totals = self._merged(lambda: self._products_of(matrix, vectors))
        self.evaluated[matrix] += len(vectors) * self.examples
        loss = self.mean(each).loss
        if (
            matrix == GGN and self._products.pushes and not self._is_same(loss)
        ):  # forward mode has drawn other random numbers
            self._products.pushes = False
            return self.products(matrix, vectors)
        self._require_same(loss)
        for total in totals:
            total.div_(self.examples)
        if not all(self.read([torch.isfinite(total).all() for total in totals])):
            raise FloatingPointError(f"a product with the {matrix} is not finite: measure in float32 or float64")
        return totals

    def _products_of(self, matrix: str, vectors: list[Tensor]) -> tuple[list[Told], list[Tensor]]:
        """What each batch tells, and the sums over examples."""
        totals, each = [torch.zeros_like(v) for v in vectors], []
        split = [self.pieces(v) for v in vectors]
        for batch, examples in self.sweep(merged=True):
            if matrix == GGN and not self._looked:
                with self.aside():
                    self._products.look(batch, split[0])
                self._looked = True
            found, products = self._products.of(matrix, batch, split)
            each.append(Told(examples, found.detach()))
            for total, product in zip(totals, products, strict=True):
                total.add_(self.flat(product), alpha=examples)
        return each, totals

    def mean(self, each: Sequence[Told]) -> Value:
        """Over the examples. Here the numbers are read; at the weights themselves every loss has to be one."""
        losses, counts = self.read([told.loss for told in each]), [told.examples for told in each]
        if self.at_weights is None:
            for index, loss in enumerate(losses):
                if not math.isfinite(loss):
                    raise FloatingPointError(
                        f"the loss of batch {index} is {loss}: there is no sharpness to measure at these weights"
                    )
        rights = self.read([told.right for told in each if told.right is not None])
        loss, right = (sum(n * x for n, x in zip(counts, xs, strict=False)) / self.examples for xs in (losses, rights))
        return Value(loss, right if len(rights) == len(each) else None)

    def read(self, numbers: Sequence[Any]) -> list[float]:
        """From the device, all at once."""
        there = [torch.as_tensor(x, dtype=None if isinstance(x, Tensor) else self.dtype) for x in numbers]
        flat = [x.detach().reshape(()).to(self.home) for x in there]
        return [float(x) for x in torch.stack(flat).tolist()] if flat else []

    def only(self, batch: Any) -> Objective:
        """The loss of this batch alone."""
        settings = Settings(examples_of=self._examples_of, progress=False)  # one batch, merged with none
        made = Objective(self.loss_of, [batch], self.params, settings, self.kept, self._signals)
        made.at_weights, made.evaluated = self.at_weights, self.evaluated
        return made

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Around sweeps of `only`, within a sweep of this one."""
        with self.kept.aside():
            yield

    @property
    def passes(self) -> dict[str, float]:
        """Over all the examples: plain evaluations, gradients, and products with either matrix."""
        return {kind: count / self.examples for kind, count in self.evaluated.items()}

    # One batch.

    @contextmanager
    def _moved(self, displacement: Tensor | None) -> Iterator[None]:
        if displacement is None:
            yield
            return
        with displaced(self.params, self.pieces(displacement)):
            yield

    def _evaluated(self, batch: Any, examples: float, judged: bool = True) -> Told:
        if not isinstance(self.loss_of, SplitLoss):
            loss = self.loss_of(batch)
            if not isinstance(loss, Tensor | float | int) or (isinstance(loss, Tensor) and loss.numel() != 1):
                got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
                raise RuntimeError(f"sharpness needs a scalar loss, got {got}: average it over the batch")
            return Told(examples, loss)
        outputs = self.loss_of.outputs_of(batch)
        loss, correct = self.loss_of.loss_on(outputs, batch), self.loss_of.correct_on
        if correct is None or not judged:
            return Told(examples, loss)
        with torch.no_grad():
            return Told(examples, loss, correct(outputs, batch).to(self.dtype).mean())

    def _is_same(self, loss: float) -> bool:
        """Whether this is the loss at the weights. Where memory ran out, batches have been merged in another way."""
        if not self._is_close(loss) and self._merging.merge is not None:
            self.at_weights = self.value().loss
        return self._is_close(loss)

    def _is_close(self, loss: float) -> bool:
        before = self.at_weights
        return before is None or abs(loss - before) <= SAME * max(abs(before), SAME)

    def _require_same(self, loss: float) -> None:
        """What is drawn anew each time, without a generator that is known here, has no derivative to iterate on."""
        if not self._is_same(loss):
            raise RuntimeError(
                f"the loss at the same weights was {self.at_weights:.6g} and is {loss:.6g} now: batches or loss_of "
                "change from sweep to sweep, by random numbers that cannot be replayed. Pass a list of batches"
            )


def _dense(g: Tensor) -> Tensor:
    return g.to_dense() if g.is_sparse else g


def _is_of_memory(error: RuntimeError) -> bool:
    """Whether memory ran out: torch has a class for its own memory on a GPU alone."""
    words = ("can't allocate memory", "out of memory", "ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError) or any(each in str(error) for each in words)
