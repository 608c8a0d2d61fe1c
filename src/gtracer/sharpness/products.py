"""The Hessian and the Gauss-Newton matrix of one batch's loss, times vectors."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from gtracer import checks, tensors
from gtracer.curvature import SecondDerivatives
from gtracer.curvature.evaluation import nodes_used
from gtracer.sharpness.losses import Loss, SplitLoss
from gtracer.tensors import Tensors

HESSIAN, GGN = "hessian", "ggn"
AGREES = 1e-2  # to which forward and backward mode have to agree: bfloat16 is coarse

Vector = list[Tensor]  # in the shapes of the parameters

_WHY_SPLIT = (
    "the Gauss-Newton matrix needs the model's outputs: pass loss_of=SplitLoss(outputs_of, loss_on), or "
    "classification(model), of gtracer.sharpness; or matrices=['hessian']"
)


def check_matrices(matrices: Iterable[str] | None, loss_of: Loss) -> tuple[str, ...]:
    """Those that are asked for; by default those that can be had."""
    split = isinstance(loss_of, SplitLoss)
    if matrices is None:
        return (HESSIAN, GGN) if split else (HESSIAN,)
    if not isinstance(matrices, Iterable):
        raise ValueError(f"matrices must be a list of 'hessian' and 'ggn', got {matrices!r}")
    listed = [matrices] if isinstance(matrices, str) else list(matrices)
    for name in listed:
        checks.choice("matrices", name, (HESSIAN, GGN))
    if GGN in listed and not split:
        raise ValueError(_WHY_SPLIT)
    return tuple(dict.fromkeys(listed))


class Products:
    """Products with either matrix, a batch at a time.

    Args:
        loss_of: The loss of a batch.
        params: By which it is differentiated.
    """

    def __init__(self, loss_of: Loss, params: Tensors) -> None:
        self._loss_of, self._params = loss_of, list(params)
        self._looked = False  # at the graph
        self.pushes = False  # J v by forward mode

    def of(self, matrix: str, batch: Any, vectors: Sequence[Vector]) -> tuple[Tensor, list[Vector]]:
        """The loss, and the matrix times each of these."""
        make = self._hessian if matrix == HESSIAN else self._pushed if self.pushes else self._gauss_newton
        try:
            with sdpa_kernel(SDPBackend.MATH):  # of attention's kernels this one alone can be differentiated twice
                return make(batch, vectors)
        except RuntimeError as error:
            raise explained(error, matrix) from error

    def look(self, batch: Any, vector: Vector) -> None:
        """Find out whether J v can be had by forward mode, which costs half as much.

        Some layers lack it, and whatever a model does with its tensors may lose the tangents. So ‖Jv‖² has to be what
        ⟨v, JᵀJv⟩ is, with Jᵀ by backward mode.
        """
        try:
            with warnings.catch_warnings(), sdpa_kernel(SDPBackend.MATH):
                warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, of what it imports for dual numbers
                outputs, pushed = self._push(batch, vector)
                back = _backward([outputs], self._params, [pushed])
        except RuntimeError:  # what else is wrong will be told by the other way
            return
        forward, backward = tensors.dot([pushed.float()], [pushed.float()]), tensors.dot(vector, back)
        self.pushes = bool((forward - backward).abs() <= AGREES * forward)

    def _hessian(self, batch: Any, vectors: Sequence[Vector]) -> tuple[Tensor, list[Vector]]:
        params = self._params
        with SecondDerivatives():
            loss = self._loss_of(batch)
            checks.loss(loss, "sharpness")
            found = torch.autograd.grad(loss, params, create_graph=True, allow_unused=True)
            require_model(found)
            used = [i for i, g in enumerate(found) if g is not None and g.requires_grad]
            slopes = [g for i in used if (g := found[i]) is not None]
            self._require_twice(slopes)
            made = []
            for vector in vectors:
                along = [vector[i] for i in used]
                made.append(_backward(slopes, params, along) if used else [torch.zeros_like(p) for p in params])
            return loss, made

    def _pushed(self, batch: Any, vectors: Sequence[Vector]) -> tuple[Tensor, list[Vector]]:
        """Jᵀ ∇²l J v with J v by forward mode."""
        made = []
        for vector in vectors:
            outputs, pushed = self._push(batch, vector)
            loss, free, slope = self._outer(outputs, batch)
            made.append(_backward([outputs], self._params, [self._curved(slope, free, pushed)]))
        return loss, made

    def _gauss_newton(self, batch: Any, vectors: Sequence[Vector]) -> tuple[Tensor, list[Vector]]:
        """Jᵀ ∇²l J v with J v by differentiating Jᵀu, which is linear in u, so no forward mode is needed."""
        params = self._params
        with SecondDerivatives():
            outputs = self._outputs(batch)
            loss, free, slope = self._outer(outputs, batch)
            u = torch.zeros_like(outputs, requires_grad=True)
            back = torch.autograd.grad(outputs, params, u, create_graph=True, allow_unused=True)
            require_model(back)
            used = [i for i, g in enumerate(back) if g is not None]
            pulled = [g for i in used if (g := back[i]) is not None]
            self._require_twice(pulled)
            made = []
            for vector in vectors:
                (pushed,) = _backward(pulled, [u], [vector[i] for i in used])
                made.append(_backward([outputs], params, [self._curved(slope, free, pushed)]))
            return loss, made

    def _push(self, batch: Any, vector: Vector) -> tuple[Tensor, Tensor]:
        """The outputs with their graph, and J v."""
        torch.clear_autocast_cache()  # its copies of the weights have no tangents
        with forward_ad.dual_level():
            with torch.no_grad():
                for p, x in zip(self._params, vector, strict=True):
                    dual: Tensor = forward_ad.make_dual(p.detach(), x)  # type: ignore[no-untyped-call]
                    p.copy_(dual)  # in place, so that whoever holds it computes with it
            outputs = self._outputs(batch)
            tangent = forward_ad.unpack_dual(outputs).tangent  # type: ignore[no-untyped-call]
            if tangent is None:
                raise RuntimeError("the outputs have no tangent")
            return outputs, tangent.detach()

    def _outputs(self, batch: Any) -> Tensor:
        if not isinstance(self._loss_of, SplitLoss):
            raise ValueError(_WHY_SPLIT)
        outputs = self._loss_of.outputs_of(batch)
        if not isinstance(outputs, Tensor) or not outputs.requires_grad:
            raise ValueError(f"outputs_of must give a tensor with its graph, got {short(outputs)}")
        return outputs

    def _outer(self, outputs: Tensor, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        """The loss, and its slope by outputs that are free of the model."""
        assert isinstance(self._loss_of, SplitLoss)
        free = outputs.detach().requires_grad_()
        loss = self._loss_of.loss_on(free, batch)
        checks.loss(loss, "sharpness")
        (slope,) = torch.autograd.grad(loss, free, create_graph=True)
        return loss, free, slope

    @staticmethod
    def _curved(slope: Tensor, free: Tensor, pushed: Tensor) -> Tensor:
        """∇²l times a vector."""
        return _backward([slope], [free], [pushed])[0] if slope.requires_grad else torch.zeros_like(slope)

    def _require_twice(self, slopes: Vector) -> None:
        """What can be differentiated only once cuts the graph, and torch would give zeros without a word."""
        if self._looked or not slopes:
            return
        names = {node.name() for node in nodes_used(tensors.dot(slopes, slopes))}
        if any("Error" in name for name in names):
            raise RuntimeError("a function of the model is once_differentiable, so it has no double backward")
        self._looked = True


def require_model(found: Sequence[Tensor | None]) -> None:
    """Derivatives by at least one of the parameters."""
    if all(g is None for g in found):
        raise RuntimeError(
            "the loss depends on none of the model's parameters: does loss_of call this model, and does checkpointing, "
            "if there is any, have use_reentrant=False?"
        )


def explained(error: RuntimeError, matrix: str) -> RuntimeError:
    """What can be done about layers that cannot be differentiated twice, and about a graph that has been used."""
    text = str(error).strip().splitlines()[0] if str(error).strip() else ""
    if "second time" in text:
        return RuntimeError(f"loss_of has called backward() itself: it must only return the loss. torch said: {text}")
    if any(word in text for word in ("not implemented", "double backward", "twice", "aot_autograd", "derivative for")):
        return RuntimeError(
            f"the {matrix} needs a model that can be differentiated twice: pass one that is not compiled and has no "
            f"sparse gradients, or matrices=[] to measure without it. torch said: {text}"
        )
    return error


def short(x: Any) -> str:
    """What it is, for a message."""
    return f"a {type(x).__name__}" + (" without a graph" if isinstance(x, Tensor) else "")


def _backward(outputs: Vector, inputs: Vector, along: Vector) -> Vector:
    found = torch.autograd.grad(outputs, inputs, along, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, inputs, strict=True)]
