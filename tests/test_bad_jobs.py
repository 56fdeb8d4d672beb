"""A job with a mistake is refused before any model is loaded, in one sentence with field and remedy."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from pipeline.config import ClusterConfig, Job, JobError, load_cluster, load_job
from pipeline.run import prepare

REPOSITORY = Path(__file__).parents[1]

# (override or overrides, what the sentence must say)
MISTAKES: list[tuple[str | list[str], list[str]]] = [
    # the job itself
    ("strategis=[drafter]", ["strategis is not a key", "did you mean 'strategies'"]),
    ("zzz=1", ["zzz is not a key", "known keys: name, output"]),
    ("name=a/b", ["name is 'a/b'", "pattern"]),
    ("name=null", ["name is None", "string"]),
    ("output=''", ["output: ''", "give one line"]),
    ("output=7", ["output is 7", "string"]),
    ("output=README.md", ["output is 'README.md'", "is a file; choose a folder"]),
    ("output=README.md/run", ["README.md is a file; choose a folder"]),
    ('output="a\\0b"', ["output: 'a\\x00b'"]),
    ("output=s3://bucket/run", ["output: 's3://bucket/run'", "give a local path"]),
    ("output=~no_such_user/run", ["output: '~no_such_user/run'", "write the path out"]),
    (f"output={'x' * 300}", ["output:", "too long for a path"]),
    ("fleet=rya", ["fleet is 'rya'", "'ray' or 'local'"]),
    ("cluster=cluster/lokal.yaml", ["cluster/lokal.yaml: there is no such file", "local.yaml'"]),
    ("cluster=cluster", ["cluster is a folder; name a YAML file"]),
    ("cluster=README.md", ["README.md is not YAML"]),
    ("cluster=null", ["cluster is None", "string"]),
    ("transport=pigeon", ["transport is 'pigeon'", "'auto'"]),
    ("transport=tokens", ["transport is 'tokens'", "temperature above 0", "set it to auto"]),
    ("transport=top_k", ["transport is 'top_k'", "not sampled with top_k", "set it to auto"]),
    ("trace=1", ["trace is 1", "boolean"]),
    ("max_error_share=1.5", ["max_error_share is 1.5", "less than or equal to 1"]),
    ("max_error_share=-0.1", ["max_error_share is -0.1", "greater than or equal to 0"]),
    ("allow_custom_code=ok", ["allow_custom_code is 'ok'", "boolean"]),
    ("step_seconds=3", ["step_seconds is 3", "a mapping of drafter, verifier"]),
    ("step_seconds={drafter: 1}", ["step_seconds.verifier is missing"]),
    ("step_seconds={drafter: 0, verifier: 1}", ["step_seconds.drafter is 0", "greater than 0"]),
    ("step_seconds={drafter: 1, verfier: 1}", ["verfier is not a key", "did you mean 'verifier'"]),
    # overrides
    ("name.first=x", ["--set name.first=x", "a single value"]),
    ("dataset.limit", ["--set dataset.limit", "path.to.key=value"]),
    ("strategies.99.alpha=1", ["--set strategies.99.alpha=1", "from 0 to 5"]),
    ("strategies.²=1", ["--set", "must be a number from 0 to 5"]),
    ("metrics=[bleu", ["--set metrics=[bleu", "not YAML"]),
    ("dataset={path: json, path: csv}", ["'path' stands twice", "remove one"]),
    ('name="\\ud800"', ["--set", "surrogates not allowed"]),
    # the dataset
    ("dataset=3", ["dataset is 3", "a mapping of path, name, data_files"]),
    ("dataset.limt=3", ["dataset.limt is not a key", "did you mean 'limit'"]),
    ("dataset.limit=0", ["dataset.limit is 0", "greater than or equal to 1"]),
    ("dataset.limit=many", ["dataset.limit is 'many'", "integer"]),
    ("dataset.limit=99999999999999999999", ["dataset.limit", "less than"]),
    ("dataset.shard_size=64.5", ["dataset.shard_size is 64.5", "integer"]),
    ("dataset.streaming=sometimes", ["dataset.streaming is 'sometimes'", "boolean"]),
    ("dataset.path=''", ["dataset.path: ''", "give one line"]),
    ("dataset.path=jsonl", ["dataset.path: no format 'jsonl'", "did you mean 'json'"]),
    (
        ["dataset.path=./jbs", "dataset.data_files=null"],
        ["no folder './jbs'", "did you mean 'jobs'"],
    ),
    ("dataset.path=./jobs/g2p/test.jsonl", ["dataset.path", "is a file; name it in data_files"]),
    ("dataset.name=en", ["dataset.name is 'en'", "remove it"]),
    ("dataset.revision=main", ["dataset.revision is 'main'", "remove it"]),
    ("dataset.data_files=null", ["dataset.data_files is missing; name the json files"]),
    ("dataset.data_files=[]", ["dataset.data_files is []", "at least 1 item"]),
    ("dataset.data_files=''", ["dataset.data_files: ''"]),
    ("dataset.data_files=jobs/g2p/tset.jsonl", ["no file 'jobs/g2p/tset.jsonl'", "test.jsonl'"]),
    (
        "dataset.data_files=jobs/g2p/*.jsn",
        ["dataset.data_files: there is no file 'jobs/g2p/*.jsn'"],
    ),
    ("dataset.data_files=jobs/g2p", ["'jobs/g2p' is a folder", "'jobs/g2p/*'"]),
    ("dataset.data_files=jobs/g2p/README.md", ["dataset.path: 'json' cannot be read"]),
    ("dataset.data_files={dev: jobs/g2p/test.jsonl}", ["dataset.split is 'train'", "has dev"]),
    ("dataset.split=test", ["dataset", "split", "test"]),
    ("dataset.split=null", ["dataset.split is None"]),
    ("dataset.id=name", ["dataset.id names a column 'name'", "there are id, word, phonemes"]),
    ("dataset.id=phonemes", ["dataset.id: column 'phonemes' holds", "must be unique"]),
    ("dataset.prompt=null", ["dataset: give exactly one of prompt and messages"]),
    ("dataset.prompt='{wrod}'", ["dataset.prompt names a column 'wrod'", "did you mean 'word'"]),
    ("dataset.prompt=word", ["dataset.prompt is 'word'", "names no column"]),
    ("dataset.prompt='{word'", ["dataset.prompt: '{word'", "double a brace"]),
    ("dataset.prompt='{word.upper}'", ["dataset.prompt: '{word.upper}'", "plain column names"]),
    (
        ["dataset.prompt=null", "dataset.messages=[]"],
        ["dataset.messages is empty", "at least one message"],
    ),
    (
        ["dataset.prompt=null", "dataset.messages=[{role: user}]"],
        ["dataset.messages.0 has the keys ['role']", "role and content"],
    ),
    (
        ["dataset.prompt=null", "dataset.messages=[{role: user, content: '{word}'}]"],
        ["dataset.messages: the tokenizer has no chat template", "dataset.prompt"],
    ),
    ("dataset.references=phoneme", ["dataset.references", "did you mean 'phonemes'"]),
    ("dataset.references=null", ["dataset.references is missing", "metrics"]),
    (
        "dataset.max_prompt_tokens=0",
        ["dataset.max_prompt_tokens is 0", "greater than or equal to 1"],
    ),
    (
        "dataset.long_prompts=drop",
        ["dataset.long_prompts is 'drop'", "'error', 'truncate' or 'skip'"],
    ),
    # the models
    ("models.drafter=gpt2", ["models.drafter is 'gpt2'", "a mapping of path, revision"]),
    ("models.verifier={}", ["models.verifier.path is missing"]),
    ("models.draftr={}", ["models.draftr is not a key", "did you mean 'drafter'"]),
    (
        "models.drafter.path=jobs/g2p/draftr",
        ["models.drafter.path", "did you mean 'jobs/g2p/drafter'"],
    ),
    ("models.drafter.path=/nowhere/at/all", ["models.drafter.path: there is no folder"]),
    ("models.drafter.path=jobs/g2p", ["models.drafter.path: jobs/g2p holds no model.safetensors"]),
    ("models.drafter.path=''", ["models.drafter.path: ''"]),
    ("models.drafter.revision=v1", ["models.drafter.revision is 'v1'", "is a folder", "remove it"]),
    ("models.drafter.dtype=fp32", ["models.drafter.dtype is 'fp32'", "'float32'"]),
    ("models.drafter.device=potato", ["models.drafter.device: 'potato'", "auto, cpu, cuda"]),
    (
        "models.verifier.device=cuda:9",
        ["models.verifier.device is 'cuda:9'", "verifier.num_gpus", "auto"],
    ),
    (
        ["models.verifier.device=cuda:99", "fleet=local"],
        ["models.verifier.device is 'cuda:99'", "this machine", "auto"],
    ),
    ("models.drafter.devcie=cuda:9", ["models.drafter.devcie", "did you mean 'device'"]),
    ("models.drafter.compile=max", ["models.drafter.compile is 'max'", "boolean"]),
    ("models.verifier.trust_remote_code=1", ["models.verifier.trust_remote_code is 1", "boolean"]),
    ("models.allow_different_vocabularies=si", ["allow_different_vocabularies is 'si'", "boolean"]),
    # decoding
    ("decoding=[]", ["decoding is []", "a mapping of block_size"]),
    ("decoding.blocksize=3", ["decoding.blocksize is not a key", "did you mean 'block_size'"]),
    ("decoding.block_size=0", ["decoding.block_size is 0", "greater than or equal to 1"]),
    ("decoding.block_size=[4, 0]", ["decoding.block_size.1 is 0", "greater than or equal to 1"]),
    ("decoding.block_size=[]", ["decoding.block_size is []", "at least 1 item"]),
    ("decoding.block_size=2.5", ["decoding.block_size is 2.5", "a valid integer or be a list"]),
    ("decoding.block_size=[4, 4]", ["decoding.block_size: 4 stands twice; remove one"]),
    ("decoding.temperature=-1", ["decoding.temperature is -1", "greater than or equal to 0"]),
    ("decoding.temperature=.nan", ["decoding.temperature is nan", "finite"]),
    ("decoding.temperature=1e-30", ["decoding.temperature: 1e-30 is too close to 0", "give 0"]),
    ("decoding.top_k=0", ["decoding.top_k is 0", "greater than or equal to 1"]),
    ("decoding.top_p=1.5", ["decoding.top_p is 1.5", "less than or equal to 1"]),
    ("decoding.min_p=0", ["decoding.min_p is 0", "greater than 0"]),
    ("decoding.drafter=cold", ["decoding.drafter is 'cold'", "a mapping of temperature, top_k"]),
    ("decoding.drafter={temp: 1}", ["decoding.drafter.temp", "did you mean 'temperature'"]),
    ("decoding.drafter={temperature: .inf}", ["decoding.drafter.temperature is inf", "finite"]),
    ("decoding.drafter={top_k: 0.5}", ["decoding.drafter.top_k is 0.5", "integer"]),
    ("decoding.drafter={top_p: 0}", ["decoding.drafter.top_p is 0", "greater than 0"]),
    ("decoding.drafter={min_p: 2}", ["decoding.drafter.min_p is 2", "less than or equal to 1"]),
    ("decoding.max_new_tokens=0", ["decoding.max_new_tokens is 0", "greater than or equal to 1"]),
    ("decoding.stop=x", ["decoding.stop is 'x'", "a list"]),
    ("decoding.stop=['']", ["decoding.stop.0 is ''", "at least 1 character"]),
    ("decoding.bonus=drafter", ["decoding.bonus is 'drafter'", "'verifier' or 'target'"]),
    ("decoding.seed=1.5", ["decoding.seed is 1.5", "integer"]),
    ("decoding.repeats=0", ["decoding.repeats is 0", "greater than or equal to 1"]),
    # strategies
    ("strategies=[]", ["strategies is []", "at least 1 item"]),
    ("strategies=drafter", ["strategies is 'drafter'", "a list"]),
    ("strategies=[3]", ["strategies.0 is 3", "a mapping of use, alpha"]),
    ("strategies=[{alpha: 1}]", ["strategies.0.use is missing"]),
    ("strategies=[spec_decod]", ["strategies.0", "did you mean 'spec_decode'"]),
    ("strategies=[spec_cascade.opt]", ["strategies.0.alpha is missing"]),
    (
        "strategies=[{use: spec_cascade.opt, alpa: 1}]",
        ["strategies.0.alpa", "did you mean 'alpha'"],
    ),
    ("strategies=[{use: spec_cascade.opt, alpha: []}]", ["strategies.0.alpha is missing"]),
    (
        "strategies=[{use: spec_cascade.opt, alpha: [1, x]}]",
        ["strategies.0.alpha.1 is 'x'", "number"],
    ),
    ("strategies=[{use: spec_cascade.opt, alpha: .nan}]", ["strategies.0.alpha is nan", "finite"]),
    ("strategies=[{use: spec_cascade.opt, alpha: [1, 1]}]", ["strategies.0", "stands twice"]),
    ("strategies=[{use: drafter, alpha: 1}]", ["strategies.0.alpha", "takes no alpha"]),
    ("strategies=[{use: spec_cascade.chow, alpha: 1.5}]", ["strategies.0", "1.5", "from 0 to 1"]),
    ("strategies=[{use: lossy_spec_decode, alpha: 1}]", ["strategies.0", "below 1"]),
    (
        "strategies=[{use: lossy_spec_decode, alpha: 0, beta: 2}]",
        ["strategies.0.beta is 2", "tuned"],
    ),
    ("strategies=[{use: lossy_spec_decode, alpha: 0, beta: tune}]", ["beta is 'tune'", "'tuned'"]),
    ("strategies=[{use: spec_decode, beta: 1}]", ["strategies.0.beta", "takes no beta"]),
    ("strategies=[drafter, drafter]", ["strategies.1", "twice"]),
    (
        "strategies=[{use: sequence_cascade.chow, alpha: 0, normalize: max}]",
        ["strategies.0.normalize is 'max'", "'none' or 'mean'"],
    ),
    (
        "strategies=[{use: bild, fallback: 2, rollback: 1}]",
        ["strategies.0.fallback is 2", "0 to 1"],
    ),
    ("strategies=[{use: bild, fallback: 1}]", ["strategies.0.rollback is missing"]),
    (
        "strategies=[{use: bild, fallback: 1, rollback: 1}]",
        ["bild is greedy", "decoding.temperature is 1", "set it to 0"],
    ),
    (
        ["strategies=[{use: custom}]", "allow_custom_code=true"],
        ["strategies.0.target is missing", "module:function"],
    ),
    (
        "strategies=[{use: custom, target: '.x:f'}]",
        ["strategies.0.target: '.x:f'", "module:function"],
    ),
    # metrics
    ("metrics=bleu", ["metrics is 'bleu'", "a list"]),
    ("metrics=[exact_mach]", ["metrics", "did you mean 'exact_match'"]),
    ("metrics=[bleu, bleu]", ["metrics: 'bleu' is listed twice"]),
    ("metrics=['']", ["metrics.0: ''"]),
]

CLUSTERS: list[tuple[str, list[str]]] = [
    ("- 1", ["must hold a mapping"]),
    ("drafter: {replcas: 2}", ["drafter.replcas is not a key", "did you mean 'replicas'"]),
    ("drafter: {replicas: 0}", ["drafter.replicas is 0", "greater than or equal to 1"]),
    (
        "drafter: {replicas: 1000000}",
        ["drafter.replicas is 1000000", "less than or equal to 10000"],
    ),
    ("drafter: {num_cpus: -1}", ["drafter.num_cpus is -1", "greater than or equal to 0"]),
    ("drafter: {num_gpus: 1.5}", ["drafter.num_gpus: 1.5", "a whole number"]),
    ("drafter: {resources: {L4: 0}}", ["drafter.resources.L4 is 0", "greater than 0"]),
    ("drafter: {resources: [L4]}", ["drafter.resources is ['L4']", "mapping"]),
    ("drafter: {banks: many}", ["drafter.banks is 'many'", "integer", "'auto'"]),
    ("drafter: {banks: 0}", ["drafter.banks is 0", "greater than or equal to 1"]),
    ("drafter: {slots: 0}", ["drafter.slots is 0", "greater than or equal to 1"]),
    ("drafter: {slots: 1, slots: 2}", ["'slots' stands twice"]),
    ("verifier: 2", ["verifier is 2", "a mapping of replicas, num_cpus"]),
    ("verifier: {replicas: two}", ["verifier.replicas is 'two'", "integer"]),
    ("verifier: {num_cpus: .nan}", ["verifier.num_cpus is nan", "finite"]),
    ("verifier: {num_gpus: x}", ["verifier.num_gpus is 'x'", "number"]),
    ("verifier: {resources: {GPU: 1}}", ["verifier.resources: GPU", "use num_gpus"]),
    ("verifier: {resources: {memory: 1}}", ["verifier.resources: memory", "use memory"]),
    ("verifier: {banks: 3}", ["verifier.banks is not a key"]),
    ("drafter: {memory: 16 gigs}", ["drafter.memory: '16 gigs'", "16GiB"]),
    ("drafter: {memory: -1}", ["drafter.memory is -1", "greater than or equal to 0"]),
    ("drafter: {accelerator_type: NVIDIA H100}", ["drafter.accelerator_type: 'NVIDIA H100'"]),
    ("drafter: {labels: {/pool: a}}", ["drafter.labels", "'/pool'", "example.com/pool"]),
    ("drafter: {labels: {pool: in()}}", ["drafter.labels.pool: 'in()'", "in(a, b)"]),
    ("drafter: {labels: {pool: 1}}", ["drafter.labels.pool is 1", "string"]),
    (
        "drafter: {replicas: auto, num_cpus: 0}",
        ["drafter: replicas is 'auto'", "any number", "give one"],
    ),
    (
        "drafter: {replicas: auto}\nverifier: {replicas: auto}",
        ["replicas is 'auto' for both roles", "give a number"],
    ),
    (
        "drafter: {replicas: auto}\nautoscaling_seconds: 60",
        ["replicas is 'auto'", "autoscaling_seconds", "give a number"],
    ),
    (
        "drafter: {replicas: auto}\nlinks: {drafter-0: [verifier-0]}",
        ["replicas is 'auto'", "links", "give a number"],
    ),
    ("autoscaling_seconds: -1", ["autoscaling_seconds is -1", "greater than or equal to 0"]),
    ("links: {drafter-1: [verifier-0]}", ["links: there is no drafter 'drafter-1'", "drafter-0"]),
    ("links: {drafter-0: [verifier]}", ["links: there is no verifier 'verifier'", "verifier-0"]),
    ("links: {drafter-0: []}", ["links.drafter-0 is []", "at least 1 item"]),
    (
        "verifier: {replicas: 2}\nlinks: {drafter-0: [verifier-1]}",
        ["links: 'verifier-0' is missing", "every verifier"],
    ),
    (
        "drafter: {replicas: 2}\nlinks: {drafter-0: [verifier-0]}",
        ["links: 'drafter-1' is missing", "every drafter"],
    ),
    ("links: {drafter-0: [verifier-0, verifier-0]}", ["'drafter-0' names a verifier twice"]),
    (
        "drafter: {banks: 1}\nverifier: {replicas: 2}\nlinks: {drafter-0: [verifier-0, verifier-1]}",
        ["links: 'drafter-0' has more verifiers than banks", "drafter.banks"],
    ),
    ("placement: pack", ["placement is 'pack'", "'PACK'"]),
    ("failure: never", ["failure is 'never'", "a mapping of attempts"]),
    ("failure: {attempts: 0}", ["failure.attempts is 0", "greater than or equal to 1"]),
    ("failure: {restarts: -2}", ["failure.restarts is -2", "greater than or equal to -1"]),
    ("failure: {start_seconds: 0}", ["failure.start_seconds is 0", "greater than 0"]),
    ("failure: {block_seconds: soon}", ["failure.block_seconds is 'soon'", "number"]),
    ("failure: {silence_seconds: .inf}", ["failure.silence_seconds is inf", "finite"]),
    ("failure: {silence_second: 1}", ["did you mean 'silence_seconds'"]),
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


def check_sentence(sentence: str, said: list[str]) -> None:
    assert sentence.isprintable(), "one line, without control characters"
    for words in said:
        assert words in sentence


@pytest.mark.parametrize(("overrides", "said"), MISTAKES, ids=lambda value: ascii(value)[:60])
def test_a_mistake_is_named_with_its_remedy(overrides: str | list[str], said: list[str]) -> None:
    check_sentence(refusal([overrides] if isinstance(overrides, str) else overrides), said)


@pytest.mark.parametrize(("text", "said"), CLUSTERS, ids=lambda value: ascii(value)[:60])
def test_a_mistake_in_a_cluster_config_is_named_with_its_file(
    text: str, said: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text, encoding="utf-8")
    check_sentence(refusal([f"cluster={path}"]), [str(path), *said])


def test_a_local_fleet_cannot_count_a_cluster(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("drafter: {replicas: auto}", encoding="utf-8")
    sentence = refusal([f"cluster={path}", "fleet=local"])
    check_sentence(sentence, [str(path), "drafter.replicas is 'auto'", "fleet to ray"])


def test_a_model_over_several_gpus_is_not_compiled() -> None:
    sentence = refusal(["cluster=cluster/eight-gpus.yaml", "models.verifier.compile=true"])
    check_sentence(sentence, ["models.verifier.compile is true", "4 GPUs", "set it to false"])


def test_there_is_a_mistake_for_every_field() -> None:
    jobs = " ".join(str(overrides) for overrides, _ in MISTAKES)
    clusters = " ".join(text for text, _ in CLUSTERS)
    for model, text in ((Job, jobs), (ClusterConfig, clusters)):
        missing = [name for name in fields_of(model) if not re.search(rf"\b{name}\b", text)]
        assert not missing


def fields_of(annotation: Any) -> Iterator[str]:
    """The names of all fields, those of nested models too."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        for name, field in annotation.model_fields.items():
            yield name
            yield from fields_of(field.annotation)
    for inner in get_args(annotation):
        yield from fields_of(inner)


def test_a_folder_that_may_not_be_written_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)  # whoever runs the tests may write anywhere
    check_sentence(refusal([]), ["output is 'runs/g2p'", "cannot be written to; choose another"])


def test_a_number_may_be_written_with_an_exponent_alone() -> None:
    job = load_job("jobs/g2p.yaml", ["decoding.temperature=1e-3", "name=2024-05-17"])
    assert (job.decoding.temperature, job.name) == (0.001, "2024-05-17")


def test_a_job_file_that_is_missing_is_named_with_its_nearest(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").touch()
    with pytest.raises(JobError, match=r"jbo\.yaml: there is no such file .*job\.yaml"):
        load_job(tmp_path / "jbo.yaml")


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


def remove(*names: str) -> Callable[[Path], None]:
    return lambda folder: [(folder / name).unlink() for name in names] and None


def put(name: str, content: str | bytes) -> Callable[[Path], None]:
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(data) and None


def change(name: str, **given: Any) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        tree = {**json.loads((folder / name).read_text()), **given}
        (folder / name).write_text(json.dumps(tree))

    return act


def cut(length: int) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:length])

    return act


def lose_a_part(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    parts = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    put("model.safetensors.index.json", json.dumps({"weight_map": parts}))(folder)


def pickle_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


DAMAGES: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "no config": (remove("config.json"), ["holds no config.json"]),
    "broken config": (put("config.json", "{"), ["cannot be read", "config.json"]),
    "config of nothing": (put("config.json", "null"), ["cannot be read"]),
    "config of bytes": (put("config.json", b"\xff\xfe\0"), ["cannot be read", "config.json"]),
    "no such kind": (change("config.json", model_type="nothing"), ["cannot be read", "nothing"]),
    "no supported kind": (change("config.json", model_type="bart"), ["bart", "only T5 models"]),
    "wrong vocabulary": (change("config.json", vocab_size="99"), ["cannot be read", "vocab_size"]),
    "no vocabulary": (change("config.json", vocab_size=0), ["end-of-text ids", "the 0 ids"]),
    "no tokenizer": (remove("tokenizer.json", "tokenizer_config.json"), ["holds no tokenizer"]),
    "half a tokenizer": (remove("tokenizer.json"), ["cannot be read"]),
    "broken tokenizer": (put("tokenizer.json", "{"), ["cannot be read"]),
    "other tokenizer": (put("tokenizer.json", "{}"), ["cannot be read"]),
    "broken tokenizer config": (put("tokenizer_config.json", "["), ["cannot be read"]),
    "no weights": (remove("model.safetensors"), ["holds no model.safetensors", "a saved model"]),
    "pickled weights": (pickle_weights, ["holds no model.safetensors", "convert its pickled"]),
    "a part is missing": (lose_a_part, ["holds no model-00002-of-00002.safetensors"]),
    "no index": (
        lambda folder: (lose_a_part(folder), put("model.safetensors.index.json", "[]")(folder))[1],
        ["model.safetensors.index.json is no index"],
    ),
    "empty weights": (cut(0), ["no whole safetensors file", "copy or download it again"]),
    "cut in the header": (cut(100), ["no whole safetensors file", "copy or download it again"]),
    "cut in the data": (cut(100_000), ["no whole safetensors file", "copy or download it again"]),
    "a pointer of Git LFS": (
        put("model.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
        ["no whole safetensors file", "copy or download it again"],
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_model_folder_is_named(damage: str, tmp_path: Path) -> None:
    folder = tmp_path / "drafter"
    shutil.copytree("jobs/g2p/drafter", folder)
    act, said = DAMAGES[damage]
    act(folder)
    check_sentence(refusal([f"models.drafter.path={folder}"]), ["models.", ".path: ", *said])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (put("generation_config.json", "[]"), ["generation_config.json", "cannot be read"]),
        (
            change("generation_config.json", eos_token_id="</s>"),
            ["end-of-text ids", "whole numbers"],
        ),
        (change("generation_config.json", eos_token_id=500), ["end-of-text ids [1, 500]"]),
    ],
)
def test_an_end_of_text_that_is_none_is_named(
    damage: Callable[[Path], None], said: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "verifier"
    shutil.copytree("jobs/g2p/verifier", folder)
    damage(folder)
    check_sentence(refusal([f"models.verifier.path={folder}"]), ["models.verifier.path", *said])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [", "not YAML"),
        ("- 1", "mapping"),
        ("", "mapping"),
        ("name: a\nname: b\n", "'name' stands twice (line 2)"),
        ("name: !!timestamp x", "not YAML"),
        ("name: !!python/object:os.system x", "not YAML"),
        ("name: " + "[" * 5000, "not YAML"),
        ("limit: " + "9" * 5000, "not YAML"),
        (b"name: \xff", "not YAML"),
        ("name: 'a\0b'", "not YAML"),
        ("? {a: 1}\n: 2", "not YAML"),
    ],
    ids=lambda value: ascii(value)[:30],
)
def test_a_file_that_is_no_yaml_mapping_is_refused(
    text: str | bytes, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    for load in (load_job, load_cluster):
        with pytest.raises(JobError) as caught:
            load(path)
        check_sentence(str(caught.value), [str(path), said])
