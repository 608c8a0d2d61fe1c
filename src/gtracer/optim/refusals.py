"""What an optimiser refuses: parameters, models and calls that would train something else without a word."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState
from torch.nn.parameter import UninitializedParameter

from gtracer import checks, scopes, tensors
from gtracer.optim import processes
from gtracer.optim.methods import TraceRatio
from gtracer.optim.step import COUNT
from gtracer.optim.watch import is_scaler_s_step
from gtracer.tensors import Tensors

if TYPE_CHECKING:
    from gtracer.optim.evaluate import Call
    from gtracer.optim.methods import Method
    from gtracer.optim.optimizer import TwoPassOptimizer
    from gtracer.optim.step import Surroundings
    from gtracer.scopes import RandomState


def check_base(base: Any, wrappers: type) -> None:
    """Refuse what cannot be wrapped."""
    checks.kind("base_optimizer", base, torch.optim.Optimizer, ", such as torch.optim.SGD(model.parameters())")
    if isinstance(base, (wrappers, torch.optim.LBFGS)):
        raise ValueError(
            f"base_optimizer must make one update from one gradient, got {type(base).__name__}: wrap the plain "
            "optimiser instead (for LBFGS, add a TracerPenalty to the loss)"
        )
    if any(COUNT in group for group in base.param_groups):
        raise ValueError(f"base_optimizer is wrapped already, got {type(base).__name__}: make a new one to wrap")


def check_model(model: nn.Module | None, base: torch.optim.Optimizer) -> None:
    """Refuse a model that has nothing to do with the parameters: its statistics would be frozen for nothing."""
    ours = {p for group in base.param_groups for p in group["params"]}
    if model is not None and not any(p in ours for p in model.parameters()):
        raise ValueError(
            f"model = {type(model).__name__} holds none of the optimiser's parameters: pass the one that they belong to"
        )


def check_initialised(params: Tensors) -> None:
    """Refuse the parameters of a lazy module that has seen no batch."""
    if any(isinstance(p, UninitializedParameter) for p in params):
        raise ValueError(
            "params hold an UninitializedParameter: run the model, a lazy module, on one batch before this"
        )


def check_parameter(method: Method, label: str, p: Tensor) -> None:
    """Refuse a parameter that the scheme cannot handle."""
    exact = isinstance(method, TraceRatio) and method.engine.is_exact
    compiled = isinstance(method, TraceRatio) and method.compile
    if p.is_complex():
        raise ValueError(f"{label} is complex ({p.dtype}): squared gradients and sharpness are defined for reals")
    if compiled and tensors.is_sharded(p):
        raise ValueError(
            f"{label} is sharded (DTensor), and implementation = 'compiled' is for whole tensors: use 'auto'"
        )
    if exact and p.dtype == torch.float16:
        raise ValueError(f"{label} is {p.dtype}, in which squared gradients underflow: use float32 or bfloat16")
    if p.dtype == torch.bfloat16 and (why := _why_not_bfloat16(method, p)):
        raise ValueError(f"{label} is {p.dtype}, and {why}")
    if p.is_floating_point() and p.dtype != torch.bfloat16 and torch.finfo(p.dtype).bits < 32:
        raise ValueError(
            f"{label} is {p.dtype}, whose rounding swallows the displacement of the second pass: let the weights be "
            "torch.bfloat16, or float32 with torch.autocast (transformers: from_pretrained(…, dtype=torch.bfloat16))"
        )


def _why_not_bfloat16(method: Method, p: Tensor) -> str | None:
    """Why a step cannot be made of such a weight, and what to do; None where it can."""
    wider = "or keep the weights in float32 and compute under torch.autocast"
    if tensors.is_sharded(p):
        return (
            "sharded (DTensor): shard float32 weights, with MixedPrecisionPolicy(param_dtype=torch.bfloat16) for passes"
        )
    if not isinstance(method, TraceRatio):
        return None
    if method.compile:
        return f"implementation = 'compiled' keeps no copy of the weights to put back: use 'auto', {wider}"
    if method.scale_free:
        return f"scale_free = True measures the lengths of rows, which are coarse there: leave it out, {wider}"
    if method.needs_closure and not method.engine.is_exact:
        return f"{method.needs_closure}: use engine='exact', {wider}"
    return None


def check_scope(opt: TwoPassOptimizer, scaler: torch.amp.GradScaler | None) -> None:
    """Refuse a `perturbed()` that is not the second pass of a step."""
    loop = opt._caller.loop
    if loop.busy:
        raise RuntimeError("perturbed() inside perturbed() or inside a closure: the weights are displaced already")
    if why := opt.method.needs_closure:
        raise RuntimeError(
            f"perturbed() is the second pass of the finite difference with curvature=gradient_magnitude over the "
            f"whole batch, and {why}: use step(closure), or a TracerPenalty on the loss with any optimiser"
        )
    if opt.reuse is not None and opt.reuse.always:
        raise RuntimeError(f"perturbed() with reuse={opt.reuse!r}, which makes one pass in all: use step(closure)")
    if scaler is not None and scaler._per_optimizer_states[id(opt)]["stage"] is OptState.UNSCALED:
        raise RuntimeError(
            "perturbed(scaler=…) after scaler.unscale_(opt): the gradients would be unscaled twice. Call unscale_ "
            "after the scope, before scaler.step(opt)"
        )
    if loop.pending is not None and loop.pending.is_made:
        raise RuntimeError("perturbed() again before step(): the passes of this step are made already")


def check_apart(params: Tensors, others: Tensors) -> None:
    """Refuse a second pass inside that of another optimiser, which knows the parameters as another's."""
    if {id(p) for p in others} & set(map(id, params)):
        raise RuntimeError(
            "perturbed() inside that of another optimiser over the same model: let the two share their passes, with "
            "joint_perturbed([one, other]), or joint_step([one, other], closure)"
        )


def check_scaler() -> None:
    """Refuse a closure that a GradScaler brings."""
    if is_scaler_s_step():
        raise RuntimeError(
            "scaler.step(opt, closure): the optimiser would take the scaled gradients for the loss's. Write "
            "opt.step(closure, scaler=scaler) and scaler.update()"
        )


def check_pass_in_scope(around: Surroundings, entered: RandomState) -> None:
    """Refuse a second pass that was none, or another one."""
    if all(p.grad is None for p in around.params):
        raise RuntimeError("perturbed() without a backward(): run the same loss again inside the scope")
    if scopes.RandomState(around.devices) not in (entered, around.random):
        raise RuntimeError(
            "the pass inside perturbed() drew other random numbers than the first: call the optimiser's "
            "zero_grad() right before the first forward pass, it marks where they begin"
        )


def check_step_alone(opt: TwoPassOptimizer) -> None:
    """Refuse a `step()` without closure for which no pass was made."""
    why, empty = opt.method.needs_closure, is_empty(opt)
    if why and not empty:
        raise RuntimeError(f"step() without a closure: {why}, use step(closure)")
    if opt.reuse is not None and opt.reuse.always and not empty:
        raise RuntimeError(f"step() without a closure: reuse={opt.reuse!r} displaces the weights itself, step(closure)")
    if opt.second_pass_due and not empty:
        raise RuntimeError(
            "step() without the second pass: pass a closure, step(closure), or run the loss once more under "
            "`with opt.perturbed():` before step()"
        )


def is_empty(opt: TwoPassOptimizer) -> bool:
    """Whether all gradients are zero: so torch.distributed.checkpoint lets an optimiser make its state."""
    gradients = [p.grad for group in opt.param_groups for p in group["params"] if p.grad is not None]
    return bool(gradients) and bool(tensors.norm(gradients) == 0)  # the same on all processes


def check_graph(method: TraceRatio, model: nn.Module | None, call: Call) -> None:
    """Refuse what a loss that is differentiated as it is cannot give."""
    which = f"engine={method.engine!r} with {method.curvature}"
    if call.parts is not None and not method.curvature.is_default:
        raise RuntimeError(
            f"batches with {method.curvature}, which looks into one pass over the whole batch: hand it over "
            "as one, step(closure, x, y), or use penalty='each'"
        )
    if processes.are_joined(model) and not call.each:
        raise RuntimeError(
            f"{which} on several processes differentiates past DistributedDataParallel and fully_shard, and nothing "
            "is averaged: use penalty='each', or the finite difference of gradient_magnitude"
        )
    if call.scaler is not None:
        raise RuntimeError(
            f"a GradScaler with {which}, which differentiate the loss as it is: use torch.bfloat16, or the finite "
            "difference of gradient_magnitude"
        )


def check_capture(opt: TwoPassOptimizer) -> None:
    """Refuse to be captured as a CUDA graph where the replay would not be the same step."""
    left = opt._left
    redrawn = left.has_drawn and (opt.is_central or scopes.twin_of_capture.get() is None)
    reasons = {
        "make a step first, so that all state exists": left.random is None,
        "its passes draw random numbers (dropout), which a graph draws anew": redrawn,
        f"interval = {opt.interval} counts steps outside of the graph, set it to 1": opt.phases % opt.interval > 0,
        f"nonfinite = {opt.nonfinite!r} looks at the numbers, set it to 'ignore'": opt.nonfinite != "ignore",
        "rho = 'auto' moves ρ outside of the graph, call prepare_capture() first": opt.sets_rho and opt._place is None,
        "weights in bfloat16 are rounded by other draws in each step, keep them in float32": _are_narrow(opt),
        f"{type(opt).__name__} counts steps outside of the graph, pass capturable=True": not opt.rule.is_capturable,
    }
    if found := [reason for reason, holds in reasons.items() if holds]:
        raise RuntimeError(f"step() cannot be captured as a CUDA graph: {'; '.join(found)}")


def _are_narrow(opt: TwoPassOptimizer) -> bool:
    return any(p.dtype == torch.bfloat16 for p in opt._params() if p.requires_grad)


def check_capture_of_lr(base: torch.optim.Optimizer) -> None:
    """Refuse to capture a learning rate that torch would read back."""
    sgd = isinstance(base, torch.optim.SGD)
    if sgd and any(torch.is_tensor(group["lr"]) and not group.get("fused") for group in base.param_groups):
        raise RuntimeError("step() cannot be captured as a CUDA graph: SGD reads a tensor lr back, pass fused=True")
