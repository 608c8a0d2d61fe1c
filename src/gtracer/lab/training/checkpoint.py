"""A run's checkpoint: everything that changes while training, written whole or not at all."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import torch

from gtracer.lab import files
from gtracer.lab.errors import LabError
from gtracer.lab.training.run import Run

NAME = "checkpoint.pt"
COUNTS = ("epoch", "step", "sums", "seconds")


def save(run: Run, folder: Path, results: dict[str, Any]) -> None:
    """Write it, with the results so far."""
    random = {"cpu": torch.get_rng_state()}
    if run.device.type == "cuda":
        random["cuda"] = torch.cuda.get_rng_state(run.device)
    if run.generator is not None:
        random["own"] = run.generator.get_state()
    everyone = run.processes.all(random)
    if not run.processes.is_first:
        return
    state = {name: part.state_dict() for name, part in _parts(run).items()}
    state |= {"random": everyone, "results": results}
    state |= {name: getattr(run, name) for name in COUNTS}
    buffer = BytesIO()
    torch.save(state, buffer)
    files.write(folder / NAME, buffer.getvalue())


def load(run: Run, folder: Path) -> dict[str, Any]:
    """Go on where `save` left off; gives the results it was handed."""
    path = folder / NAME
    content = files.read(path)
    try:
        state = torch.load(BytesIO(content), map_location=run.device, weights_only=True)
        if not isinstance(state, dict):
            raise ValueError(f"it holds a {type(state).__name__}")
        for name, part in _parts(run).items():
            part.load_state_dict(state[name])
        for name in COUNTS:
            setattr(run, name, state[name])
        if len(state["random"]) != run.processes.world:
            raise ValueError(f"{len(state['random'])} processes, not {run.processes.world}, wrote it")
        random = state["random"][run.processes.rank]
        torch.set_rng_state(random["cpu"].cpu())
        if run.device.type == "cuda":
            torch.cuda.set_rng_state(random["cuda"].cpu(), run.device)
        if run.generator is not None:
            run.generator.set_state(random["own"].cpu())
        results: dict[str, Any] = state["results"]
        if len(results["seconds"]) != run.epoch:
            raise ValueError(
                f"it has results of {len(results['seconds'])} epochs, the model was trained for {run.epoch}"
            )
        return results
    except Exception as error:  # whatever pickle and load_state_dict come across
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise LabError(f"{path} is damaged or of another run ({first}): remove it to start over") from error


def _parts(run: Run) -> dict[str, Any]:
    parts = {"model": run.model, "optimizer": run.optimizer, "schedule": run.schedule}
    some = {"rho_schedule": run.rho_schedule, "average": run.average}
    return parts | {name: part for name, part in some.items() if part is not None}
