"""skorch: a callback that tells the optimiser what a net of skorch's knows."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

from skorch.callbacks import Callback
from torch import nn

from gtracer.optim import TwoPassOptimizer


class TracerCallback(Callback):  # type: ignore[misc]
    """Lets the second pass leave batch-norm statistics alone, and `rho="auto"` know the length of an epoch.

        net = NeuralNetClassifier(module, optimizer=SGDTracer, callbacks=[TracerCallback()])

    skorch makes the optimiser of the module's parameters, so that its `model=` cannot be given before.
    """

    def on_train_begin(self, net: Any, X: Any = None, y: Any = None, **rest: Any) -> None:
        """Give every optimiser of gtracer its `model`, unless it has one."""
        for opt in _two_pass(net):
            if opt.model is None:
                opt.model = nn.ModuleList([getattr(net, f"{name}_") for name in (*net._modules, *net._criteria)])

    def on_epoch_begin(self, net: Any, dataset_train: Any = None, dataset_valid: Any = None, **rest: Any) -> None:
        """Give it the length of an epoch, unless it has one."""
        batches = net.get_iterator(dataset_train, training=True)
        for opt in _two_pass(net):
            if opt.steps_per_epoch is None and isinstance(batches, Sized):
                opt.steps_per_epoch = len(batches)


def _two_pass(net: Any) -> list[TwoPassOptimizer]:
    found = (getattr(net, f"{name}_") for name in net._optimizers)
    return [opt for opt in found if isinstance(opt, TwoPassOptimizer)]


__all__ = ["TracerCallback"]
