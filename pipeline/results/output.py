"""What is said when a run's folder cannot be written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class OutputError(OSError):
    """A run's folder cannot be written: which, why, and how to go on."""


@contextmanager
def writing(output: Path) -> Iterator[None]:
    """Write something to a run's folder.

    Raises:
        OutputError: in place of any `OSError`: no space, no permission, a disk that is gone.
    """
    try:
        yield
    except OutputError:
        raise
    except OSError as error:
        raise OutputError(
            f"output: {output} cannot be written: {error.strerror or error}. What is finished there "
            "is kept; make it writable and run the same command again to resume"
        ) from error
