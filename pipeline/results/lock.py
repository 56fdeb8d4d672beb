"""One run at a time in a folder.

The lock is the operating system's: it goes with the process that holds it, however that ends, so a
killed run leaves nothing to clean up.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout

from pipeline.config import JobError
from pipeline.results.output import writing


@contextmanager
def locked(output: Path) -> Iterator[None]:
    """Hold a run's folder.

    Raises:
        JobError: another process holds it; the message names that process.
        OutputError: it cannot be written.
    """
    holder = output / ".holder.json"
    with writing(output):
        output.mkdir(parents=True, exist_ok=True)
        lock = _acquired(output, holder)
    with lock:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        us = {"pid": os.getpid(), "host": socket.gethostname(), "since": now}
        try:
            with writing(output):
                holder.write_text(json.dumps(us), "utf-8")
            yield
        finally:
            holder.unlink(missing_ok=True)


def _acquired(output: Path, holder: Path) -> AbstractContextManager[object]:
    try:
        return FileLock(output / ".lock").acquire(timeout=0)
    except Timeout as error:
        raise JobError(
            f"output: {output} is in use by {_described(holder)}; wait until it ends, stop it, or "
            "choose another folder"
        ) from error


def _described(holder: Path) -> str:
    try:
        found = json.loads(holder.read_text("utf-8"))
        return f"process {found['pid']} on {found['host']} since {found['since']}"
    except (OSError, ValueError, KeyError):  # it is just being written
        return "another run"
