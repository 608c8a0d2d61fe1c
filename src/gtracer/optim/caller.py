"""What is known of the code that calls an optimiser: its first steps show it, and later ones need not look."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from torch import nn

from gtracer.optim import refusals
from gtracer.optim.loops import Loop
from gtracer.optim.losses import Comparison
from gtracer.optim.methods import Method, TraceRatio
from gtracer.optim.others import Others
from gtracer.optim.watch import Clipping, Probe
from gtracer.scopes import RandomState, have_moved
from gtracer.tensors import Tensors

if TYPE_CHECKING:
    from gtracer.optim.optimizer import TwoPassOptimizer
    from gtracer.optim.step import Left, Surroundings


class Caller:
    """A user's own code, or a host's.

    Attributes:
        loop: What its last call has left for the next.
        draws: Whether a pass of its draws from Python's or NumPy's random numbers; None while nobody knows.
        clipping: Whether it clips the gradients of each pass.
        losses: Whether its second pass sees the loss of the first.
        others: Parameters of other optimisers that its loss reaches.
        misses_loss: Whether it has been told that a ρ which sets itself wants the loss of every step.
    """

    def __init__(self, method: Method, params: Tensors) -> None:
        self.loop = Loop(RandomState({p.device for p in params}, others=True))
        self.draws: bool | None = None
        # SAM's direction has no length, and its total is the second gradient: as it is clipped or scaled.
        self.clipping = Clipping(asked=isinstance(method, TraceRatio))
        self.losses = Comparison(method)
        self.others = Others()
        self.misses_loss = False

    def begin(self, params: Tensors, model: nn.Module | None, *, due: bool) -> None:
        """A loop of its own is at `zero_grad`, after which its first pass comes; a second one, where it is `due`."""
        self.loop.take_watch()
        self.loop = Loop(RandomState({p.device for p in params}, others=due and self.draws is not False))
        if due and self.clipping.asked:
            self.loop.watch = self.clipping.watch(params, model)

    def look(self, around: Surroundings, left: Left, *, due: bool) -> None:
        """A closure of its own is about to be called: look at what it does with gradients, where that is not known."""
        if due and self.clipping.asked:
            refusals.check_scaler()
            self.loop.take_watch()
            around.watch = self.clipping.watch(around.params, around.model)
        if not left.is_untouched:  # it may accumulate them
            around.probe = Probe.of(around.params)

    def miss_loss(self, opt: TwoPassOptimizer) -> None:
        """Tell, once, that a step without its loss gives a ρ which sets itself nothing to learn of."""
        if not self.misses_loss and not refusals.is_empty(opt):
            self.misses_loss = True
            warnings.warn(
                "rho = 'auto' learns of the loss, and this step was given none: rho stays at 0 or next to it, and at 0 "
                "the steps are the base optimizer's own. Return the loss from the closure, or write in every step "
                "`with opt.perturbed(loss=loss):` around a second pass, or give a number for rho",
                stacklevel=2,
            )

    def note_draws(self, start: RandomState) -> None:
        """Look whether anybody has drawn in the first pass, where nobody knows."""
        if self.draws is None and start.others is not None:
            self.draws = have_moved(start.others)
