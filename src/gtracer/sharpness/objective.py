"""The mean loss over a data set as a function of the weights, and its derivatives: each is a sweep over the batches."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from gtracer import checks, tensors
from gtracer.curvature import SecondDerivatives
from gtracer.curvature.evaluation import nodes_used
from gtracer.scopes import AllRandomness, Buffers, Signals, displaced, generators_of, uninterrupted
from gtracer.sharpness.losses import Loss, SplitLoss, examples_in
from gtracer.tensors import Tensors

SAME = 1e-3  # what the loss at the same weights may differ by from sweep to sweep, of its size: bfloat16 is coarse
HESSIAN, GGN = "hessian", "ggn"

Progress = Callable[[str, float], Any]


@dataclass(frozen=True)
class Settings:
    """How an `Objective` is evaluated; all of it can be left out.

    Attributes:
        params: The parameters by which the loss is seen as a function (default: those that are trained).
        examples_of: How many examples a batch holds (default: the length of its tensors).
        train_mode: Have the model in training mode: batch norm by each batch's own statistics, dropout replayed.
        progress: Called with what is being done and which share of all is done; True: a line on the terminal.
    """

    params: Iterable[Tensor] | None = None
    examples_of: Callable[[Any], float] | None = None
    train_mode: bool = False
    progress: bool | Progress = True


@dataclass(frozen=True)
class Value:
    """The mean loss, and the accuracy where the loss tells it."""

    loss: float
    accuracy: float | None = None


@contextmanager
def opened(
    model: nn.Module, loss_of: Loss, batches: Iterable[Any], settings: Settings | None = None
) -> Iterator[Objective]:
    """The objective; at the end, also after an error or Ctrl-C, all is in the model as it was.

    Ctrl-C is held back and looked at between batches.
    """
    settings = settings or Settings()
    params = _checked(model, loss_of, batches, settings)
    with uninterrupted() as signals:
        kept = Kept(model, params, batches)
        try:
            kept.forget_gradients()
            model.train(settings.train_mode)
            with torch.inference_mode(False), torch.enable_grad():
                objective = Objective(loss_of, batches, params, settings, kept, signals)
                yield objective
                objective.telling.end()
        finally:
            kept.restore()


class Kept:
    """What a measurement could change in a model and around it, to be put back: into the same tensors, bit for bit."""

    def __init__(self, model: nn.Module, params: Tensors, batches: Any) -> None:
        self.params, self.saved = params, tensors.clone(params)
        self._grads = [(p, p.grad) for p in dict.fromkeys([*model.parameters(), *params])]
        self._modes = [(module, module.training) for module in model.modules()]
        self._model, self._buffers = model, Buffers(model)
        self._held = self._buffers
        self._devices = {x.device for x in (*params, *self._buffers.buffers)}
        self._generators = generators_of(batches)
        self._random = self._draws()

    def _draws(self) -> AllRandomness:
        return AllRandomness(self._devices, self._generators)

    def forget_gradients(self) -> None:
        """A loss that calls backward() itself is not to add to the caller's."""
        for p, _ in self._grads:
            p.grad = None

    def restart(self) -> None:
        """Random numbers and buffers alone: every sweep is the same function of the weights."""
        self._random.restore()
        self._held.restore()

    def hold_buffers(self) -> None:
        """Let sweeps begin with the buffers as they are now."""
        self._held = Buffers(self._model)

    def restore(self) -> None:
        """All of it."""
        with torch.no_grad():
            tensors.copy_(self.params, self.saved)
        for p, grad in self._grads:
            p.grad = grad
        for module, training in self._modes:
            module.training = training
        self._held = self._buffers
        self.restart()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """A sweep within another, which afterwards goes on with its own random numbers."""
        after = self._draws()
        try:
            yield
        finally:
            after.restore()


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
        self.at_weights: float | None = None  # the loss there
        self._looked = False  # at the graph

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

    def sweep(self) -> Iterator[tuple[int, Any, float]]:
        """Each batch with its number and its examples; the same ones in every sweep."""
        self.kept.restart()
        total, index = 0.0, -1
        for index, batch in enumerate(self.batches):
            examples = float(self._examples_of(batch))
            if not examples > 0 or not math.isfinite(examples):
                raise ValueError(f"batch {index} of batches holds {examples:g} examples: leave it out")
            if index >= len(self.counts):
                self.counts.append(examples)
            total += examples
            yield index, batch, examples
            self._let_through()
            self.telling.batch(index + 1, len(self.counts))
        if index < 0:
            raise ValueError("batches holds no batch" + (": it can be read only once" if self.examples else ""))
        if self.examples and total != self.examples:
            raise ValueError(
                f"batches held {self.examples:g} examples at first and {total:g} now: they must be the same each time"
            )
        self.examples = total
        self.telling.swept()

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
        loss, right, counted = 0.0, 0.0, True
        for index, batch, examples in self.sweep():
            found, correct = self._evaluated(batch)
            loss += examples * self._number(found, index)
            counted = counted and correct is not None
            right += 0.0 if correct is None else examples * correct
        return Value(loss / self.examples, right / self.examples if counted else None)

    def gradients(self, displacement: Tensor | None = None) -> Iterator[tuple[float, float, Tensor]]:
        """Of each batch: its examples, loss and gradient."""
        with self._moved(displacement):
            for index, batch, examples in self.sweep():
                loss = self._loss(batch)
                try:
                    found = torch.autograd.grad(loss, list(self.params), allow_unused=True)
                except RuntimeError as error:
                    raise _explained(error, "gradient") from error
                self._require_model(found)
                dense = [
                    torch.zeros_like(p) if g is None else _dense(g) for g, p in zip(found, self.params, strict=True)
                ]
                yield examples, self._number(loss, index), self.flat(dense)

    def gradient(self, displacement: Tensor | None = None) -> tuple[float, Tensor]:
        """The loss and its gradient."""
        total, loss = torch.zeros(self.size, dtype=self.dtype, device=self.home), 0.0
        for examples, value, g in self.gradients(displacement):
            total.add_(g, alpha=examples)
            loss += examples * value
        return loss / self.examples, total.div_(self.examples)

    def products(self, matrix: str, vectors: list[Tensor]) -> list[Tensor]:
        """The Hessian or the Gauss-Newton matrix times each of these."""
        totals = [torch.zeros_like(v) for v in vectors]
        split = [self.pieces(v) for v in vectors]
        make = self._hessian_products if matrix == HESSIAN else self._ggn_products
        loss = 0.0
        for index, batch, examples in self.sweep():
            try:
                # Of attention's kernels this one alone can be differentiated twice.
                with sdpa_kernel(SDPBackend.MATH), SecondDerivatives():
                    value, products = make(batch, split)
                loss += examples * self._number(value, index)
                for total, product in zip(totals, products, strict=True):
                    total.add_(self.flat(product), alpha=examples)
            except RuntimeError as error:
                raise _explained(error, matrix) from error
        self._require_same(loss / self.examples)
        for total in totals:
            total.div_(self.examples)
            if not bool(torch.isfinite(total).all()):
                raise FloatingPointError(f"a product with the {matrix} is not finite: measure in float32 or float64")
        return totals

    def only(self, batch: Any) -> Objective:
        """The loss of this batch alone."""
        settings = Settings(examples_of=self._examples_of, progress=False)
        made = Objective(self.loss_of, [batch], self.params, settings, self.kept, self._signals)
        made.at_weights = self.at_weights
        return made

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Around sweeps of `only`, within a sweep of this one."""
        with self.kept.aside():
            yield

    # One batch.

    @contextmanager
    def _moved(self, displacement: Tensor | None) -> Iterator[None]:
        if displacement is None:
            yield
            return
        with displaced(self.params, self.pieces(displacement)):
            yield

    def _evaluated(self, batch: Any) -> tuple[Any, float | None]:
        """The loss, and the share that is right."""
        if not isinstance(self.loss_of, SplitLoss):
            return self.loss_of(batch), None
        outputs = self.loss_of.outputs_of(batch)
        loss, right = self.loss_of.loss_on(outputs, batch), self.loss_of.correct_on
        return loss, None if right is None else float(right(outputs, batch).double().mean())

    def _loss(self, batch: Any) -> Tensor:
        loss = self.loss_of(batch)
        checks.loss(loss, "sharpness")
        return loss

    def _number(self, loss: Any, index: int) -> float:
        """The loss of a batch; at the weights themselves it has to be one."""
        found = float(loss.detach()) if isinstance(loss, Tensor) else float(loss)
        if self.at_weights is None and not math.isfinite(found):
            raise FloatingPointError(
                f"the loss of batch {index} is {found}: there is no sharpness to measure at these weights"
            )
        return found

    def _require_same(self, loss: float) -> None:
        """What is drawn anew each time, without a generator that is known here, has no derivative to iterate on."""
        before = self.at_weights
        if before is not None and abs(loss - before) > SAME * max(abs(before), SAME):
            raise RuntimeError(
                f"the loss at the same weights was {before:.6g} and is {loss:.6g} now: batches or loss_of change from "
                "sweep to sweep, by random numbers that cannot be replayed. Pass a list of batches"
            )

    def _require_model(self, found: tuple[Tensor | None, ...]) -> None:
        if all(g is None for g in found):
            raise RuntimeError("the loss depends on none of the model's parameters: does loss_of call this model?")

    def _require_twice(self, slopes: list[Tensor]) -> None:
        """What can be differentiated only once cuts the graph, and torch would give zeros without a word."""
        if self._looked or not slopes:
            return
        names = {node.name() for node in nodes_used(tensors.dot(slopes, slopes))}
        if any("Error" in name for name in names):
            raise RuntimeError("a function of the model is once_differentiable, so it has no double backward")
        self._looked = True

    def _hessian_products(self, batch: Any, vectors: list[list[Tensor]]) -> tuple[Tensor, list[list[Tensor]]]:
        loss, params = self._loss(batch), list(self.params)
        found = torch.autograd.grad(loss, params, create_graph=True, allow_unused=True)
        self._require_model(found)
        used = [i for i, g in enumerate(found) if g is not None and g.requires_grad]
        slopes = [g for i in used if (g := found[i]) is not None]
        self._require_twice(slopes)
        made = []
        for vector in vectors:
            along = [vector[i] for i in used]
            made.append(_backward(slopes, params, along) if used else [torch.zeros_like(p) for p in params])
        return loss, made

    def _ggn_products(self, batch: Any, vectors: list[list[Tensor]]) -> tuple[Tensor, list[list[Tensor]]]:
        """Jᵀ ∇²l J v. J v is had by differentiating Jᵀu, which is linear in u, so no forward mode is needed."""
        split, params = self.loss_of, list(self.params)
        if not isinstance(split, SplitLoss):
            raise ValueError(_WHY_SPLIT)
        outputs = split.outputs_of(batch)
        if not isinstance(outputs, Tensor) or not outputs.requires_grad:
            raise ValueError(f"outputs_of must give a tensor with its graph, got {_short(outputs)}")
        free = outputs.detach().requires_grad_()
        loss = split.loss_on(free, batch)
        checks.loss(loss, "sharpness")
        (slope,) = torch.autograd.grad(loss, free, create_graph=True)
        u = torch.zeros_like(outputs, requires_grad=True)
        back = torch.autograd.grad(outputs, params, u, create_graph=True, allow_unused=True)
        self._require_model(back)
        used = [i for i, g in enumerate(back) if g is not None]
        pulled = [g for i in used if (g := back[i]) is not None]
        self._require_twice(pulled)
        made = []
        for vector in vectors:
            (pushed,) = _backward(pulled, [u], [vector[i] for i in used])
            (curved,) = _backward([slope], [free], [pushed]) if slope.requires_grad else [torch.zeros_like(slope)]
            made.append(_backward([outputs], params, [curved]))
        return loss, made


class Telling:
    """How far a measurement is."""

    def __init__(self, progress: bool | Progress) -> None:
        self._call = _on_terminal if progress is True and sys.stderr.isatty() else progress
        self.total, self._done, self._ahead, self._made = 1.0, 0.0, 0.0, 0.0
        self._what, self._weight = "", 1.0

    def begin(self, what: str, sweeps: float, weight: float) -> None:
        """The sweeps to come; those that were planned before and not made are not coming."""
        self._done += self._ahead
        self._what, self._ahead, self._made, self._weight = what, sweeps, 0.0, weight

    def batch(self, number: int, of: int) -> None:
        if callable(self._call):
            inside = min(self._made + self._weight * number / max(of, number), self._ahead)
            self._call(self._what, min(1.0, (self._done + inside) / self.total))

    def swept(self) -> None:
        self._made += self._weight

    def end(self) -> None:
        if callable(self._call):
            self._call("done", 1.0)


def _on_terminal(what: str, share: float) -> None:
    bar = "━" * round(30 * share)
    sys.stderr.write(f"\r{bar:<30} {share:4.0%} {what:<40.40}" + ("\r\x1b[K" if share >= 1 else ""))
    sys.stderr.flush()


_WHY_SPLIT = (
    "the Gauss-Newton matrix needs the model's outputs: pass loss_of=SplitLoss(outputs_of, loss_on), or "
    "classification(model), of gtracer.sharpness; or matrices=['hessian']"
)


def check_matrices(matrices: Iterable[str] | None, loss_of: Loss) -> tuple[str, ...]:
    """Those that are asked for; by default those that can be had."""
    split = isinstance(loss_of, SplitLoss)
    if matrices is None:
        return (HESSIAN, GGN) if split else (HESSIAN,)
    listed = [matrices] if isinstance(matrices, str) else list(matrices)
    for name in listed:
        checks.choice("matrices", name, (HESSIAN, GGN))
    if GGN in listed and not split:
        raise ValueError(_WHY_SPLIT)
    return tuple(dict.fromkeys(listed))


def _checked(model: nn.Module, loss_of: Any, batches: Any, settings: Settings) -> list[Tensor]:
    """The parameters; refused where nothing can be measured."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got {_short(model)}")
    if not callable(loss_of):
        raise ValueError(f"loss_of must be a function of a batch that gives its loss, got {loss_of!r}")
    if not isinstance(batches, Iterable):
        raise ValueError(f"batches must be a DataLoader or a list of batches, got {_short(batches)}")
    if isinstance(batches, Iterator):  # not by iter(), which draws random numbers and starts a loader's workers
        raise ValueError(
            f"batches can be read only once, being a {type(batches).__name__}, and it takes many sweeps: pass a "
            "DataLoader or a list"
        )
    if settings.examples_of is not None and not callable(settings.examples_of):
        raise ValueError(f"examples_of must be a function of a batch, got {settings.examples_of!r}")
    checks.flag("train_mode", settings.train_mode)
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise RuntimeError(
            f"sharpness in {distributed.get_world_size()} processes: each would measure its own share of the data. "
            "Save the weights and measure in one process"
        )
    if settings.params is None:
        params: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
    else:
        params = list(dict.fromkeys(settings.params))
        if not all(isinstance(p, Tensor) and p.requires_grad and p.is_leaf for p in params):
            raise ValueError("params must be parameters of the model that require gradients")
    if not params:
        raise ValueError(f"{type(model).__name__} has no parameters that require gradients: nothing can be sharp")
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    for p in params:
        name = names.get(p, f"of shape {tuple(p.shape)}")
        if p.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"parameter {name} is {str(p.dtype).removeprefix('torch.')}, too coarse for the differences that "
                "sharpness is made of: measure model.float(), under autocast if it must be fast"
            )
        if p.device.type == "meta" or tensors.is_sharded(p):
            raise ValueError(f"parameter {name} is not all here (meta or sharded): measure a model that is whole")
    return params


def _backward(outputs: list[Tensor], inputs: list[Tensor], along: list[Tensor]) -> list[Tensor]:
    found = torch.autograd.grad(outputs, inputs, along, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, inputs, strict=True)]


def _dense(g: Tensor) -> Tensor:
    return g.to_dense() if g.is_sparse else g


def _explained(error: RuntimeError, matrix: str) -> RuntimeError:
    """What can be done about layers that cannot be differentiated twice, and about a graph that has been used."""
    text = str(error).strip().splitlines()[0] if str(error).strip() else ""
    if "second time" in text:
        return RuntimeError(f"loss_of has called backward() itself: it must only return the loss. torch said: {text}")
    if any(word in text for word in ("not implemented", "double backward", "twice", "aot_autograd", "derivative for")):
        return RuntimeError(
            f"the {matrix} needs a model that can be differentiated twice: pass one that is not compiled, or "
            f"matrices=[] to measure without it. torch said: {text}"
        )
    return error


def _short(x: Any) -> str:
    return f"a {type(x).__name__}" + (" without a graph" if isinstance(x, Tensor) else "")
