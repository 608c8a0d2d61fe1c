"""What torch's parameter groups hold of ours: ρ, β, δ, f₀ by names of their own, and where a moving ρ has come to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gtracer import checks
from gtracer.optim import refusals
from gtracer.optim.auto import AUTO, IS_AUTO, LOG_RHO
from gtracer.optim.methods import TraceRatio

if TYPE_CHECKING:
    from gtracer.optim.optimizer import TwoPassOptimizer


def names_of(defaults: dict[str, Any], base: dict[str, Any]) -> dict[str, str]:
    """What ours are called beside the base optimiser's: Adadelta has a `rho`, so that ours is `gtracer_rho` there."""
    return {name: f"gtracer_{name}" if name in base else name for name in defaults}


def completed(opt: TwoPassOptimizer, group: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """The group with the defaults for what it leaves out, checked."""
    complete = resolved(opt, defaults | group)
    checks.hyperparameters(opt.hyperparameters(complete))
    opt.rule.check_group(complete)
    refusals.check_initialised(complete["params"])
    for label, p in checks.labelled(complete):
        if p.requires_grad:  # a frozen one may be of any kind; trained later, it is looked at then
            refusals.check_parameter(opt.method, label, p)
    return complete


def resolved(opt: TwoPassOptimizer, group: dict[str, Any]) -> dict[str, Any]:
    """The group with a number for a ρ that sets itself."""
    rho = group[opt.rho_key]
    if isinstance(rho, str) and rho != AUTO and opt.controller is not None:
        raise ValueError(f"rho must be 'auto' or a finite number in [0, inf], got {rho!r}")
    if rho != AUTO:
        return group
    if opt.controller is None:
        raise ValueError(
            f"rho = 'auto' is for TRACER, and {type(opt).__name__}'s rho is another quantity: pass a number, "
            "such as 0.05, or let gtracer.find_rho find one"
        )
    return group | {opt.rho_key: 0.0, IS_AUTO: True}


def rest_on_device(opt: TwoPassOptimizer) -> None:
    """Where ρ lives on the device, let the groups hold the number that is multiplied there."""
    for group in opt.param_groups:
        if opt.controller is not None and opt.controller.on_device and group.get(IS_AUTO):
            group[opt.rho_key] = opt.controller.start


def leave_device(opt: TwoPassOptimizer) -> None:
    """Where ρ lives on the device, tell the groups how far it has come."""
    for group in opt.param_groups:
        if opt._place is not None and group.get(IS_AUTO):
            group[LOG_RHO] = opt._place[0].item()


def described(opt: TwoPassOptimizer) -> str:
    """The optimiser in one line: what its groups hold, and what it was made with."""
    hyper = [opt.hyperparameters(group) for group in opt.param_groups]
    values = {name: [repr(own[name]) for own in hyper] for name in hyper[0]}
    for i, group in enumerate(opt.param_groups):
        if group.get(IS_AUTO):
            values["rho"][i] = f"'auto' (now {opt.rho_of(group):.3g})"
    shown = [f"{name}={own[0] if len(set(own)) == 1 else '[' + ', '.join(own) + ']'}" for name, own in values.items()]
    if isinstance(opt.method, TraceRatio):
        shown.append(f"engine={opt.method.engine!r}")
    shown += [f"interval={opt.interval}", f"implementation={opt.implementation!r}"]
    sizes = [len(group["params"]) for group in opt.param_groups]
    groups = f"{len(sizes)} group{'s' * (len(sizes) > 1)} of {', '.join(map(str, sizes))} parameters"
    return f"{type(opt).__name__}({type(opt.base).__name__}, {', '.join(shown)}; {groups})"
