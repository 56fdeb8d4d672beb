"""Shows a run: a progress bar with the time left, a line and a log entry for each validation."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


@dataclass(frozen=True)
class Measured:
    """Where a run stands; likelihoods are per target token, acceptance is teacher forced."""

    step: int
    seconds: float
    train_nll: float
    verifier_nll: float
    drafter_nll: float
    acceptance: float


class Screen:
    """The first process's view of a run, as a context manager; the others stay silent."""

    def __init__(self, log: Path, steps: int, silent: bool) -> None:
        self.log, self.silent = log, silent
        self.bar = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:.3f}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=Console(),
            disable=silent,
        )
        self.task = self.bar.add_task("steps", total=steps, loss=float("nan"))

    def __enter__(self) -> "Screen":
        self.bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.bar.stop()

    def stepped(self, loss: float) -> None:
        """Moves the bar on by one step; in a log file, where no bar shows, a line every 50 steps."""
        self.bar.update(self.task, advance=1, loss=loss)
        done = int(self.bar.tasks[self.task].completed)
        if not self.silent and not self.bar.console.is_terminal and done % 50 == 0:
            self.bar.console.print(f"step {done}: loss {loss:.3f}", soft_wrap=True)

    def validated(self, measured: Measured) -> None:
        """Prints and logs a validation."""
        if self.silent:
            return
        self.bar.console.print(
            f"step {measured.step}, {measured.seconds:.0f} s: train {measured.train_nll:.3f}, "
            f"validation verifier {measured.verifier_nll:.3f}, "
            f"drafter {measured.drafter_nll:.3f}, acceptance {measured.acceptance:.3f}",
            soft_wrap=True,
        )
        with self.log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(measured)) + "\n")
