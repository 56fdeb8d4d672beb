"""What the workers did when, as a file that trace viewers open.

The format is Chrome's Trace Event Format (complete events, microseconds), read by Perfetto,
chrome://tracing and the profile viewers of the common frameworks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pipeline.records import Span

_MODEL = "model"


def write_timeline(path: Path, spans: Sequence[Span]) -> None:
    """Write spans as one JSON file; each worker is a process with a row for its model and one a bank."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"traceEvents": list(_events(spans))}), encoding="utf-8")


def _events(spans: Sequence[Span]) -> Iterator[dict[str, Any]]:
    begin = min((span.start for span in spans), default=0.0)
    workers = sorted({span.worker for span in spans})
    rows = {worker: _rows(worker, spans) for worker in workers}
    for pid, worker in enumerate(workers):
        yield _named("process_name", worker, pid, 0)
        for row, tid in rows[worker].items():
            yield _named("thread_name", row, pid, tid)
    for span in spans:
        yield {
            "name": span.act,
            "ph": "X",
            "pid": workers.index(span.worker),
            "tid": rows[span.worker][_row(span)],
            "ts": (span.start - begin) * 1e6,
            "dur": span.seconds * 1e6,
            "args": {"bank": span.bank},
        }


def _rows(worker: str, spans: Sequence[Span]) -> dict[str, int]:
    found = sorted({_row(span) for span in spans if span.worker == worker} - {_MODEL})
    return {row: tid for tid, row in enumerate([_MODEL, *found])}


def _row(span: Span) -> str:
    """Model work is one thing at a time; blocks of several banks are in flight at once."""
    return f"{span.bank} in flight" if span.act == "in flight" else _MODEL


def _named(kind: str, name: str, pid: int, tid: int) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
