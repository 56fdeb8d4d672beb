"""Bad rows end as rows with an error; the others are those of a clean run, bit for bit.

Faults that these tests are to catch: one bad row that ends the run; a bad row that is lost; a number in
a row that has an error; a good row that changes because of its neighbour; an error that nobody is told of.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

from jobs.cli import main
from pipeline.config import JobError, ModelConfig, load_job
from pipeline.models.interface import Ints, LanguageModel, ModelBank, SlotContent
from pipeline.models.loading import load_model
from pipeline.results.errors import ErrorTally, check_share
from pipeline.results.writer import finished_shards, read_rows
from pipeline.run import prepare, run
from tests.fleet.test_same_rows import Silent

REPOSITORY = Path(__file__).parents[1]
Row = dict[str, Any]
Program = Callable[..., tuple[int, str]]

CAUSES: dict[str, Row] = {
    "empty_prompt": {"id": "empty", "word": " \t", "phonemes": ["A"]},
    "null_field": {"id": "null", "word": None, "phonemes": ["A"]},
    "prompt_too_long": {"id": "long", "word": "a b " * 300, "phonemes": ["A"]},
    "bad_unicode": {"id": "surrogate", "word": "a \ud800 b", "phonemes": ["A"]},
}
"""Rows that are bad, by the code of their error."""
STILL_THERE = {
    *("job", "shard", "example_id", "repeat", "strategy", "alpha", "normalize", "block_size"),
    *("temperature", "bonus", "seed", "prompt", "references", "prompt_ids", "output_ids"),
    *("finish_reason", "error_code", "error", "attempts", "accepted_histogram"),
}
"""The columns of a bad example that are not null; lists are empty."""


def good(count: int) -> list[Row]:
    lines = (REPOSITORY / "jobs/g2p/test.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines[:count]]


@pytest.fixture(autouse=True)
def _in_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)


@pytest.fixture
def program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Program:
    """Runs rows as a user does, in `tmp_path / folder`: the exit status, and what was said."""

    def call(rows: Sequence[Row], *options: str, folder: str = "run") -> tuple[int, str]:
        file = tmp_path / f"{folder}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        changes = [
            f"output={tmp_path / folder}",
            f"dataset.data_files={file}",
            "dataset.max_prompt_tokens=64",
            "strategies=[verifier, spec_decode]",
            "fleet=local",
        ]
        given = [option for option in options if option.startswith("--")]
        changes += [option for option in options if not option.startswith("--")]
        settings = [part for change in changes for part in ("--set", change)]
        monkeypatch.setattr(sys, "argv", ["speccascade", "run", "jobs/g2p.yaml", *settings, *given])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out + said.err

    return call


def rows_of(folder: Path) -> list[Row]:
    return read_rows(folder).to_pylist()


def decided(row: Row) -> Row:
    """What the job and the example decide: not the shard, and nothing that is measured."""
    measured = {
        "shard",
        "attempts",
        "wall_seconds",
        "drafter",
        "verifier",
        "node",
        "modelled_seconds",
    }
    return {name: value for name, value in row.items() if name not in measured}


def test_four_bad_rows_among_sixteen(program: Program, tmp_path: Path) -> None:
    clean = good(16)
    bad = list(CAUSES.values())
    mixed = [*clean[:5], *bad[:2], *clean[5:11], *bad[2:], *clean[11:]]
    assert program(clean, "--strict", folder="clean")[0] == 0
    status, said = program(mixed, "dataset.shard_size=6", "--strict", folder="mixed")
    assert status == 3
    assert "Errors: 8 of 40 rows: 2 empty_prompt, 2 null_field" in said
    assert "the prompt has 601 tokens, more than 64" in said
    assert program(mixed, "dataset.shard_size=6", folder="mixed")[0] == 0

    rows = rows_of(tmp_path / "mixed")
    assert [row["example_id"] for row in rows[::2]] == [row["id"] for row in mixed]
    failed = [row for row in rows if row["error_code"]]
    assert [row["error_code"] for row in failed[::2]] == list(CAUSES)
    for row in failed:
        assert row["finish_reason"] == "error"
        assert row["prediction"] is None
        assert {name for name, value in row.items() if value} <= STILL_THERE
    others = [decided(row) for row in rows if not row["error_code"]]
    assert others == [decided(row) for row in rows_of(tmp_path / "clean")]

    summary = pq.read_table(tmp_path / "mixed" / "summary.parquet").to_pylist()
    assert [(line["rows"], line["errors"], line["skipped"]) for line in summary] == [(20, 4, 0)] * 2
    before = pq.read_table(tmp_path / "clean" / "summary.parquet").to_pylist()
    apart = {"rows", "errors"}
    assert [{k: v for k, v in line.items() if k not in apart} for line in summary] == [
        {k: v for k, v in line.items() if k not in apart} for line in before
    ]


def test_a_run_without_errors_says_so(program: Program) -> None:
    status, said = program(good(3), "--strict")
    assert status == 0
    assert "Errors: 0 of 6 rows" in said


def test_other_bad_rows_are_typed_too(program: Program, tmp_path: Path) -> None:
    rows: list[Row] = [
        {"id": "a", "phonemes": ["A"]},
        {"id": "b", "word": ["x"], "phonemes": ["A"]},
        {"id": "c", "word": "a b", "phonemes": None},
        {"id": "d", "word": "a b", "phonemes": [3, None]},
        {"id": "e", "word": float("nan"), "phonemes": ["A"]},
    ]
    late = [{**good(1)[0], "id": None}, {**good(1)[0], "id": good(100)[7]["id"]}]
    # An id column is refused where the first rows are bad, so bad ids come late.
    assert program([*good(100), *rows, *late], "strategies=[verifier]", "--strict")[0] == 3
    codes = [(row["example_id"], row["error_code"]) for row in rows_of(tmp_path / "run")[100:]]
    assert codes == [
        ("a", "missing_field"),
        ("b", "wrong_type"),
        ("c", "missing_reference"),
        ("d", "wrong_type"),
        ("e", "null_field"),
        ("#105", "missing_id"),
        ("#106", "duplicate_id"),
    ]


def test_a_long_prompt_is_skipped_on_demand_and_accounted_for(
    program: Program, tmp_path: Path
) -> None:
    rows = [*good(3), CAUSES["prompt_too_long"]]
    skipping = "dataset.long_prompts=skip"
    status, said = program(rows, skipping, "max_error_share=0", "--strict")
    assert status == 0, "to skip is no error"
    assert "Errors: 0 of 8 rows" in said
    assert "Skipped: 2 rows" in said
    last = rows_of(tmp_path / "run")[-1]
    assert (last["finish_reason"], last["error_code"]) == ("skipped", "prompt_skipped")
    assert {name for name, value in last.items() if value} <= STILL_THERE
    summary = pq.read_table(tmp_path / "run" / "summary.parquet").to_pylist()
    assert [(line["rows"], line["errors"], line["skipped"]) for line in summary] == [(4, 0, 1)] * 2
    assert "0 shards written" in program(rows, skipping)[1], "a run that skipped is complete"

    status, said = program(rows, "dataset.long_prompts=truncate")
    assert status == 2
    assert "dataset.long_prompts: was 'skip', now 'truncate'" in said


def test_a_long_prompt_is_shortened_on_demand(program: Program, tmp_path: Path) -> None:
    row = CAUSES["prompt_too_long"]
    program([row], "dataset.long_prompts=truncate", folder="long")
    whole = {**row, "word": " ".join("ab"[place % 2] for place in range(600))}
    program([whole], "dataset.max_prompt_tokens=null", folder="whole")
    long, read = rows_of(tmp_path / "long")[0], rows_of(tmp_path / "whole")[0]
    assert long["error_code"] is None
    assert long["prompt"] == row["word"], "the text stays whole"
    assert long["prompt_ids"] == [*read["prompt_ids"][:63], read["prompt_ids"][-1]]


def test_a_run_stops_when_most_rows_are_bad_and_the_same_command_goes_on(
    program: Program, tmp_path: Path
) -> None:
    rows = good(160)
    for row in rows[:100]:
        row["word"] = None
    given = ["dataset.shard_size=10", "strategies=[verifier]"]
    status, said = program(rows, *given)
    assert status == 2
    assert "max_error_share is 0.5, but 100 of 100 rows have errors, a share of 1.00" in said
    assert (
        "the most frequent is null_field (100 rows), for example \"column 'word' is null\"" in said
    )
    assert "--set max_error_share=1" in said
    assert finished_shards(tmp_path / "run") == frozenset(range(10))

    status, said = program(rows, *given)
    assert status == 2
    assert "100 of 160 rows" in said, "it went on to the end, where all rows are judged"
    status, said = program(rows, *given, "max_error_share=1")
    assert status == 0
    assert "Errors: 100 of 160 rows: 100 null_field" in said


def test_few_rows_say_little_of_the_others(program: Program) -> None:
    rows = good(20)
    for row in rows[:9]:
        row["word"] = None
    status, said = program(rows, "dataset.shard_size=3", "strategies=[verifier]")
    assert status == 0, said
    assert program(rows, "strategies=[verifier]", "max_error_share=0.4", folder="strict")[0] == 2


def test_a_share_is_passed_not_reached() -> None:
    tally = ErrorTally(rows=4)
    check_share(tally, 0)
    tally.codes["x"], tally.messages["x"] = 2, "why"
    check_share(tally, 0.5)
    with pytest.raises(JobError, match=r"2 of 4 rows have errors, a share of 0\.50"):
        check_share(tally, 0.49)


# --- models that break on one example ---------------------------------------------------------------


class Poisoned(LanguageModel):
    """A model whose logits are bad for one prompt, from the third output token on."""

    def __init__(self, inner: LanguageModel, prompt_ids: tuple[int, ...], bad: float) -> None:
        self.inner, self.prompt_ids, self.bad = inner, prompt_ids, bad
        self.device, self.vocabulary, self.effort = inner.device, inner.vocabulary, inner.effort

    def bank(self, slots: int, **options: bool) -> ModelBank:
        bank = self.inner.bank(slots, **options)
        opened, fed = bank.open, bank.feed
        marked = torch.zeros(slots, dtype=torch.bool)

        def open_and_mark(contents: Sequence[SlotContent]) -> None:
            opened(contents)
            for content in contents:
                marked[content.slot] = tuple(content.prompt_ids) == self.prompt_ids

        def feed_and_break(tokens: Tensor, starts: Ints, keep: int) -> Tensor:
            offsets = torch.from_numpy(starts)[:, None] + torch.arange(tokens.shape[1])
            broken = (offsets[:, -keep:] >= 2) & marked[: len(tokens), None]
            return fed(tokens, starts, keep).masked_fill(broken[..., None], self.bad)

        bank.open, bank.feed = open_and_mark, feed_and_break
        return bank


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("role", ["drafter", "verifier"])
def test_bad_logits_fail_one_example_and_no_other_row(
    role: str, bad: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rows(folder: str) -> list[Row]:
        changes = ["fleet=local", "dataset.limit=6", "dataset.shard_size=4"]
        job = load_job("jobs/g2p.yaml", [f"output={tmp_path / folder}", *changes])
        run(prepare(job), Silent())
        return rows_of(tmp_path / folder)

    clean = rows("clean")
    victim = max(clean, key=lambda row: row["output_tokens"])
    prompt_ids = tuple(victim["prompt_ids"])

    def load(config: ModelConfig, vocabulary: int, *more: Any) -> LanguageModel:
        model = load_model(config, vocabulary, *more)
        return Poisoned(model, prompt_ids, bad) if config.path.endswith(role) else model

    monkeypatch.setattr("pipeline.fleet.interface.load_model", load)
    got = rows("poisoned")
    failed = set()
    for row, before in zip(got, clean, strict=True):
        if not row["error_code"]:
            assert decided(row) == decided(before)
            continue
        failed.add(row["strategy"])
        assert row["example_id"] == victim["example_id"]
        assert row["error_code"] == f"{role}_nan"
        assert (row["prediction"], row["exact_match"]) == (None, None)
        assert row["output_ids"] == before["output_ids"][: len(row["output_ids"])]
    other = {"drafter": "verifier", "verifier": "drafter"}[role]
    assert failed >= {role, "spec_decode"}
    assert other not in failed
