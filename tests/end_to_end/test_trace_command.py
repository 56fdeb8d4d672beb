"""The trace command on a run that another command wrote: tokens come out as the tokenizer spells them."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow.dataset as ds
import pytest
from typer.testing import CliRunner

from jobs.cli import app
from pipeline.config import JobError

REPOSITORY = Path(__file__).parents[2]
STRATEGIES = "[{use: spec_cascade.opt, alpha: [0.1, 0.5]}, {use: token_cascade.chow, alpha: 0.3}]"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four words in two settings, with traces."""
    output = tmp_path_factory.mktemp("traced") / "run"
    changes = {
        "output": output,
        "fleet": "local",
        "trace": "true",
        "dataset.limit": 4,
        "decoding.block_size": "[2, 5]",
        "strategies": STRATEGIES,
    }
    options = [part for change in changes.items() for part in ("--set", "{}={}".format(*change))]
    here = Path.cwd()
    os.chdir(REPOSITORY)
    try:
        done = CliRunner().invoke(app, ["run", "jobs/g2p.yaml", *options], catch_exceptions=False)
    finally:
        os.chdir(here)
    assert done.exit_code == 0
    return output


def trace(run: Path, *options: str) -> str:
    done = CliRunner().invoke(app, ["trace", str(run), *options], catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout


def test_it_shows_each_matching_row_token_by_token(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    rows = ds.dataset(run / "rows").to_table().to_pylist()
    row = next(r for r in rows if r["alpha"] == 0.5 and r["block_size"] == 5)
    label = "spec_cascade.opt(alpha=0.5)"
    said = trace(run, "--example", row["example_id"], "--strategy", label, "--setting", "1")
    assert f"{label} · block size 5" in said
    assert f"prompt    {row['prompt']}" in said
    table = [line.strip("│").split("│") for line in said.splitlines() if line.startswith("│")]
    pieces = [cells[0].strip().strip("'") for cells in table]
    assert "".join(pieces).removesuffix("</s>").strip() == row["prediction"]
    assert [cells[1].strip() for cells in table] == [token["source"] for token in row["trace"]]
    everything = trace(run, "--example", row["example_id"], "--strategy", "spec_cascade.opt")
    assert everything.count("block size 2") == everything.count("block size 5") == 2


def test_traces_add_up_to_the_counts(run: Path) -> None:
    for row in ds.dataset(run / "rows").to_table().to_pylist():
        sources = [token["source"] for token in row["trace"]]
        assert len(sources) == row["output_tokens"]
        assert sum(token["deferred"] for token in row["trace"]) == row["deferred"]
        if row["strategy"] == "spec_cascade.opt":
            counted = [sources.count(name) for name in ("draft", "residual", "bonus")]
            assert counted == [row[name] for name in ("accepted", "rejected", "bonus_tokens")]


def test_a_tokenizer_that_is_not_there_is_named(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["--example", example_of(run), "--strategy", "spec_cascade.opt"]
    with pytest.raises(JobError, match=r"models.verifier.path.*jobs/g2p/verifier"):
        trace(run, *options)


def example_of(run: Path) -> str:
    return str(ds.dataset(run / "rows").to_table().column("example_id")[0].as_py())
