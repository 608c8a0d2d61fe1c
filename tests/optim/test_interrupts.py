"""Ctrl-C at any line of a step, and at random moments: what is left is a whole step, before or after.

Two ways of coming between: a trace that raises the signal at a given line of the library, and a timer.
"""

import random
import signal
import sys
import threading
import types

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from gtracer import SAM, AdamWTracer, FiniteDifference, SGDTracer, Tracer
from gtracer.curvature import micro_batch, per_example
from gtracer.scopes import uninterrupted

TRACER = {"rho": 0.02, "delta": 0.05}
MAKERS = {
    "sgd": lambda m: SGDTracer(m.parameters(), lr=0.1, momentum=0.9, nesterov=True, model=m, **TRACER),
    "adamw": lambda m: AdamWTracer(m.parameters(), lr=0.01, model=m, **TRACER),
    "rmsprop, reused": lambda m: Tracer(
        torch.optim.RMSprop(m.parameters(), lr=0.01), interval=2, reuse=0.5, model=m, **TRACER
    ),
    "no copy": lambda m: SGDTracer(m.parameters(), lr=0.1, momentum=0.9, implementation="compiled", model=m, **TRACER),
    "central": lambda m: SGDTracer(m.parameters(), lr=0.1, engine=FiniteDifference(central=True), model=m, **TRACER),
    "exact": lambda m: SGDTracer(m.parameters(), lr=0.1, engine="exact", scale_free=True, model=m, **TRACER),
    "micro-batches": lambda m: SGDTracer(m.parameters(), lr=0.1, curvature=micro_batch(3), model=m, **TRACER),
    "f per example": lambda m: SGDTracer(m.parameters(), lr=0.1, average=per_example, model=m, **TRACER),
    "sam": lambda m: SAM(torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9), rho=0.1, model=m),
}


@pytest.fixture(autouse=True)
def ctrl_c(monkeypatch):
    """Python's own handler, whatever the tests were started by; and nothing is compiled."""
    monkeypatch.setattr("gtracer.optim.compiler.compiled", lambda function: function)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Training:
    """A net with statistics and dropout, after one step; the next one is to be interrupted."""

    def __init__(self, name):
        torch.manual_seed(0)
        norm = [] if name == "f per example" else [nn.BatchNorm1d(7)]
        self.model = nn.Sequential(nn.Linear(5, 7), *norm, nn.Dropout(0.3), nn.Linear(7, 3)).double()
        self.opt = MAKERS[name](self.model)
        self.x, self.y = torch.randn(6, 5).double(), torch.arange(6) % 3
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        self.step()

    def loss_of(self, x, y):
        return cross_entropy(self.model(x), y)

    def step(self):
        self.opt.step(self.loss_of, self.x, self.y)

    def scaled_step(self):
        self.opt.step(self.loss_of, self.x, self.y, scaler=self.scaler)
        self.scaler.update()

    def loop(self):
        self.opt.zero_grad()
        self.loss_of(self.x, self.y).backward()
        for _ in range(1 + self.opt.is_central):
            with self.opt.perturbed():
                self.loss_of(self.x, self.y).backward()
        self.opt.step()

    def weights_and_state(self):
        parts = {("weights", i): p.detach().clone() for i, p in enumerate(self.model.parameters())}
        state = self.opt.state_dict()["state"]
        parts |= {(i, k): torch.as_tensor(v).clone() for i, s in state.items() for k, v in s.items()}
        return parts | {"count": torch.tensor(self.opt.param_groups[0]["gtracer_step"])}

    def everything(self):
        buffers = {("buffer", name): b.clone() for name, b in self.model.named_buffers()}
        return self.weights_and_state() | buffers | {"random": torch.get_rng_state()}


def same(a, b, tolerance=0.0):
    return a.keys() == b.keys() and all(
        torch.allclose(v.double(), b[k].double(), rtol=0, atol=tolerance if k[0] == "weights" else 0)
        for k, v in a.items()
    )


class AtLine:
    """Raises SIGINT at the n-th line of the library that is run inside; keeps which lines there were."""

    def __init__(self, number=0):
        self.number, self.lines = number, []

    def __call__(self, frame, event, arg):
        if not frame.f_globals.get("__name__", "").startswith("gtracer"):
            return None
        if event == "line":
            self.lines.append((frame.f_code.co_filename, frame.f_lineno))
            if len(self.lines) == self.number:
                signal.raise_signal(signal.SIGINT)
        return self

    def __enter__(self):
        sys.settrace(self)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def numbers(self):
        """When each line came for the first and for the last time."""
        last = {line: i for i, line in enumerate(self.lines, 1)}
        first = {line: i for i, line in reversed(list(enumerate(self.lines, 1)))}
        return sorted({*first.values(), *last.values()})


def interrupted(name, how, at):
    """What is left, and whether the signal came out."""
    training = Training(name)
    torch.manual_seed(1)
    came = False
    try:
        with at:
            getattr(training, how)()
    except KeyboardInterrupt:
        came = True
    return training, came


QUICK = ["sgd", "no copy"]
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in MAKERS if name not in QUICK]


@pytest.mark.parametrize("name", [*QUICK, *OTHERS])
def test_at_every_line_of_a_step(name):
    """With a closure: weights, state, buffers and random numbers are those of before or of after; and it goes on."""
    lines = AtLine()
    whole, _ = interrupted(name, "step", lines)
    after, tolerance = whole.everything(), 1e-12 if name == "no copy" else 0.0
    start = Training(name)
    torch.manual_seed(1)
    before = start.everything()
    assert len(lines.numbers()) > 200
    ends = set()
    for number in lines.numbers():
        training, came = interrupted(name, "step", AtLine(number))
        found = training.everything()
        assert came, number
        ends.add(same(found, after, tolerance))
        assert same(found, before, tolerance) or same(found, after, tolerance), number
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if number % 40 == 0:
            training.step()
    assert ends == {False, True}


@pytest.mark.parametrize(
    "name", ["sgd", *[pytest.param(n, marks=pytest.mark.slow) for n in ("adamw", "no copy", "central", "sam")]]
)
def test_at_every_line_of_a_loop(name):
    """Without one the first pass, its statistics and its random numbers are the caller's own."""
    lines = AtLine()
    whole, _ = interrupted(name, "loop", lines)
    after, before = whole.weights_and_state(), Training(name).weights_and_state()
    tolerance = 1e-12 if name == "no copy" else 0.0
    for number in lines.numbers():
        training, came = interrupted(name, "loop", AtLine(number))
        found = training.weights_and_state()
        assert came, number
        assert same(found, before, tolerance) or same(found, after, tolerance), number
        if number % 40 == 0:
            training.loop()


@pytest.mark.slow
def test_at_every_line_of_a_scaled_step():
    lines = AtLine()
    whole, _ = interrupted("sgd", "scaled_step", lines)
    after, before = whole.weights_and_state(), Training("sgd").weights_and_state()
    for number in lines.numbers():
        found = interrupted("sgd", "scaled_step", AtLine(number))[0].weights_and_state()
        assert same(found, before) or same(found, after), number


class AtTime:
    """Raises SIGINT after so many seconds, whatever runs then."""

    def __init__(self, seconds):
        self.seconds = seconds

    def __enter__(self):
        self.before = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
        signal.setitimer(signal.ITIMER_REAL, self.seconds)

    def __exit__(self, *_):
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self.before)


def at_random(count):
    chance = random.Random(0)
    finished = 0
    for _ in range(count):
        name, how = chance.choice(list(MAKERS)), chance.choice(["step", "loop"])
        if how == "loop" and name in ("exact", "micro-batches", "f per example"):
            how = "step"
        training, start = Training(name), Training(name)
        torch.manual_seed(1)
        before = start.weights_and_state()
        try:
            with AtTime(chance.uniform(1e-5, 6e-3)):
                getattr(training, how)()
        except KeyboardInterrupt:
            pass
        found = training.weights_and_state()
        whole, _ = interrupted(name, how, AtLine())
        tolerance = 1e-12 if name == "no copy" else 0.0
        done = same(found, whole.weights_and_state(), tolerance)
        assert done or same(found, before, tolerance), (name, how)
        finished += done
    assert 0 < finished < count


# One that comes in torch's own weak references is Python's to report.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_at_random_moments():
    at_random(100)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_at_two_thousand_random_moments():
    at_random(2000)


def test_one_that_is_held_back_comes_at_the_end():
    done = []

    def work():
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            done.append("the rest")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done


def test_another_handler_of_the_callers_own_is_kept():
    """Set inside the closure, it stays; set outside, it is asked instead of Python's."""
    seen = []
    signal.signal(signal.SIGINT, lambda *_: seen.append("outer"))
    with uninterrupted() as signals:
        signal.raise_signal(signal.SIGINT)
        assert not seen
        with signals.opened():
            signal.raise_signal(signal.SIGINT)
        assert seen == ["outer"]
    assert seen == ["outer", "outer"]
    with uninterrupted():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


@pytest.mark.parametrize("name", ["contextlib", "gtracer.scopes", "gtracer.tensors", "gtracer.optim.step"])
def test_one_that_meets_a_scope_on_its_way_in_or_out_waits(name):
    """Even where the caller's code may be interrupted: raised there, it would pass the scope's clean-up by."""
    seen = []
    scopes, callers = (types.FunctionType(frame_of.__code__, {"__name__": at, "sys": sys})() for at in (name, "train"))
    signal.signal(signal.SIGINT, lambda number, frame: seen.append(frame))
    with uninterrupted() as signals:
        with signals.opened():
            signals(signal.SIGINT, callers)
            signals(signal.SIGINT, scopes)
        assert seen == [callers]
    assert seen == [callers, scopes]


def frame_of():
    """That of a function in any module: of whose globals it is called with."""
    return sys._getframe()


def test_where_there_are_no_signals_nothing_is_touched():
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as for a job that a shell has put into the background
    with uninterrupted():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    signal.signal(signal.SIGINT, signal.default_int_handler)
    handlers = []

    def in_a_thread():
        training = Training("sgd")
        training.step()
        with uninterrupted():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()
    assert handlers == [signal.default_int_handler]
