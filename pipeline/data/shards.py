"""From `datasets` to shards: load, number the rows, cut them into leases.

Rows are numbered by their place in the split, so an example keeps its id whatever the shard size.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import datasets
import pyarrow.parquet as pq

from pipeline.config import DatasetConfig, JobError, all_of, one_line
from pipeline.data.files import (
    UNREADABLE,
    check_location,
    count_lines,
    json_lines_files,
    local_files,
    read_lines,
)
from pipeline.data.prompts import PromptReader, Row, message_templates
from pipeline.records import Example, RowError, Shard

_PEEK = 100


def load_rows(config: DatasetConfig) -> Iterable[dict[str, Any]]:
    """The rows of the split: what `datasets.load_dataset` gives, streaming if the job says so.

    Local files of JSON lines are read line by line instead, so that one bad line is one bad row.

    Raises:
        JobError: a file, folder, hub name or split is not there.
    """
    check_location(config)
    lines = json_lines_files(config)
    if lines:
        return read_lines(lines)
    try:
        rows: Iterable[dict[str, Any]] = datasets.load_dataset(
            config.path,
            name=config.name,
            data_files=config.data_files,
            revision=config.revision,
            split=config.split,
            streaming=config.streaming,
        )
    except Exception as error:  # whatever a builder or a file system of `datasets` raises
        raise JobError(
            f"dataset.path: {config.path!r} cannot be loaded: {one_line(error)}"
        ) from error
    return rows


def check_dataset(config: DatasetConfig) -> tuple[str, ...]:
    """Look at the first rows and hold the job's column names to them; the columns come back.

    Raises:
        JobError: no rows, or `prompt`, `messages`, `references` or `id` name no column.
    """
    templates = message_templates(config)
    first = [row for _, row in itertools.islice(_numbered(config), _PEEK)]
    if not first:
        raise JobError(
            f"dataset: split '{config.split}' of {config.data_files or config.path} has no rows"
        )
    columns = tuple(dict.fromkeys(key for row in first for key in row if key != UNREADABLE))
    if not columns:
        problems = [row[UNREADABLE] for row in first if UNREADABLE in row] or ["rows are empty"]
        raise JobError(f"dataset.data_files: no row can be read: {problems[0]}")
    used = [(template.field, name) for _, template in templates for name in template.columns]
    if not used:
        raise JobError(
            f"{templates[-1][1].field} is {templates[-1][1].text!r}, which names no column, so all "
            "prompts would be alike; write one in braces, as in '{text}'"
        )
    given = [("dataset.references", config.references), ("dataset.id", config.id)]
    named = used + [(field, name) for field, name in given if name is not None]
    all_of([partial(_check_column, field, name, columns) for field, name in named])
    _check_ids(config, first)
    return columns


def count_examples(config: DatasetConfig) -> int | None:
    """How many examples the run will have, or None where counting would mean reading them all."""
    total = _count_rows(config)
    if total is None or config.limit is None:
        return total
    return min(total, config.limit)


def iter_shards(
    config: DatasetConfig, reader: PromptReader, skip: Collection[int] = ()
) -> Iterator[Shard]:
    """The shards of the dataset in order, read as they are asked for.

    Shards whose index is in `skip` are read past, without tokenizing.
    """
    numbered = itertools.islice(_numbered(config), config.limit)
    ids = _Ids(config.id)
    for index in itertools.count():
        rows = list(itertools.islice(numbered, config.shard_size))
        if not rows:
            return
        named = [(ids.name(position, row), row) for position, row in rows]
        if index not in skip:
            yield Shard(index, tuple(_example(reader, name, row) for name, row in named))


def _numbered(config: DatasetConfig) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows with their places in the split. Raises `JobError` where one cannot be read at all."""
    place = 0
    try:
        for row in load_rows(config):
            yield place, row
            place += 1
    except JobError:
        raise
    except Exception as error:  # as when loading; a broken archive says EOFError, for one
        raise JobError(
            f"dataset.path: {config.path!r} cannot be read behind {place} rows: {one_line(error)}; "
            "mend the file, or set dataset.limit"
        ) from error


class _Ids:
    """Gives each row its id and notices a second use of one."""

    def __init__(self, column: str | None) -> None:
        self._column = column
        self._seen: set[str] = set()

    def name(self, position: int, row: Row) -> tuple[str, RowError | None]:
        """The id of a row, and what is wrong with it; a row without a usable id is `#position`."""
        if self._column is None:
            return str(position), None
        value = row.get(self._column)
        problem = _id_problem(value)
        if problem is None and str(value) in self._seen:
            problem = RowError("duplicate_id", f"id {str(value)!r} was used by an earlier row")
        name = str(value) if problem is None else f"#{position}"
        while name in self._seen:  # an earlier row was called so by its own id
            name = f"#{name}"
        self._seen.add(name)
        return name, problem


def _id_problem(value: Any) -> RowError | None:
    if value is None or value == "":
        return RowError("missing_id", "the row has no id")
    if isinstance(value, bool) or not isinstance(value, str | int):
        return RowError(
            "wrong_type", f"the id is a {type(value).__name__}, not text or a whole number"
        )
    if not str(value).isprintable():
        return RowError("bad_unicode", "the id holds characters that cannot be printed")
    return None


def _example(reader: PromptReader, name: tuple[str, RowError | None], row: Row) -> Example:
    example_id, problem = name
    if UNREADABLE in row:
        problem = RowError("unreadable_row", str(row[UNREADABLE]))
    if problem is not None:
        return Example(example_id, None, (), (), problem)
    return reader.read(example_id, row)


def _check_column(field: str, name: str, columns: Sequence[str]) -> None:
    if name in columns:
        return
    near = difflib.get_close_matches(name, columns, n=1, cutoff=0.5)
    remedy = f"; did you mean {near[0]!r}?" if near else ""
    there = ", ".join(column if column.isprintable() else ascii(column) for column in columns)
    raise JobError(f"{field} names a column {name!r}, but there are {there}{remedy}")


def _check_ids(config: DatasetConfig, rows: Sequence[Row]) -> None:
    """Refuse a column that is no id at all; a later row with a bad id is that row's error."""
    if config.id is None:
        return
    values = [row.get(config.id) for row in rows if UNREADABLE not in row]
    for value in values:
        if _id_problem(value) is not None or values.count(value) > 1:
            raise JobError(
                f"dataset.id: column '{config.id}' holds {value!r}; ids must be unique, not null"
            )


def _count_rows(config: DatasetConfig) -> int | None:
    lines = json_lines_files(config)
    if lines:
        return sum(count_lines(file) for file in lines)
    if config.path == "parquet" and local_files(config):
        return sum(int(pq.read_metadata(file).num_rows) for file in local_files(config))
    rows: Any = load_rows(config)
    if isinstance(rows, datasets.Dataset):
        return len(rows)
    splits = rows.info.splits or {}
    return splits[config.split].num_examples if config.split in splits else None
