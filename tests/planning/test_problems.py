"""All that is wrong with a job is said, not only the first; nothing is loaded and nothing started."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
from rich.console import Console

from jobs.planning import print_plan
from pipeline.config import load_job
from pipeline.fleet.placement import Node
from pipeline.planning.plan import Options, Plan, make_plan
from tests.tiny import hf_model

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _without_weights(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("pipeline.fleet.interface.load_model", _no_model)
    started = ray.is_initialized()
    yield
    assert ray.is_initialized() == started


def _no_model(*_: object) -> None:
    raise AssertionError("a model was loaded")


def plan_of(*overrides: str, address: str | None = None) -> Plan:
    return make_plan(
        load_job("jobs/g2p.yaml", ["output=nowhere", *overrides]), Options(address=address)
    )


def sentences(plan: Plan) -> list[str]:
    return [problem.sentence for problem in plan.problems]


def test_a_good_job_has_no_problem() -> None:
    assert plan_of().problems == ()
    assert not Path("nowhere").exists()


def test_all_problems_are_said_at_once_each_once(tmp_path: Path) -> None:
    said = sentences(
        plan_of(
            "strategies=[{use: spec_cascade.opt}, {use: nothing}]",
            "output=README.md/run",
            "cluster=cluster/lokal.yaml",
            "dataset.prompt='{wrod}'",
            "dataset.references=phoneme",
            "models.drafter.path=jobs/g2p/draftr",
            "models.verifier.path=jobs/g2p/verifer",
        )
    )
    for words in (
        "strategies.0.alpha is missing",
        "strategies.1.use is 'nothing'",
        "README.md is a file",
        "cluster/lokal.yaml: there is no such file",
        "dataset.prompt names a column 'wrod'",
        "dataset.references names a column 'phoneme'",
        "models.drafter.path",
        "models.verifier.path",
    ):
        assert sum(words in sentence for sentence in said) == 1, (words, said)
    assert len(said) == 8


def test_vocabularies_that_differ_and_a_chat_without_template() -> None:
    said = sentences(
        plan_of(
            "models.drafter.path=jobs/demo/drafter",
            "models.drafter.device=cuda:9",
            "metrics=[bleu, blue]",
        )
    )
    assert any("choose two models with one tokenizer" in sentence for sentence in said)
    assert any("cuda:9" in sentence for sentence in said)
    chat = ["dataset.prompt=null", "dataset.messages=[{role: user, content: '{word}'}]"]
    assert any("no chat template" in sentence for sentence in sentences(plan_of(*chat)))


def test_a_folder_that_belongs_to_another_run_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "shard-00000.parquet").touch()
    assert "rows without a manifest" in sentences(plan_of(f"output={tmp_path}"))[0]


def test_a_full_context_is_a_problem(tmp_path: Path) -> None:
    pair = causal_pair(tmp_path, drafter=256, verifier=32)
    said = sentences(plan_of(*pair, "decoding.max_new_tokens=40"))
    assert "the pair holds sequences of 32 tokens only" in said[0]


def test_a_context_too_short_for_the_drafter_alone_is_doubtful(tmp_path: Path) -> None:
    pair = causal_pair(tmp_path, drafter=32, verifier=256)
    plan = plan_of(*pair)
    assert "do not fit the drafter's context of 32" in sentences(plan)[0]
    assert not plan.problems[0].is_refused
    assert not plan_of(*pair, "strategies=[spec_decode]").problems


def test_half_precision_of_t5_is_doubtful() -> None:
    plan = plan_of("models.verifier.dtype=float16")
    assert "models.verifier.dtype is float16" in sentences(plan)[0]
    assert [problem.is_refused for problem in plan.problems] == [False]
    assert plan.details is not None
    assert not plan_of("models.verifier.dtype=bfloat16").problems


def test_special_tokens_that_differ_are_doubtful(tmp_path: Path) -> None:
    shutil.copytree("jobs/g2p/drafter", tmp_path / "drafter")
    config = tmp_path / "drafter" / "tokenizer_config.json"
    tree = {**json.loads(config.read_text("utf-8")), "eos_token": "a"}
    config.write_text(json.dumps(tree), encoding="utf-8")
    given = f"models.drafter.path={tmp_path / 'drafter'}"
    plan = plan_of(given)
    assert "the EOS token is id" in sentences(plan)[0]
    assert [problem.is_refused for problem in plan.problems] == [False]
    assert not plan_of(given, "models.allow_different_vocabularies=true").problems


def test_bad_rows_are_counted_beforehand(tmp_path: Path) -> None:
    lines = [{"id": str(n), "word": "x " * (1 + 60 * (n < 3)), "phonemes": "X"} for n in range(10)]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    given = [f"dataset.data_files={file}", "dataset.max_prompt_tokens=20"]
    assert "of the first 10 rows 3 have prompt_too_long" in sentences(plan_of(*given))[0]
    assert "above dataset" not in sentences(plan_of(*given))[0]
    assert "the run stops" in sentences(plan_of(*given, "max_error_share=0.2"))[0]
    assert not plan_of(*given, "dataset.long_prompts=skip").problems


# --- clusters ------------------------------------------------------------------------------------------


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """A cluster of two nodes that nobody has to start; the addresses that it was asked at."""
    asked: list[str | None] = []
    nodes = [Node({"CPU": 2.0}), Node({"CPU": 8.0, "GPU": 2.0})]

    @contextmanager
    def connected(address: str | None) -> Iterator[None]:
        asked.append(address)
        yield

    monkeypatch.setattr("pipeline.planning.plan.connected", connected)
    monkeypatch.setattr("pipeline.planning.plan.nodes_there", lambda: nodes)
    monkeypatch.setattr("pipeline.planning.plan.nodes_free", lambda: nodes)
    return asked


def cluster_of(folder: Path, text: str) -> str:
    path = folder / "cluster.yaml"
    path.write_text(text, encoding="utf-8")
    return f"cluster={path}"


def test_actors_are_fitted_to_the_nodes(two_nodes: Any, tmp_path: Path) -> None:
    cluster = cluster_of(
        tmp_path, "{drafter: {replicas: 6}, verifier: {num_cpus: 2, num_gpus: 2, replicas: 1}}"
    )
    plan = plan_of(cluster, address="auto")
    assert two_nodes == ["auto"]
    assert plan.problems == ()
    assert plan.details is not None
    drafters, verifiers = plan.details.groups
    assert (drafters.count, dict(verifiers.nodes)) == (6, {2: 1})
    assert sum(drafters.nodes.values()) == 6
    assert drafters.nodes[1] <= 2
    assert verifiers.gpu_bytes == verifiers.memory.total / 2


def test_a_plan_that_does_not_fit_is_a_problem_beside_the_others(
    two_nodes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "there")
    cluster = cluster_of(tmp_path, "verifier: {num_gpus: 4}")
    plan = plan_of(cluster, "models.drafter.dtype=float16")
    assert two_nodes == ["there"]
    first, second = sentences(plan)
    assert "verifier-0 needs 1 CPU, 4 GPU" in first
    assert "models.drafter.dtype is float16" in second
    assert plan.details is not None


def test_an_address_where_nobody_listens_is_a_problem_at_once() -> None:
    started = time.monotonic()
    said = sentences(plan_of(address="127.0.0.1:1"))
    assert "'127.0.0.1:1', where no cluster answers" in said[0]
    assert time.monotonic() - started < 60


def test_auto_replicas_take_what_is_free(two_nodes: Any, tmp_path: Path) -> None:
    cluster = cluster_of(tmp_path, "drafter: {replicas: auto}")
    plan = plan_of(cluster, address="there")
    assert plan.details is not None
    assert plan.details.groups[0].count == 9
    assert "give --address" in sentences(plan_of(cluster))[0]


# --- the screen ----------------------------------------------------------------------------------------


def shown(plan: Plan) -> str:
    console = Console(width=100, record=True, quiet=False)
    print_plan(console, plan)
    return console.export_text()


def test_a_plan_is_one_screen() -> None:
    text = shown(plan_of("step_seconds={drafter: 0.001, verifier: 0.01}"))
    for words in ("drafter-0", "verifier-0", "10 strategies", "5 speculative", "Bottleneck: the"):
        assert words in text
    assert len(text.splitlines()) < 45
    assert "nothing is known of the models' speed" in shown(plan_of())


def test_problems_are_shown_as_what_they_are() -> None:
    text = shown(plan_of("models.verifier.dtype=float16"))
    assert "doubtful, though a run would go on: models.verifier.dtype" in text
    assert "problem: dataset.id" in shown(plan_of("dataset.id=name"))
    assert "No problem was found." in shown(plan_of())


def causal_pair(folder: Path, drafter: int, verifier: int) -> list[str]:
    """Tiny decoder-only models with contexts of so many positions and the g2p pair's tokenizer."""
    overrides = []
    for role, positions in (("drafter", drafter), ("verifier", verifier)):
        path = folder / role
        hf_model("llama", positions=positions).save_pretrained(path)
        for file in Path("jobs/g2p/drafter").glob("tokenizer*"):
            shutil.copy(file, path)
        overrides.append(f"models.{role}.path={path}")
    return overrides
