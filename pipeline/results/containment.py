"""Everything that a run or a report writes lies below its folder, whatever somebody put there before."""

from __future__ import annotations

import re
from itertools import chain
from pathlib import Path

from pipeline.config import JobError
from pipeline.results.writer import rows_folder


def check_contained(output: Path) -> None:
    """Refuse a folder that a symbolic link in it leads out of. The folder itself may be a link.

    Raises:
        JobError: names the link.
    """
    inside = output.resolve()
    for path in chain(output.glob("*"), rows_folder(output).glob("*")):
        if path.is_symlink() and not path.resolve().is_relative_to(inside):
            raise JobError(
                f"output: {path} is a symbolic link out of the folder; remove it, or choose another "
                "folder"
            )


def file_part(text: str) -> str:
    """A text as part of a file's name: a metric may be called as its path."""
    return re.sub(r"[^\w.-]+", "_", text)
