"""Functions on several processes: with a time limit, and leaving none behind."""

import atexit
import io
import multiprocessing
import queue
import socket
import time
import traceback
from contextlib import suppress

import torch
from torch import distributed

SECONDS = 300  # on a machine that does ten other things
_groups = {}  # kept for the next call: to start a process takes seconds


def together(function, *words, world=2, seconds=SECONDS):
    """What `function(rank, *words)` returns in each process of a gloo group."""
    group = _groups.pop(world, None)
    if group is None or not all(worker.is_alive() for worker in group.workers):  # other tests may kill all children
        group = Group(world)
    try:
        found = group.call(function, words, seconds)
    except BaseException:
        group.kill()
        raise
    _groups[world] = group
    return found


@atexit.register
def end():
    """End all processes."""
    while _groups:
        _groups.popitem()[1].kill()


class Group:
    def __init__(self, world):
        context = multiprocessing.get_context("spawn")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.answers, self.tasks = context.Queue(), [context.Queue() for _ in range(world)]
        self.workers = [
            context.Process(target=_work, args=(rank, world, port, tasks, self.answers), daemon=True)
            for rank, tasks in enumerate(self.tasks)
        ]
        for worker in self.workers:
            worker.start()

    def call(self, function, words, seconds):
        for tasks in self.tasks:
            tasks.put((function, words))
        found, last = {}, time.monotonic() + seconds
        while len(found) < len(self.workers):
            try:
                rank, failure, answer = self.answers.get(timeout=max(0.1, last - time.monotonic()))
            except queue.Empty:
                raise TimeoutError(f"only {sorted(found)} of {len(self.workers)} processes answered") from None
            if failure:
                raise AssertionError(f"process {rank}: {failure}")
            found[rank] = torch.load(io.BytesIO(answer), weights_only=False)
        return [found[rank] for rank in range(len(self.workers))]

    def kill(self):
        for worker in self.workers:
            worker.kill()
            worker.join()


def _work(rank, world, port, tasks, answers):
    torch.set_num_threads(1)
    store = distributed.TCPStore("127.0.0.1", port, world, is_master=rank == 0)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=world)
    while multiprocessing.parent_process().is_alive():
        with suppress(queue.Empty):
            _answer(rank, *tasks.get(timeout=5), answers)


def _answer(rank, function, words, answers):
    try:
        content = io.BytesIO()
        torch.save(function(rank, *words), content)
        answers.put((rank, None, content.getvalue()))
    except BaseException:
        answers.put((rank, traceback.format_exc(), None))
