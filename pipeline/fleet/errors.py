"""What ends a run before its time, and what an error of Ray says in one line."""

from __future__ import annotations

from pipeline.config import JobError


class StartError(JobError):
    """A worker cannot be started: says which, with what, and why."""


class FleetLostError(RuntimeError):
    """No drafter is left; what is written is kept, and the run can be resumed."""


def one_line(error: BaseException) -> str:
    """What an error says. Ray puts tracebacks into its messages; what follows them is the cause."""
    lines = str(error).strip().splitlines()
    indented = [number for number, line in enumerate(lines) if line[:1].isspace()]
    cause = lines[indented[-1] + 1 :] if indented else lines
    return " ".join(" ".join(cause or lines[-1:]).split()) or type(error).__name__
