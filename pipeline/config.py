"""The job and the cluster config: frozen models, read from YAML and checked once, at the door.

Every mistake becomes one `JobError` sentence that names the field, the value and the remedy.
Paths are relative to the working directory.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from pipeline.records import Bonus, Sampling, Setting

Fraction = Annotated[float, Field(gt=0, le=1)]
Positive = Annotated[int, Field(ge=1)]
TransportName = Literal["auto", "tokens", "top_k", "bfloat16", "float32"]
Checked = TypeVar("Checked", bound=BaseModel)
Item = TypeVar("Item")


class JobError(ValueError):
    """A job that cannot run, said in one sentence that names the field and the remedy."""


class _Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class DatasetConfig(_Config):
    """Where the examples come from: the arguments of `datasets.load_dataset`, and how to read a row."""

    path: str
    name: str | None = None
    data_files: str | list[str] | dict[str, str | list[str]] | None = None
    revision: str | None = None
    split: str = "train"
    streaming: bool = True
    shard_size: Positive = 256
    limit: Positive | None = None
    id: str | None = None
    prompt: str | None = None
    messages: list[dict[str, str]] | None = None
    references: str | None = None

    @model_validator(mode="after")
    def _one_prompt(self) -> DatasetConfig:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give exactly one of prompt and messages")
        return self


class ModelConfig(_Config):
    """A model for `transformers`: a local folder or a hub name, and how to load it."""

    path: str
    revision: str | None = None
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    device: str = "auto"
    compile: bool = False
    """Compile the steps: quicker for small models and on GPUs, a minute at the start, other last bits."""
    trust_remote_code: bool = False


class ModelsConfig(_Config):
    """The two models of a pair. They must share their vocabulary."""

    drafter: ModelConfig
    verifier: ModelConfig
    allow_different_vocabularies: bool = False


Temperature = Annotated[float, Field(ge=0)]


class SamplingConfig(_Config):
    """How the drafter samples where it differs from the verifier; what is not given is the same."""

    temperature: Temperature | None = None
    top_k: Positive | None = None
    top_p: Fraction | None = None
    min_p: Fraction | None = None


class DecodingConfig(_Config):
    """The decoding settings. `block_size` is the paper's gamma; temperature 0 is greedy.

    Lists of block sizes and temperatures are a sweep: every combination is one setting.
    """

    block_size: Positive | Annotated[list[Positive], Field(min_length=1)] = 5
    temperature: Temperature | Annotated[list[Temperature], Field(min_length=1)] = 1.0
    top_k: Positive | None = None
    top_p: Fraction | None = None
    min_p: Fraction | None = None
    drafter: SamplingConfig | None = None
    max_new_tokens: Positive = 128
    stop: list[Annotated[str, Field(min_length=1)]] = []
    bonus: Bonus = "verifier"
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] = 0
    repeats: Positive = 1

    def settings(self, eos_token_ids: Sequence[int]) -> tuple[Setting, ...]:
        """The settings that workers decode with; the ids that end a text come from the verifier."""
        return tuple(
            Setting(
                block_size=block_size,
                max_new_tokens=self.max_new_tokens,
                sampling=sampling,
                drafter_sampling=self._drafting(sampling),
                bonus=self.bonus,
                seed=self.seed,
                repeats=self.repeats,
                eos_token_ids=tuple(eos_token_ids),
                stop=tuple(self.stop),
            )
            for block_size, temperature in product(
                _as_list(self.block_size), _as_list(self.temperature)
            )
            for sampling in [Sampling(temperature, self.top_k, self.top_p, self.min_p)]
        )

    def _drafting(self, sampling: Sampling) -> Sampling | None:
        if self.drafter is None:
            return None
        own = replace(sampling, **self.drafter.model_dump(exclude_none=True))
        return None if own == sampling else own


class StrategyConfig(_Config):
    """A line under `strategies:`. A list for a parameter is a sweep."""

    use: str
    alpha: float | list[float] | None = None
    beta: float | Literal["tuned"] | list[float | Literal["tuned"]] | None = None
    normalize: Literal["none", "mean"] | list[Literal["none", "mean"]] | None = None
    fallback: float | list[float] | None = None
    rollback: float | list[float] | None = None
    target: str | None = None


def _named_strategy(value: Any) -> Any:
    return {"use": value} if isinstance(value, str) else value


StrategyLine = Annotated[StrategyConfig, BeforeValidator(_named_strategy)]


class StepSeconds(_Config):
    """Seconds of one forward pass at batch 1 on the hardware that latency is modelled for."""

    drafter: Annotated[float, Field(gt=0)]
    verifier: Annotated[float, Field(gt=0)]


class Job(_Config):
    """One evaluation: a dataset, a pair of models, and the strategies to compare on them."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    output: str
    dataset: DatasetConfig
    models: ModelsConfig
    decoding: DecodingConfig = DecodingConfig()
    strategies: Annotated[list[StrategyLine], Field(min_length=1)]
    metrics: list[str] = []
    fleet: Literal["ray", "local"] = "ray"
    cluster: str = "cluster/local.yaml"
    transport: TransportName = "auto"
    trace: bool = False
    step_seconds: StepSeconds | None = None
    """For `modelled_seconds`; measured at the start of a run where it is not given."""


class DrafterRole(_Config):
    """How many drafters, what each is given, and its banks: slots that go through a round together.

    Three banks hide the way to the verifier; `auto` is the smallest number from three up that deals
    all verifiers equally many, two or more.
    """

    replicas: Positive = 1
    num_cpus: Annotated[float, Field(ge=0)] = 1
    num_gpus: Annotated[float, Field(ge=0)] = 0
    resources: dict[str, float] = {}
    banks: Positive | Literal["auto"] = "auto"
    slots: Positive = 32


class VerifierRole(_Config):
    """How many verifiers and what each is given."""

    replicas: Positive = 1
    num_cpus: Annotated[float, Field(ge=0)] = 1
    num_gpus: Annotated[float, Field(ge=0)] = 0
    resources: dict[str, float] = {}


Seconds = Annotated[float, Field(gt=0)]


class FailureConfig(_Config):
    """What is tried when something fails, and how long is waited for it."""

    attempts: Positive = 3
    """How often a shard is begun before it is taken apart, example by example."""
    restarts: Annotated[int, Field(ge=-1)] = 20
    """How often a worker that died is started again; -1 is without end."""
    start_seconds: Seconds = 900
    """How long a worker may take to load its model."""
    block_seconds: Seconds = 300
    """How long the verification of one block may take before the verifier is taken to hang."""
    silence_seconds: Seconds = 60
    """How long a worker may leave a call unanswered before it is taken to hang."""


class ClusterConfig(_Config):
    """Where the workers go: the resources of each role and the Ray placement strategy."""

    drafter: DrafterRole = DrafterRole()
    verifier: VerifierRole = VerifierRole()
    placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    failure: FailureConfig = FailureConfig()

    @property
    def banks(self) -> int:
        """The banks of each drafter."""
        if self.drafter.banks != "auto":
            return self.drafter.banks
        drafters, verifiers = self.drafter.replicas, self.verifier.replicas
        return next(
            banks
            for banks in itertools.count(3)
            if drafters * banks % verifiers == 0 and drafters * banks >= 2 * verifiers
        )


def load_job(path: str | Path, overrides: Sequence[str] = ()) -> Job:
    """Read a job file, apply `path=value` overrides, and check it.

    Raises:
        JobError: the file is missing, is not YAML, or a field is wrong.
    """
    tree = _read_yaml(Path(path))
    for override in overrides:
        _apply(tree, override)
    return parse_job(tree, str(path))


def parse_job(tree: dict[str, Any], source: str = "job") -> Job:
    """Check a job that is already a mapping. Raises `JobError`."""
    return _check(Job, tree, source)


def load_cluster(path: str | Path) -> ClusterConfig:
    """Read and check a cluster config. Raises `JobError`."""
    return _check(ClusterConfig, _read_yaml(Path(path)), str(path))


def _as_list(value: Item | list[Item]) -> list[Item]:
    return value if isinstance(value, list) else [value]


def _read_yaml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise JobError(f"{path}: there is no such file; paths are relative to {Path.cwd()}")
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise JobError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        raise JobError(f"{path} must hold a mapping of keys to values")
    return tree


def _apply(tree: dict[str, Any], override: str) -> None:
    """Set one `path.to.key=value` in the tree, the value read as YAML; list items go by number."""
    path, separator, text = override.partition("=")
    if not separator or not path:
        raise JobError(f"--set {override}: write it as path.to.key=value")
    *parents, last = path.split(".")
    node: Any = tree
    for part in parents:
        node = _child(node, part, override)
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise JobError(f"--set {override}: the value is not YAML: {text}") from error
    if isinstance(node, list):
        node[_index(node, last, override)] = value
    elif isinstance(node, dict):
        node[last] = value
    else:
        raise JobError(f"--set {override}: '{parents[-1]}' holds a single value, not keys")


def _child(node: Any, part: str, override: str) -> Any:
    if isinstance(node, list):
        return node[_index(node, part, override)]
    if isinstance(node, dict):
        return node.setdefault(part, {})
    raise JobError(f"--set {override}: nothing stands below '{part}'")


def _index(items: list[Any], part: str, override: str) -> int:
    if not part.isdigit() or int(part) >= len(items):
        raise JobError(f"--set {override}: '{part}' must be a number from 0 to {len(items) - 1}")
    return int(part)


def _check(model: type[Checked], tree: dict[str, Any], source: str) -> Checked:
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        raise JobError(f"{source}: {_sentence(model, error.errors()[0])}") from error


def _sentence(model: type[BaseModel], error: ErrorDetails) -> str:
    field = ".".join(str(part) for part in error["loc"] if not _is_branch(part))
    if error["type"] == "extra_forbidden":
        return _unknown_key(model, error, field)
    if error["type"] == "missing":
        return f"{field} is missing"
    if error["type"] == "value_error":
        return f"{field or 'job'}: {error['ctx']['error']}"
    message = error["msg"].replace("Input should be", "must be").replace("Value should", "must")
    return f"{field} is {error['input']!r}, but {message[0].lower()}{message[1:]}"


def _is_branch(part: int | str) -> bool:
    """Pydantic names the branch of a union in the location; people do not write it."""
    return isinstance(part, str) and (part in {"str", "float", "int"} or "[" in part)


def _unknown_key(model: type[BaseModel], error: ErrorDetails, field: str) -> str:
    known = _keys_at(model, error["loc"][:-1])
    near = difflib.get_close_matches(str(error["loc"][-1]), known, n=1, cutoff=0.5)
    remedy = f"did you mean '{near[0]}'?" if near else f"known keys: {', '.join(known)}"
    return f"{field} is not a key; {remedy}"


def _keys_at(model: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    for part in location:
        if isinstance(part, str) and part in model.model_fields:
            model = _nested_model(model.model_fields[part].annotation) or model
    return list(model.model_fields)


def _nested_model(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = (_nested_model(inner) for inner in get_args(annotation))
    return next((model for model in found if model is not None), None)
