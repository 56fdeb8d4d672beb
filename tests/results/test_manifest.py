"""The manifest: a folder holds one job, and a difference is said field by field."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import Job, JobError, parse_job
from pipeline.results.manifest import (
    check_same_run,
    make_manifest,
    manifest_file,
    read_manifest,
    write_manifest,
)
from tests.results.runs import write_run


@pytest.fixture
def tree(tmp_path: Path) -> dict[str, Any]:
    """A job whose data and drafter are local."""
    data = tmp_path / "data.jsonl"
    data.write_text('{"en": "a", "de": "b"}\n')
    drafter = tmp_path / "drafter"
    drafter.mkdir()
    (drafter / "model.safetensors").write_bytes(b"weights")
    return {
        "name": "demo",
        "output": str(tmp_path / "run"),
        "dataset": {"path": "json", "data_files": str(data), "prompt": "{en}", "references": "de"},
        "models": {"drafter": {"path": str(drafter)}, "verifier": {"path": "org/verifier"}},
        "strategies": ["drafter", {"use": "spec_cascade.opt", "alpha": [0.1, 0.2]}],
        "metrics": ["bleu"],
    }


def begin(tree: dict[str, Any]) -> Path:
    job = parse_job(tree)
    write_manifest(Path(job.output), make_manifest(job))
    return Path(job.output)


def check(tree: dict[str, Any], output: Path) -> None:
    check_same_run(output, make_manifest(parse_job(tree)))


def test_the_same_job_continues(tree: dict[str, Any]) -> None:
    check(tree, Path(tree["output"]))
    output = begin(tree)
    check(tree, output)
    assert read_manifest(output) == read_manifest(output)


def test_where_it_runs_and_writes_is_not_part_of_what_it_is(
    tree: dict[str, Any], tmp_path: Path
) -> None:
    output = begin(tree)
    moved = tmp_path / "elsewhere"
    (tmp_path / "drafter").rename(moved)
    tree["models"]["drafter"]["path"] = str(moved)
    tree["dataset"]["streaming"] = False
    tree |= {"fleet": "local", "cluster": "other.yaml", "output": "other"}
    check(tree, output)


def change(tree: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, last = dotted.split(".")
    node = tree
    for part in parents:
        node = node.setdefault(part, {})
    node[last] = value


CHANGES = {
    "dataset.prompt": "{en} ",
    "dataset.references": None,
    "dataset.limit": 5,
    "dataset.shard_size": 7,
    "dataset.id": "en",
    "dataset.revision": "v2",
    "dataset.max_prompt_tokens": 9,
    "dataset.long_prompts": "skip",
    "models.drafter.device": "cpu",
    "models.verifier.path": "org/other",
    "models.verifier.revision": "main",
    "models.drafter.dtype": "float32",
    "decoding.block_size": 4,
    "decoding.temperature": 0.0,
    "decoding.top_p": 0.5,
    "decoding.seed": 1,
    "decoding.repeats": 2,
    "decoding.bonus": "target",
    "metrics.0": ["chrf"],
    "strategies.1.alpha.1": ["drafter", {"use": "spec_cascade.opt", "alpha": [0.1, 0.3]}],
    "transport": "float32",
}


@pytest.mark.parametrize("field", CHANGES)
def test_another_job_is_refused_and_the_difference_printed(
    field: str, tree: dict[str, Any]
) -> None:
    output = begin(tree)
    change(tree, field.split(".0")[0].split(".1.")[0], CHANGES[field])
    with pytest.raises(JobError) as caught:
        check(tree, output)
    heading, *lines = str(caught.value).splitlines()
    assert heading.startswith("output: ")
    assert [line.split(":")[0].strip() for line in lines] == [field]


REPLACED: dict[str, Callable[[Path], object]] = {
    "dataset.data_files.0": lambda folder: (folder / "data.jsonl").write_text('{"en": "c"}\n'),
    "models.drafter.path.model.safetensors": lambda folder: (
        folder / "drafter" / "model.safetensors"
    ).write_bytes(b"WEIGHTS"),
}


def test_a_target_counts_by_its_code(
    tree: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text("def f(q, p, alpha): return p")
    tree["strategies"] = [{"use": "custom", "target": "own:f"}]
    output = begin(tree)
    check(tree, output)
    (tmp_path / "own.py").write_text("def f(q, p, alpha): return q")
    with pytest.raises(JobError, match=r"strategies\.0\.target: was 'own:f "):
        check(tree, output)


@pytest.mark.parametrize("field", REPLACED)
def test_local_files_count_by_their_contents(
    field: str, tree: dict[str, Any], tmp_path: Path
) -> None:
    output = begin(tree)
    REPLACED[field](tmp_path)
    with pytest.raises(JobError, match=field):
        check(tree, output)


def test_rows_without_a_manifest_and_a_broken_manifest_are_refused(
    tree: dict[str, Any], tmp_path: Path
) -> None:
    output = Path(tree["output"])
    write_run(output, shards=1)
    with pytest.raises(JobError, match="rows without a manifest"):
        check(tree, output)
    manifest_file(output).write_text('{"job": ')
    with pytest.raises(JobError, match="not a manifest"):
        check(tree, output)


def test_it_records_versions_and_facts_but_no_secrets(tree: dict[str, Any]) -> None:
    tree["dataset"]["data_files"] = "https://me:hunter2@host/x.jsonl?part=1&X-Amz-Signature=hunter2"
    job: Job = parse_job(tree)
    path = write_manifest(Path(job.output), make_manifest(job, {"url": "s3://a:hunter2@b", "n": 1}))
    text = path.read_text()
    found = json.loads(text)
    assert "hunter2" not in text
    assert "part=1" in text
    assert found["extra"] == {"url": "s3://***@b", "n": 1}
    assert {"torch", "transformers", "sacrebleu"} <= found["packages"].keys()
    assert found["job"]["strategies"][1]["alpha"] == [0.1, 0.2]
