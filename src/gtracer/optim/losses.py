"""Whether the second pass has seen the loss that the first one saw."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gtracer import tensors
from gtracer.optim import processes
from gtracer.optim.engines import aimed
from gtracer.optim.methods import Method, TraceRatio
from gtracer.optim.stats import Verdict
from gtracer.optim.step import Place, Step, displaced_pass
from gtracer.scopes import is_capturing
from gtracer.tensors import Tensors

if TYPE_CHECKING:
    from gtracer.optim.evaluate import Call, Evaluator
    from gtracer.optim.rules import Rule

OTHER_LOSS = (
    "the second pass of step(closure) saw another loss than the first: called again at the same weights, with torch's, "
    "Python's and NumPy's random numbers replayed, the closure gave {again:.6g}, not {first:.6g}. Does it draw another "
    "batch, or from a generator of its own? Draw outside of it and hand the batch over, step(closure, batch)"
)
MOST = 2**26  # weights: it takes a further copy of the largest parameter
LOOKED = 4  # steps with a second pass, in which the two losses are compared
SAME, NEAR = 1e-5, 1e-3  # relative: what GPUs add up in another order is about the first


class Comparison:
    """Of the losses of both passes: what is still to be looked at, and what the last look has left open.

    Args:
        method: Whose passes they are; SAM's direction is no slope, and other engines make passes of another kind.

    Attributes:
        steps: In how many more steps they are compared.
    """

    def __init__(self, method: Method) -> None:
        self._method = method
        self.steps = LOOKED if isinstance(method, TraceRatio) and method.is_plain else 0
        self._doubt: Verdict | None = None  # whether those of the last step fit, where it is not known yet

    def of(self, step: Step, evaluator: Evaluator, call: Call, rule: Rule) -> Losses | None:
        """The losses of a step, where they can be told from each other."""
        method, joined = self._method, processes.count(evaluator.around.model) > 1
        if call.each or step.compared is not None or is_capturing() or joined or not isinstance(method, TraceRatio):
            return None
        if sum(map(Tensor.numel, step.params)) > MOST:
            return None
        self.steps -= 1
        doubted = self._doubt is not None and self._doubt.is_there and not self._doubt.is_healthy
        return Losses(step, evaluator, method, rule, doubted=doubted)

    def conclude(self, losses: Losses) -> None:
        """After the passes: look no further, unless it is not known yet or may be chance."""
        goes_on, self._doubt = losses.check()
        self.steps *= goes_on


class Losses:
    """Compares the losses of both passes with what the gradients say, while they are made; no pass more.

    Between w and w + e the loss changes by the mean slope on the way. It lies between the slopes at both ends where the
    slope grows or falls all the way, so that half their sum times ‖e‖ is wrong by half their difference at most. What
    is wrong by several times that is another loss, or a rough one: that is for a further pass to say.

    Args:
        step: Between its passes.
        evaluator: Makes them.
        method: Displaces the weights along u, by e.
        rule: Has f.
        doubted: Whether those of the step before did not fit.
    """

    def __init__(self, step: Step, evaluator: Evaluator, method: TraceRatio, rule: Rule, *, doubted: bool) -> None:
        self._step, self._evaluator, self._method, self._rule = step, evaluator, method, rule
        self._doubted = doubted
        self._second: Tensor | None = None  # the loss that the second pass has seen
        self._residual: Tensor | None = None

    def at(self, params: Tensors, place: Place) -> Tensors:
        """As the evaluator."""
        returned: list[Any] = []
        noting = replace(self._evaluator, again=lambda: returned.append(self._evaluator.again()))
        gradients = noting.at(params, place)
        first = self._step.loss
        if self._residual is None and first is not None and isinstance(returned[0], Tensor | float):
            self._second = torch.as_tensor(returned[0]).detach()
            before, after = self._slopes(gradients)
            change, first = (self._second - first).to(before), first.to(before)  # of a model on several devices
            allowed = 2 * (after - before).abs() + 3 * NEAR * first.abs()
            self._residual = (change - (before + after) / 2).abs() - allowed
        return gradients

    def _slopes(self, ahead: Tensors) -> tuple[Tensor, Tensor]:
        """Those at both ends, times ‖e‖."""
        rest, sums = iter(ahead), []
        for part in self._step.slices:
            for one in part.each():  # no second copy of the whole direction beside both gradients
                g, there = tensors.wide(one.gradients), tensors.wide([next(rest)])
                u, _ = aimed(g, *self._method.damped(self._step, self._rule, one), one.signed_rho)
                sums.append([tensors.dot(u, x) for x in (u, g, there)])
        home = sums[0][0].device
        square, before, after = (torch.stack([x.to(home) for x in column]).sum() for column in zip(*sums, strict=True))
        scale = self._method.radius / square.sqrt()
        return before * scale, after * scale

    def check(self) -> tuple[bool, Verdict | None]:
        """Whether to go on looking, and a doubt that is still on its way from the device: nobody waits for it."""
        if self._doubted:
            return self._ask(), None
        if self._residual is None:
            return True, None
        fits = Verdict((~(self._residual > 0)).float())
        if not fits.is_there:
            return True, fits
        return fits.is_healthy or self._ask(), None

    def _ask(self) -> bool:
        """Make a further pass at the same weights, and warn if it gives another loss again."""
        around = self._evaluator.around
        # Two kernels leave the weights displaced until the update.
        first = self._step.loss if self._step.kernels is None else self._second
        assert first is not None
        kept = [p.grad for p in around.params]
        with displaced_pass(around.params, None, around):
            again = torch.as_tensor(self._evaluator.again()).detach()
        for p, gradient in zip(around.params, kept, strict=True):
            p.grad = gradient
        apart = float((again - first).abs() / first.abs())
        if apart > NEAR:
            warnings.warn(OTHER_LOSS.format(again=again.item(), first=first.item()), stacklevel=5)
        return SAME < apart <= NEAR  # another batch may have nearly this loss by chance
