"""Benchmarks: each a ratio measured in one run, with median and spread.

    python -m tests.benchmarks            all of them
    python -m tests.benchmarks sharing    one

They are not part of the test suite: they take minutes and want an idle machine.
"""

from __future__ import annotations

import os

os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")

from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from tests.benchmarks import (
    engine,
    fleets,
    overlap,
    planning,
    ray_data,
    sharing,
    simulation,
    smollm2,
    vllm_cpu,
)
from tests.benchmarks.ratio import Skipped

BENCHMARKS = {
    "sharing": sharing.measure,
    "overlap": overlap.measure,
    "engine": engine.measure,
    "ray_data": ray_data.measure,
    "smollm2": smollm2.measure,
    "vllm_cpu": vllm_cpu.measure,
    "simulation": simulation.measure,
    "fleets": fleets.measure,
    "planning": planning.measure,
}


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Which; none is all.")] = None,
) -> None:
    """Run benchmarks and print their ratios."""
    torch.set_num_threads(1)
    table = Table("benchmark", "ratio of", "median", "smallest", "largest", "runs", "target")
    for name in names or BENCHMARKS:
        try:
            for ratio in BENCHMARKS[name]():
                table.add_row(name, *ratio.cells())
        except Skipped as reason:
            print(f"{name} is skipped: {reason}")
    Console(width=150).print(table)


if __name__ == "__main__":
    typer.run(main)
