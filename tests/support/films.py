"""Texts of all lengths, and a run on them."""

from dataclasses import replace

import torch

from gtracer.lab.config import Config
from support.encoders import tiny_bert


def films(folder, count=60, longest=90):
    """Films of all lengths; good ones are good."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    rows = [f"{'good' if i % 2 else 'bad'} {'very ' * n}film,{i % 2}" for i, n in enumerate(lengths)]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "films.csv").write_text("\n".join(["text,label", *rows]))
    return str(folder / "films.csv")


def config(folder, **own):
    base = Config(task=films(folder), model=str(tiny_bert(folder / "bert")), optimizer="adamw-tracer", lr=1e-3)
    return replace(base, rho=0.003, delta=0.01, epochs=3, batch_size=8, schedule="linear", device="cpu", **own)
