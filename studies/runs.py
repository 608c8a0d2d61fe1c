"""What the studies share: runs side by side, none of them twice."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from gtracer.lab.config import Config


def run(settings: Config, folder: Path) -> dict[str, float]:
    """Train (once) and give the last epoch's row; a run that blew up has learnt nothing."""
    import torch

    from gtracer.lab.errors import DivergedError
    from gtracer.lab.training.trainer import train

    torch.set_num_threads(1)
    try:
        record = train(settings, folder, [], resume=None)
    except DivergedError:
        return {"test_accuracy": 0.0, "holdout_accuracy": 0.0, "diverged": 1.0}
    last: dict[str, float] = record.summary()["last"]
    return last


def everything(
    pool: ProcessPoolExecutor, cells: dict[tuple[Hashable, ...], Config], out: Path, order: Sequence[Hashable] = ()
) -> dict[tuple[Hashable, ...], dict[str, float]]:
    """Run all cells side by side, those first whose first word comes late in `order`."""
    ranked = sorted(cells, key=lambda cell: -order.index(cell[0]) if cell[0] in order else 1)
    waiting = {pool.submit(run, cells[cell], out / "-".join(map(str, cell))): cell for cell in ranked}
    rows = {}
    for done in as_completed(waiting):
        rows[waiting[done]] = done.result()
        print(f"{len(rows)}/{len(cells)} {waiting[done]} {rows[waiting[done]]['test_accuracy']:.3f}", flush=True)
    return rows
