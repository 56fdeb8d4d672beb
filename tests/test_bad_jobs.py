"""A job with a mistake is refused before any model is loaded, in one sentence with field and remedy."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pipeline.config import JobError, load_job
from pipeline.run import prepare

REPOSITORY = Path(__file__).parents[1]

# (overrides, what the sentence must say)
MISTAKES: list[tuple[list[str], list[str]]] = [
    (["strategis=[drafter]"], ["strategis", "did you mean 'strategies'"]),
    (["dataset.limt=3"], ["dataset.limt", "did you mean 'limit'"]),
    (["dataset.limit=0"], ["dataset.limit", "greater than or equal to 1"]),
    (["dataset.limit=many"], ["dataset.limit", "'many'", "integer"]),
    (["dataset.prompt=null"], ["dataset", "prompt", "messages"]),
    (["dataset.prompt='{wrod}'"], ["dataset.prompt", "wrod", "did you mean 'word'"]),
    (["dataset.references=phoneme"], ["dataset.references", "did you mean 'phonemes'"]),
    (["dataset.references=null"], ["dataset.references", "metrics"]),
    (["dataset.id=name"], ["dataset.id", "name"]),
    (["dataset.data_files=jobs/g2p/tset.jsonl"], ["dataset.data_files", "jobs/g2p/tset.jsonl"]),
    (["dataset.split=test"], ["dataset", "split", "test"]),
    (["models.drafter.path=jobs/g2p/draftr"], ["models.drafter.path", "jobs/g2p/draftr"]),
    (["models.drafter.dtype=fp32"], ["models.drafter.dtype", "fp32", "float32"]),
    (["models.verifier={}"], ["models.verifier.path", "missing"]),
    (["decoding.block_size=0"], ["decoding.block_size", "greater than or equal to 1"]),
    (["decoding.temperature=-1"], ["decoding.temperature"]),
    (["decoding.temperature=.nan"], ["decoding.temperature", "finite"]),
    (["decoding.top_p=1.5"], ["decoding.top_p"]),
    (["decoding.bonus=drafter"], ["decoding.bonus", "verifier", "target"]),
    (["strategies=[]"], ["strategies", "at least 1"]),
    (["strategies=[spec_decod]"], ["strategies.0", "did you mean 'spec_decode'"]),
    (["strategies=[spec_cascade.opt]"], ["strategies.0", "alpha is missing"]),
    (["strategies=[{use: drafter, alpha: 1}]"], ["strategies.0", "alpha", "takes no alpha"]),
    (["strategies=[{use: spec_cascade.chow, alpha: 1.5}]"], ["strategies.0", "1.5", "from 0 to 1"]),
    (["strategies=[{use: lossy_spec_decode, alpha: 1}]"], ["strategies.0", "below 1"]),
    (["strategies=[drafter, drafter]"], ["strategies.1", "twice"]),
    (["strategies=[{use: spec_decode, beta: 1}]"], ["strategies.0", "beta"]),
    (["metrics=[exact_mach]"], ["metrics", "did you mean 'exact_match'"]),
    (["fleet=rya"], ["fleet", "'ray' or 'local'"]),
    (["cluster=cluster/lokal.yaml"], ["cluster/lokal.yaml", "no such file"]),
    (["transport=pigeon"], ["transport", "auto"]),
    (["name=a/b"], ["name", "a/b"]),
    (["name.first=x"], ["--set name.first=x"]),
    (["dataset.limit"], ["--set dataset.limit", "path.to.key=value"]),
]


@pytest.fixture(autouse=True)
def _in_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setattr("pipeline.fleet.interface.load_model", _no_model)


def _no_model(*_: object) -> None:
    raise AssertionError("a model was loaded")


def refusal(overrides: list[str]) -> str:
    with pytest.raises(JobError) as caught:
        prepare(load_job("jobs/g2p.yaml", overrides))
    return str(caught.value)


@pytest.mark.parametrize(("overrides", "said"), MISTAKES, ids=lambda value: str(value[0]))
def test_a_mistake_is_named_with_its_remedy(overrides: list[str], said: list[str]) -> None:
    sentence = refusal(overrides)
    assert "\n" not in sentence
    for words in said:
        assert words in sentence


def test_a_job_file_that_is_missing_or_not_yaml_is_named(tmp_path: Path) -> None:
    for text, said in [(None, "no such file"), ("a: [", "not YAML"), ("- 1", "mapping")]:
        path = tmp_path / "job.yaml"
        if text is not None:
            path.write_text(text, encoding="utf-8")
        with pytest.raises(JobError, match=said) as caught:
            load_job(path)
        assert str(path) in str(caught.value)


def test_two_vocabularies_of_equal_size_are_told_apart(tmp_path: Path) -> None:
    swapped = tmp_path / "drafter"
    shutil.copytree("jobs/g2p/drafter", swapped)
    tokenizer = swapped / "tokenizer.json"
    text = tokenizer.read_text(encoding="utf-8")
    assert '"a": ' in text
    first, second = ('"b": ', '"c": ')
    text = text.replace(first, '"@": ').replace(second, first).replace('"@": ', second)
    tokenizer.write_text(text, encoding="utf-8")
    sentence = refusal([f"models.drafter.path={swapped}"])
    assert "'b'" in sentence
    assert "'c'" in sentence
    assert "allow_different_vocabularies" in sentence
    allowed = [f"models.drafter.path={swapped}", "models.allow_different_vocabularies=true"]
    assert prepare(load_job("jobs/g2p.yaml", allowed)).pairing.vocabulary > 90


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "drafter"
    shutil.copytree("jobs/g2p/drafter", folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    sentence = refusal([f"models.drafter.path={folder}"])
    assert "safetensors" in sentence
    assert "pickled" in sentence
