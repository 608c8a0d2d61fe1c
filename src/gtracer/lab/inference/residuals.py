"""What a model of real numbers is worth: R², errors, and where they are."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from torch import Tensor

from gtracer.lab import files
from gtracer.lab.inference import figure

NAME = "evaluation.json"
PARTS = 5  # of the range of labels, by count


@dataclass(frozen=True)
class Residuals:
    """What a model made of examples whose labels are real numbers.

    Attributes:
        name: Of the label.
        labels: As they were given.
        predicted: By the model.
    """

    name: str
    labels: Tensor
    predicted: Tensor

    def summary(self) -> dict[str, Any]:
        """In plain values, for JSON. There is no R² where all labels are the same."""
        off = self.predicted - self.labels
        spread = (self.labels - self.labels.mean()).square().sum()
        return {
            "examples": len(off),
            "label": self.name,
            "r2": (1 - off.square().sum() / spread).item() if spread > 0 else None,
            "rmse": off.square().mean().sqrt().item(),
            "mae": off.abs().mean().item(),
            "bias": off.mean().item(),
            "parts": self.parts(),
        }

    def parts(self) -> list[dict[str, float]]:
        """The errors from the smallest labels to the largest, in parts of equal count."""
        order = self.labels.argsort(stable=True)
        rows = []
        for part in order.tensor_split(min(PARTS, len(order))):
            off = self.predicted[part] - self.labels[part]
            ends = {"from": self.labels[part[0]].item(), "to": self.labels[part[-1]].item()}
            errors = {"rmse": off.square().mean().sqrt().item(), "bias": off.mean().item()}
            rows.append({**ends, **errors, "examples": len(part)})
        return rows

    def table(self) -> Table:
        """The errors by the size of the label."""
        made = Table()
        for name in ("from", "to", "RMSE", "bias", "examples"):
            made.add_column(name, justify="right")
        for row in self.parts():
            made.add_row(*(f"{row[name]:.4g}" for name in ("from", "to", "rmse", "bias")), str(row["examples"]))
        return made

    def in_a_line(self) -> str:
        """What came out, in a line."""
        summary = self.summary()
        share = "no R² (all labels are the same)" if summary["r2"] is None else f"R² {summary['r2']:.3f}"
        return (
            f"{share}, RMSE {summary['rmse']:.4g}, mean absolute error {summary['mae']:.4g} "
            f"of {summary['examples']} examples"
        )

    def write(self, folder: Path) -> None:
        """The summary as JSON, and the two pictures."""
        content = json.dumps(self.summary(), indent=1, ensure_ascii=False) + "\n"
        files.write(folder / NAME, content.encode())
        figure.write(folder / "predicted.png", self._draw_predicted)
        figure.write(folder / "residuals.png", self._draw_residuals)

    def _draw_predicted(self, drawn: Any) -> None:
        axes = drawn.subplots()
        ends = [
            min(self.labels.min(), self.predicted.min()).item(),
            max(self.labels.max(), self.predicted.max()).item(),
        ]
        axes.plot(ends, ends, color="grey", linewidth=1)
        axes.scatter(self.labels, self.predicted, s=8, alpha=0.5, rasterized=True)
        axes.set(xlabel=figure.name(self.name), ylabel="predicted", title="Predicted against the label")

    def _draw_residuals(self, drawn: Any) -> None:
        axes = drawn.subplots()
        axes.hist((self.predicted - self.labels).numpy(), bins=40)
        axes.axvline(0, color="grey", linewidth=1)
        axes.set(xlabel=f"predicted − {figure.name(self.name)}", ylabel="examples", title="Errors")
