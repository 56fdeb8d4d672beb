"""Local data files: whether they are there, and JSON lines one line at a time.

`datasets` reads JSON in blocks, where one malformed line or lone surrogate ends the whole file.
Read line by line, it is one bad row.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pipeline.config import DatasetConfig, JobError, near_path

UNREADABLE = "__unreadable__"
"""Key of a row that stands for a line that is no JSON object; its value says why."""

_FORMATS = ("json", "csv", "parquet", "arrow", "text", "webdataset")


def check_location(config: DatasetConfig) -> None:
    """Refuse what is plainly not there before `datasets` asks the hub for it."""
    if is_file_format(config):
        _check_files(config)
    is_local = config.path.startswith((".", "/", "~"))
    if is_local and Path(config.path).expanduser().is_file():
        raise JobError(
            f"dataset.path: '{config.path}' is a file; name it in data_files, and its format in path"
        )
    if is_local and not Path(config.path).expanduser().exists():
        raise JobError(f"dataset.path: there is no folder '{config.path}'{near_path(config.path)}")
    if config.data_files and not Path(config.path).is_dir() and not is_file_format(config):
        near = difflib.get_close_matches(config.path, _FORMATS, n=1, cutoff=0.6)
        if near:
            raise JobError(f"dataset.path: no format '{config.path}'; did you mean '{near[0]}'?")


def is_file_format(config: DatasetConfig) -> bool:
    """Whether `path` is a format and `data_files` names the files.

    If not, `path` is a folder or a hub name, and `data_files` is relative to it.
    """
    return config.path in _FORMATS


def _check_files(config: DatasetConfig) -> None:
    if config.data_files is None:  # `datasets` would take all files of the working directory
        raise JobError(f"dataset.data_files is missing; name the {config.path} files")
    for key, given in (("name", config.name), ("revision", config.revision)):
        if given is not None:
            raise JobError(f"dataset.{key} is '{given}', but files have none; remove it")
    for pattern in _patterns(config):
        if "://" in pattern or glob_files(pattern):
            continue
        if Path(pattern).expanduser().is_dir():
            raise JobError(
                f"dataset.data_files: '{pattern}' is a folder; name its files, as in '{pattern}/*'"
            )
        raise JobError(
            f"dataset.data_files: there is no file '{pattern}'{near_path(pattern)}; "
            f"paths are relative to {Path.cwd()}"
        )


def _patterns(config: DatasetConfig) -> list[str]:
    """The `data_files` patterns that feed the split."""
    given = config.data_files
    if isinstance(given, dict):
        if config.split not in given and config.split.isidentifier():
            raise JobError(
                f"dataset.split is '{config.split}', but data_files has {', '.join(given)}"
            )
        given = given.get(config.split)
    if given is None:
        return []
    return [given] if isinstance(given, str) else list(given)


def glob_files(pattern: str) -> list[Path]:
    """The files that a local pattern names, sorted; `**` goes into folders."""
    path = Path(pattern).expanduser()
    root = Path(path.anchor)
    try:
        return sorted(file for file in root.glob(str(path.relative_to(root))) if file.is_file())
    except (ValueError, IndexError):  # what `glob` says to '.' and '**x'
        return []


def local_files(config: DatasetConfig) -> list[Path]:
    """The local data files that make up the whole split; none where that cannot be said."""
    patterns = _patterns(config)
    is_whole = isinstance(config.data_files, dict) or config.split == "train"
    if not is_file_format(config) or not is_whole or any("://" in pattern for pattern in patterns):
        return []
    return [file for pattern in patterns for file in glob_files(pattern)]


def json_lines_files(config: DatasetConfig) -> list[Path]:
    """The local files of JSON lines that make up the split; none if it is anything else."""
    files = local_files(config) if config.path == "json" else []
    return files if all(_has_json_lines(file) for file in files) else []


def _has_json_lines(file: Path) -> bool:
    """Whether each line is an object of its own, and not all of them items of one array."""
    if file.suffix not in {".jsonl", ".ndjson"}:
        return False
    with file.open("rb") as stream:
        return not re.match(rb"\s*\[\s*\{", stream.read(64))


def read_lines(files: Sequence[Path]) -> Iterator[dict[str, Any]]:
    """The objects of JSON lines files; a line that is none becomes an `UNREADABLE` row."""
    for file in files:
        with file.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    yield _read_line(line, f"line {number} of {file.name}")


def _read_line(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        return {UNREADABLE: f"{where} is not JSON: {error}"}
    return row if isinstance(row, dict) else {UNREADABLE: f"{where} is not an object"}


def count_lines(file: Path) -> int:
    """How many lines are not blank."""
    with file.open("rb") as stream:
        return sum(1 for line in stream if line.strip())
