"""What is known of the code that calls an optimiser: its first steps show it, and later ones need not look."""

from __future__ import annotations

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
    from gtracer.optim.step import Left, Surroundings


class Caller:
    """A user's own code, or a host's.

    Attributes:
        loop: What its last call has left for the next.
        draws: Whether a pass of its draws from Python's or NumPy's random numbers; None while nobody knows.
        clipping: Whether it clips the gradients of each pass.
        losses: Whether its second pass sees the loss of the first.
        others: Parameters of other optimisers that its loss reaches.
    """

    def __init__(self, method: Method, params: Tensors) -> None:
        self.loop = Loop(RandomState({p.device for p in params}, others=True))
        self.draws: bool | None = None
        # SAM's direction has no length, and its total is the second gradient: as it is clipped or scaled.
        self.clipping = Clipping(asked=isinstance(method, TraceRatio))
        self.losses = Comparison(method)
        self.others = Others()

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

    def note_draws(self, start: RandomState) -> None:
        """Look whether anybody has drawn in the first pass, where nobody knows."""
        if self.draws is None and start.others is not None:
            self.draws = have_moved(start.others)
