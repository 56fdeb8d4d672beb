"""Datasets to shards: ids, limits, resuming, and mistakes refused at the door."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config import DatasetConfig, JobError
from pipeline.data import shards
from pipeline.data.prompts import PromptReader
from pipeline.data.shards import check_dataset, count_examples, iter_shards
from pipeline.records import Example


class Letters:
    """A tokenizer that counts how often it is asked."""

    bos_token_id = None
    eos_token_id = None
    chat_template = None

    def __init__(self) -> None:
        self.calls = 0

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        self.calls += 1
        return [ord(letter) for letter in text]

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        raise NotImplementedError


ROWS = [{"key": f"k{i}", "en": f"text {i}", "de": f"Text {i}"} for i in range(10)]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".csv":
        with path.open("w", newline="") as stream:
            writer = csv.DictWriter(stream, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def config(files: Any, path: str = "json", **given: Any) -> DatasetConfig:
    return DatasetConfig(
        **{"path": path, "data_files": files, "prompt": "{en}", "references": "de", **given}
    )


def read(dataset: DatasetConfig, skip: set[int] | None = None) -> list[Example]:
    found = iter_shards(dataset, PromptReader(dataset, Letters()), skip or ())
    return [example for shard in found for example in shard.examples]


@pytest.fixture
def jsonl(tmp_path: Path) -> str:
    return write(tmp_path / "data.jsonl", ROWS)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet"])
def test_every_local_format_gives_the_same_examples(
    suffix: str, streaming: bool, tmp_path: Path
) -> None:
    file = write(tmp_path / f"data.{suffix}", ROWS)
    builder = {"jsonl": "json"}.get(suffix, suffix)
    dataset = config(file, builder, streaming=streaming, shard_size=4)
    assert check_dataset(dataset) == ("key", "en", "de")
    examples = read(dataset)
    assert [example.example_id for example in examples] == [str(i) for i in range(10)]
    assert [example.prompt for example in examples] == [row["en"] for row in ROWS]
    assert examples[3].references == ("Text 3",)


def test_a_folder_is_a_dataset_and_splits_are_named(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", ROWS[:2])
    write(tmp_path / "test.jsonl", ROWS[2:5])
    dataset = config(None, str(tmp_path), split="test")
    assert [example.prompt for example in read(dataset)] == ["text 2", "text 3", "text 4"]
    named = config(
        {"a": str(tmp_path / "train.jsonl"), "b": str(tmp_path / "t*t.jsonl")}, split="b"
    )
    assert count_examples(named) == 3
    with pytest.raises(JobError, match=r"dataset\.split is 'c', but data_files has a, b"):
        check_dataset(named.model_copy(update={"split": "c"}))


@pytest.mark.parametrize("size", [1, 3, 10, 256])
def test_ids_do_not_depend_on_the_shard_size(jsonl: str, size: int) -> None:
    dataset = config(jsonl, shard_size=size)
    found = list(iter_shards(dataset, PromptReader(dataset, Letters())))
    assert [shard.index for shard in found] == list(range(-(-10 // size)))
    assert [e.example_id for shard in found for e in shard.examples] == [str(i) for i in range(10)]


@pytest.mark.parametrize(("limit", "expected"), [(None, 10), (7, 7), (50, 10)])
def test_the_limit_holds_and_is_counted(jsonl: str, limit: int | None, expected: int) -> None:
    dataset = config(jsonl, limit=limit, shard_size=3)
    assert len(read(dataset)) == expected
    assert count_examples(dataset) == expected


def test_skipped_shards_are_not_tokenized(jsonl: str) -> None:
    dataset, tokenizer = config(jsonl, shard_size=3, id="key"), Letters()
    found = list(iter_shards(dataset, PromptReader(dataset, tokenizer), skip={0, 2}))
    assert [(shard.index, shard.examples[0].example_id) for shard in found] == [
        (1, "k3"),
        (3, "k9"),
    ]
    assert tokenizer.calls == 4


def test_shards_are_read_as_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []

    def endless(_: DatasetConfig) -> Iterator[dict[str, Any]]:
        for i in range(10**9):
            taken.append(i)
            yield {"en": "x", "de": "y"}

    monkeypatch.setattr(shards, "load_rows", endless)
    dataset = config(None, shard_size=4)
    found = iter_shards(dataset, PromptReader(dataset, Letters()))
    next(found), next(found)
    assert len(taken) == 8


def test_bad_lines_are_bad_rows_and_the_others_are_as_in_a_clean_file(tmp_path: Path) -> None:
    good = [json.dumps(row) for row in ROWS]
    bad = ['{"en": "x\\ud800"}', '{"en": nul', "[1, 2]", '{"de": "only"}', '{"en": 3.5, "de": []}']
    file = tmp_path / "mixed.jsonl"
    file.write_text("\n".join([*good[:5], *bad, "", *good[5:]]))
    dataset = config(str(file), id=None)
    check_dataset(dataset)
    examples = read(dataset)
    codes = [example.error.code for example in examples if example.error]
    assert codes == ["bad_unicode", "unreadable_row", "unreadable_row", "missing_field"]
    assert len(examples) == 15 == count_examples(dataset)
    clean = [example for example in examples if not example.error and example.prompt != "3.5"]
    assert [example.prompt for example in clean] == [row["en"] for row in ROWS]


def test_a_late_bad_id_is_that_rows_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "_PEEK", 10)
    late = [{"key": "k3", "en": "a", "de": "b"}, {"key": None, "en": "a", "de": "b"}]
    dataset = config(write(tmp_path / "d.jsonl", [*ROWS, *late]), id="key", shard_size=4)
    check_dataset(dataset)
    examples = read(dataset)
    assert [example.example_id for example in examples[-3:]] == ["k9", "#10", "#11"]
    assert [e.error.code for e in examples if e.error] == ["duplicate_id", "missing_id"]


MISTAKES = {
    r"dataset\.prompt names a column 'eng', but there are key, en, de; did you mean 'en'": {
        "prompt": "{eng}"
    },
    r"dataset\.messages\.0\.content names a column 'eng'": {
        "prompt": None,
        "messages": [{"role": "user", "content": "{eng}"}],
    },
    r"dataset\.references names a column 'dee', .*did you mean 'de'": {"references": "dee"},
    r"dataset\.id names a column 'ky', .*did you mean 'key'": {"id": "ky"},
    r"dataset\.id: column 'same' holds 1; ids must be unique": {"id": "same"},
    r"dataset\.path: no format 'jsonl'; did you mean 'json'": {"path": "jsonl"},
    r"dataset\.path: there is no folder './nowhere'": {"path": "./nowhere", "data_files": None},
    r"dataset\.path: 'json' cannot be loaded: .*test": {"split": "test", "data_files": "a.json"},
}


@pytest.mark.parametrize("sentence", MISTAKES)
def test_a_mistake_is_one_sentence_that_names_the_field(
    sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.json", ROWS)
    file = write(tmp_path / "data.jsonl", [{**row, "same": 1} for row in ROWS])
    if "there are key, en, de;" in sentence:
        file = write(tmp_path / "data.jsonl", ROWS)
    with pytest.raises(JobError, match=sentence) as caught:
        check_dataset(_mistaken(file, sentence))
    assert "\n" not in str(caught.value)


def _mistaken(file: str, sentence: str) -> DatasetConfig:
    given = {"path": "json", "data_files": file, "prompt": "{en}", "references": "de"}
    return DatasetConfig(**{**given, **MISTAKES[sentence]})


def test_a_missing_file_is_named_with_its_nearest(tmp_path: Path, jsonl: str) -> None:
    with pytest.raises(JobError, match=r"dataset\.data_files: .*dta\.jsonl'.*data\.jsonl"):
        check_dataset(config(str(tmp_path / "dta.jsonl")))


@pytest.mark.parametrize("name", ["empty.jsonl", "empty.parquet"])
def test_an_empty_dataset_is_refused(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    if name.endswith("parquet"):
        pq.write_table(pa.table({"en": pa.array([], pa.string())}), file)
    else:
        file.write_text("\n")
    with pytest.raises(JobError, match=r"has no rows|cannot be read"):
        check_dataset(config(str(file), "parquet" if name.endswith("parquet") else "json"))


def test_a_bad_first_line_is_a_bad_row_too(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    lines = ["garbage", "[" * 100_000, '{"en": 1' + "0" * 5000 + "}", "null", json.dumps(ROWS[0])]
    file.write_bytes(b"\n".join([*(line.encode() for line in lines), b'{"en": "\xff"}']))
    dataset = config(str(file))
    check_dataset(dataset)
    examples = read(dataset)
    assert [e.error.code if e.error else None for e in examples] == [
        *["unreadable_row"] * 4,
        None,
        "unreadable_row",
    ]
    assert len(examples) == count_examples(dataset)
    assert all(example.error.message.isprintable() for example in examples if example.error)


def test_a_file_without_a_readable_row_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text("garbage\n" * 3)
    with pytest.raises(JobError, match=r"no row can be read: line 1 of data\.jsonl is not JSON"):
        check_dataset(config(str(file)))


def test_an_array_in_a_file_of_lines_is_read_as_rows(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps(ROWS, indent=1))
    assert [example.prompt for example in read(config(str(file)))] == [row["en"] for row in ROWS]


def test_a_name_given_to_a_bad_row_is_nobody_elses(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(shards, "_PEEK", 1)
    rows = [{"key": key, "en": "a", "de": "b"} for key in ("#2", "", "#2", "#1", None)]
    dataset = config(write(tmp_path / "d.jsonl", rows), id="key")
    examples = read(dataset)
    assert [example.example_id for example in examples] == ["#2", "#1", "##2", "#3", "#4"]
    codes = [example.error.code for example in examples if example.error]
    assert codes == ["missing_id", "duplicate_id", "duplicate_id", "missing_id"]


def test_a_file_that_breaks_off_says_where(tmp_path: Path) -> None:
    file = tmp_path / "data.csv"
    file.write_text("en,de\n" + "a,b\n" * 10 + '"x\n')
    dataset = config(str(file), "csv", shard_size=4)
    with pytest.raises(JobError, match=r"dataset\.path: 'csv' cannot be read behind \d+ rows"):
        read(dataset)
