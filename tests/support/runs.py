"""A small run, and Ctrl-C after so many of its steps."""

import os
import signal

from gtracer.lab.config import Config

SMALL = Config(label_noise=0.5, epochs=3, width=16, rho=0.01, batch_size=256)


class StopAfter:
    """Presses Ctrl-C after so many steps."""

    def __init__(self, steps):
        self.left = steps

    def step(self, run, loss):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGINT)

    def epoch(self, run, row):
        pass
