"""The job and the cluster config: frozen models, read from YAML and checked once, at the door.

Every mistake becomes one `JobError` sentence that names the field, the value and the remedy.
Paths are relative to the working directory.
"""

from __future__ import annotations

import difflib
import itertools
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails

from pipeline.records import Bonus, Sampling, Setting
from pipeline.redaction import redact

_PATH_BYTES, _PATH_PART_BYTES = 4095, 255
"""The longest path, and the longest name in one, that file systems take."""

_LABEL = r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
_LABEL_PREFIX = r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?"
"""Names and values of node labels, as Ray and Kubernetes spell them."""


def _one_line(text: str) -> str:
    if not text.strip() or not text.isprintable():
        raise ValueError(f"{reprlib.repr(text)} is not a name; give one line of text")
    return text


def _path(text: str) -> str:
    longest = 0 if "://" in text else max(len(part.encode()) for part in text.split("/"))
    if longest > _PATH_PART_BYTES or len(text.encode()) > _PATH_BYTES:
        raise ValueError(f"{reprlib.repr(text)} is too long for a path; shorten it")
    if text.startswith("~"):
        _expanded(text)
    return text


def _local(text: str) -> str:
    if "://" in text:
        raise ValueError(f"{text!r} is not on this machine; give a local path")
    return _expanded(text)


def _expanded(text: str) -> str:
    try:
        return str(Path(text).expanduser())
    except RuntimeError as error:
        raise ValueError(f"{text!r} names no home folder; write the path out") from error


def _function(text: str) -> str:
    if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", text):
        raise ValueError(f"{text!r} names no function; write it as module:function")
    return text


def _device(text: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", text):
        raise ValueError(f"{text!r} is not a device; give auto, cpu, cuda, or one GPU as cuda:0")
    return text


def _memory(value: Any) -> Any:
    """A text such as `16GiB` as bytes."""
    if not isinstance(value, str):
        return value
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?) ?([KMGT])(i?)B", value, re.ASCII)
    if found is None:
        raise ValueError(
            f"{reprlib.repr(value)} is no amount of memory; give bytes, or a text such as 16GiB"
        )
    amount, prefix, binary = found.groups()
    return round(float(amount) * (1024 if binary else 1000) ** ("KMGT".index(prefix) + 1))


def _accelerator(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", text):
        raise ValueError(
            f"{reprlib.repr(text)} is no type of accelerator; give Ray's name of one, as H100"
        )
    return text


def _label(text: str) -> str:
    if not re.fullmatch(rf"({_LABEL_PREFIX}/)?{_LABEL}", text):
        raise ValueError(
            f"{reprlib.repr(text)} is no name of a label; give one as pool or example.com/pool"
        )
    return text


def _selector(text: str) -> str:
    if not re.fullmatch(rf"!?({_LABEL}|in\({_LABEL}(, ?{_LABEL})*\))", text):
        raise ValueError(
            f"{reprlib.repr(text)} selects no label; give a value, in(a, b), or either with ! for all others"
        )
    return text


def _temperature(value: float) -> float:
    if 0 < value < 1e-6:  # logits divided by less leave the range of float32
        raise ValueError(f"{value:g} is too close to 0; give 0, which is greedy, or 1e-6 and more")
    return value


Fraction = Annotated[float, Field(gt=0, le=1)]
Positive = Annotated[int, Field(ge=1, lt=2**31)]
OneLine = Annotated[str, AfterValidator(_one_line)]
PathText = Annotated[OneLine, AfterValidator(_path)]
"""A path, perhaps with `~`, or a hub name or URL in its place."""
LocalPath = Annotated[PathText, AfterValidator(_local)]
Device = Annotated[str, AfterValidator(_device)]
Memory = Annotated[int, Field(ge=0, lt=2**63), BeforeValidator(_memory)]
"""Bytes, or a text such as `16GiB` or `500MB`."""
Label = Annotated[str, AfterValidator(_label)]
LabelSelector = Annotated[str, AfterValidator(_selector)]
Temperature = Annotated[float, Field(ge=0), AfterValidator(_temperature)]
LongPrompts = Literal["error", "truncate", "skip"]
TransportName = Literal["auto", "tokens", "top_k", "bfloat16", "float32"]
Checked = TypeVar("Checked", bound=BaseModel)
Item = TypeVar("Item")


class JobError(ValueError):
    """A job that cannot run, said in one sentence that names the field and the remedy.

    What it quotes of the job, or of a library, is rid of credentials.
    """

    def __init__(self, sentence: str, others: Sequence[JobError] = ()) -> None:
        super().__init__(redact(sentence))
        self.others = tuple(others)
        """What else is wrong with the job, as far as it was looked for."""

    @property
    def all(self) -> list[JobError]:
        """This one and the others, each without the others that it brings."""
        return [JobError(str(self)), *(one for other in self.others for one in other.all)]


def all_of(makers: Iterable[Callable[[], Item]]) -> list[Item]:
    """What all of them make.

    Raises:
        JobError: the first that one of them raised; it brings those of the others.
    """
    made: list[Item] = []
    problems: list[JobError] = []
    for make in makers:
        try:
            made.append(make())
        except JobError as error:
            problems.append(error)
    if problems:
        raise JobError(str(problems[0]), [*problems[0].others, *problems[1:]]) from problems[0]
    return made


class _Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


DataFiles = PathText | Annotated[list[PathText], Field(min_length=1)]


class DatasetConfig(_Config):
    """Where the examples come from: the arguments of `datasets.load_dataset`, and how to read a row."""

    path: PathText
    name: OneLine | None = None
    data_files: DataFiles | Annotated[dict[str, DataFiles], Field(min_length=1)] | None = None
    revision: OneLine | None = None
    split: OneLine = "train"
    streaming: bool = True
    shard_size: Positive = 256
    limit: Positive | None = None
    id: str | None = None
    prompt: str | None = None
    messages: list[dict[str, str]] | None = None
    references: str | None = None
    max_prompt_tokens: Positive | None = None
    """The longest prompt, special tokens included; never more than the models hold."""
    long_prompts: LongPrompts = "error"
    """What a longer one becomes: a row with an error, a shorter prompt, or a row that is skipped."""

    @model_validator(mode="after")
    def _one_prompt(self) -> DatasetConfig:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give exactly one of prompt and messages")
        return self


class ModelConfig(_Config):
    """A model for `transformers`: a local folder or a hub name, and how to load it."""

    path: PathText
    revision: OneLine | None = None
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    device: Device = "auto"
    compile: bool = False
    """Compile the steps: quicker for small models and on GPUs, a minute at the start, other last bits."""
    trust_remote_code: bool = False


class ModelsConfig(_Config):
    """The two models of a pair. They must share their vocabulary."""

    drafter: ModelConfig
    verifier: ModelConfig
    allow_different_vocabularies: bool = False


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

    @field_validator("block_size", "temperature")
    @classmethod
    def _no_setting_twice(cls, value: Any) -> Any:
        twice = [item for item in _as_list(value) if _as_list(value).count(item) > 1]
        if twice:
            raise ValueError(f"{twice[0]} stands twice; remove one")
        return value

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

    use: OneLine
    alpha: float | list[float] | None = None
    beta: float | Literal["tuned"] | list[float | Literal["tuned"]] | None = None
    normalize: Literal["none", "mean"] | list[Literal["none", "mean"]] | None = None
    fallback: float | list[float] | None = None
    rollback: float | list[float] | None = None
    target: Annotated[str, AfterValidator(_function)] | None = None


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
    output: LocalPath
    dataset: DatasetConfig
    models: ModelsConfig
    decoding: DecodingConfig = DecodingConfig()
    strategies: Annotated[list[StrategyLine], Field(min_length=1)]
    metrics: list[OneLine] = []
    allow_custom_code: bool = False
    """Whether code that the job names is run: targets of one's own, metrics that are not built in."""
    fleet: Literal["ray", "local"] = "ray"
    cluster: LocalPath = "cluster/local.yaml"
    transport: TransportName = "auto"
    trace: bool = False
    step_seconds: StepSeconds | None = None
    """For `modelled_seconds`; measured at the start of a run where it is not given."""
    max_error_share: Annotated[float, Field(ge=0, le=1)] = 0.5
    """The share of rows with errors above which a run stops; at 1 it never does.

    A few bad rows are data, most rows bad is a fault of the job: a wrong column, a broken model.
    """


MOST_REPLICAS = 10_000
"""The most workers that a role may have."""


class _Role(_Config):
    """How many workers a role has, what each is given, and the nodes that they may stand on."""

    replicas: Annotated[int, Field(ge=1, le=MOST_REPLICAS)] | Literal["auto"] = 1
    """`auto` is as many as fit what is free in the cluster beside the other role."""
    num_cpus: Annotated[float, Field(ge=0)] = 1
    num_gpus: Annotated[float, Field(ge=0)] = 0
    memory: Memory = 0
    """What Ray sets aside for each; it is counted, not enforced."""
    accelerator_type: Annotated[str, AfterValidator(_accelerator)] | None = None
    labels: dict[Label, LabelSelector] = {}
    """Selectors of node labels: `value`, `!value`, `in(a, b)`, `!in(a, b)`."""
    resources: dict[OneLine, Annotated[float, Field(gt=0)]] = {}

    @property
    def count(self) -> int:
        """How many workers there are. Raises `JobError` as long as that is `auto`."""
        if self.replicas == "auto":
            raise JobError("replicas is 'auto', which is a number on a running Ray cluster only")
        return self.replicas

    @field_validator("num_gpus")
    @classmethod
    def _whole_gpus(cls, value: float) -> float:
        if value > 1 and value % 1:
            raise ValueError(f"{value:g} is no number of GPUs; give a whole number, or 1 and less")
        return value

    @field_validator("resources")
    @classmethod
    def _named_resources(cls, value: dict[str, float]) -> dict[str, float]:
        own_keys = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
        taken = own_keys.keys() & value.keys()
        if taken:
            name = min(taken)
            raise ValueError(f"{name} has a key of its own; use {own_keys[name]}")
        return value

    @model_validator(mode="after")
    def _countable(self) -> _Role:
        needs = (self.num_cpus, self.num_gpus, self.memory, *self.resources.values())
        if self.replicas == "auto" and not any(needs):
            raise ValueError("replicas is 'auto', but any number fits who needs nothing; give one")
        return self


class DrafterRole(_Role):
    """The drafters, and the banks of each: slots that go through a round together.

    Three banks hide the way to the verifier; `auto` is the smallest number from three up that deals
    all verifiers equally many, two or more.
    """

    banks: Positive | Literal["auto"] = "auto"
    slots: Positive = 32


class VerifierRole(_Role):
    """The verifiers. One with several GPUs has its layers dealt to them."""


Seconds = Annotated[float, Field(gt=0)]


class FailureConfig(_Config):
    """What is tried when something fails, and how long is waited for it."""

    attempts: Positive = 3
    """How often a shard is begun before it is taken apart, example by example."""
    restarts: Annotated[int, Field(ge=-1, lt=2**31)] = 20
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
    autoscaling_seconds: Annotated[float, Field(ge=0)] = 0
    """How long nodes that an autoscaler adds may take; 0 where none does.

    At 0 a plan that does not fit the nodes that are there is refused at once.
    """
    links: dict[OneLine, Annotated[list[OneLine], Field(min_length=1)]] = {}
    """The verifiers that each drafter calls, by name; empty is all, dealt round robin."""
    failure: FailureConfig = FailureConfig()

    @model_validator(mode="after")
    def _one_number_is_known(self) -> ClusterConfig:
        counts = (self.drafter.replicas, self.verifier.replicas)
        if counts == ("auto", "auto"):
            raise ValueError("replicas is 'auto' for both roles; give a number for one")
        if "auto" in counts and (self.links or self.autoscaling_seconds):
            key = "links" if self.links else "autoscaling_seconds"
            raise ValueError(f"replicas is 'auto', which {key} cannot go with; give a number")
        return self

    @model_validator(mode="after")
    def _links_are_whole(self) -> ClusterConfig:
        if not self.links:
            return self
        drafters, verifiers = self.drafter_names(), self.verifier_names()
        called = [name for names in self.links.values() for name in names]
        for key, named, there in (
            ("drafter", [*self.links], drafters),
            ("verifier", called, verifiers),
        ):
            if unknown := [name for name in named if name not in there]:
                raise ValueError(
                    f"links: there is no {key} '{unknown[0]}'; {_first_to_last(there)}"
                )
            if missing := [name for name in there if name not in named]:
                raise ValueError(f"links: '{missing[0]}' is missing; every {key} must be linked")
        if twice := [name for name, names in self.links.items() if len({*names}) < len(names)]:
            raise ValueError(f"links: '{twice[0]}' names a verifier twice; remove one")
        if lost := [name for name, names in self.links.items() if len(names) > self.banks]:
            raise ValueError(
                f"links: '{lost[0]}' has more verifiers than banks; raise drafter.banks"
            )
        return self

    def drafter_names(self) -> list[str]:
        """drafter-0, drafter-1, ..."""
        return [f"drafter-{index}" for index in range(self.drafter.count)]

    def verifier_names(self) -> list[str]:
        """verifier-0, verifier-1, ..."""
        return [f"verifier-{index}" for index in range(self.verifier.count)]

    @property
    def banks(self) -> int:
        """The banks of each drafter."""
        if self.drafter.banks != "auto":
            return self.drafter.banks
        if self.links:
            longest = max(len(names) for names in self.links.values())
            return longest * -(-3 // longest)
        drafters, verifiers = self.drafter.count, self.verifier.count
        return next(
            banks
            for banks in itertools.count(3)
            if drafters * banks % verifiers == 0 and drafters * banks >= 2 * verifiers
        )


def _first_to_last(names: Sequence[str]) -> str:
    return f"they are {names[0]} to {names[-1]}" if len(names) > 1 else f"there is {names[0]}"


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
    if path.is_dir():
        raise JobError(f"{path} is a folder; name a YAML file")
    if not path.is_file():
        near = near_path(path)
        raise JobError(f"{path}: there is no such file{near}; paths are relative to {Path.cwd()}")
    try:
        tree = _parse_yaml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise JobError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        raise JobError(f"{path} must hold a mapping of keys to values")
    return tree


def near_path(path: str | Path) -> str:
    """A hint at the file or folder that was perhaps meant; empty if none is called alike."""
    folder, name = Path(path).parent, Path(path).name
    names = [other.name for other in folder.iterdir()] if folder.is_dir() else []
    near = difflib.get_close_matches(name, [other for other in names if other != name], n=1)
    return f" (did you mean '{folder / near[0]}'?)" if near else ""


class _Loader(yaml.SafeLoader):
    """YAML in which no key stands twice, a date is text, and `1e-3` is a number."""

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        value = super().construct_scalar(node)
        value.encode()  # raises what is a `ValueError` for a lone surrogate
        return value

    def construct_document(self, node: yaml.Node) -> Any:
        if _spelled_out(node, {}) > _MOST_NODES:
            raise ValueError("it is too large once its aliases are spelled out")
        return super().construct_document(node)

    def compose_mapping_node(self, anchor: dict[Any, yaml.Node]) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        names = [key.value for key in keys]
        for number, key in enumerate(keys):
            if key.value in names[:number]:
                line = key.start_mark.line + 1
                raise ValueError(f"the key {key.value!r} stands twice (line {line}); remove one")
        return node


_MOST_NODES = 1_000_000
"""Aliases of aliases, and merges of them, make a few lines of YAML fill any memory."""


def _spelled_out(node: Any, sizes: dict[int, int]) -> int:
    """How many nodes there are if each alias is what it stands for; `sizes` has those known."""
    if isinstance(node, tuple):
        return sum(_spelled_out(part, sizes) for part in node)
    if id(node) not in sizes:
        sizes[id(node)] = 1  # for an alias of what is around it
        parts = node.value if isinstance(node, yaml.CollectionNode) else ()
        sizes[id(node)] = 1 + sum(_spelled_out(part, sizes) for part in parts)
    return sizes[id(node)]


_Loader.yaml_implicit_resolvers = {
    first: [pair for pair in pairs if pair[0] != "tag:yaml.org,2002:timestamp"]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def _parse_yaml(text: str) -> Any:
    """Raises `ValueError` for all that is not YAML."""
    try:
        return yaml.load(text, _Loader)
    except ValueError:
        raise
    except Exception as error:  # PyYAML lets pass whatever the value of a tag raises
        raise ValueError(str(error)) from error


def _apply(tree: dict[str, Any], override: str) -> None:
    """Set one `path.to.key=value` in the tree, the value read as YAML; list items go by number."""
    path, separator, text = override.partition("=")
    override = _printable(override)
    if not separator or not path:
        raise JobError(f"--set {override}: write it as path.to.key=value")
    *parents, last = path.split(".")
    node: Any = tree
    for part in parents:
        node = _child(node, part, override)
    try:
        value = _parse_yaml(text)
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise JobError(f"--set {override}: the value is not YAML: {reason}") from error
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
    if not part.isdecimal() or int(part) >= len(items):
        raise JobError(f"--set {override}: '{part}' must be a number from 0 to {len(items) - 1}")
    return int(part)


def _check(model: type[Checked], tree: dict[str, Any], source: str) -> Checked:
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        raise JobError(f"{source}: {_sentence(model, tree, error.errors())}") from error


def _sentence(model: type[BaseModel], tree: Any, errors: Sequence[ErrorDetails]) -> str:
    """The most telling of the errors: a key that is not known, else the first, at its deepest."""
    places = [(tuple(_field(tree, error)), error) for error in errors]
    unknown = [found for found in places if found[1]["type"] == "extra_forbidden"]
    first = (unknown or places)[0][0]
    branches = [found for found in places if found[0][: len(first)] == first]
    deepest = max(len(place) for place, _ in branches)
    place, error = next(found for found in branches if len(found[0]) == deepest)
    field = ".".join(_printable(part) for part in place)
    if error["type"] == "extra_forbidden":
        return _unknown_key(model, error, field)
    if error["type"] == "missing":
        return f"{field} is missing"
    if error["type"] == "value_error":
        return f"{field or 'job'}: {error['ctx']['error']}"
    here = [other for at, other in branches if at == place]
    of_right_type = [
        other for other in here if not other["type"].endswith(("_type", "literal_error"))
    ]
    wanted = dict.fromkeys(_wanted(model, other) for other in of_right_type or here)
    return f"{field or 'job'} is {reprlib.repr(error['input'])}, but must {' or '.join(wanted)}"


def _field(tree: Any, error: ErrorDetails) -> Iterator[int | str]:
    """Where in the tree an error is: its location without the names that Pydantic gives to types."""
    for part in error["loc"]:
        known = (
            tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
        )
        if part in known:
            tree = tree[part]
        elif error["type"] != "missing" or part != error["loc"][-1]:
            continue
        yield part


def _printable(part: int | str) -> str:
    text = str(part)
    return text if text and text.isprintable() else ascii(text)


def _wanted(model: type[BaseModel], error: ErrorDetails) -> str:
    """What a value must be, as it goes on behind "must"."""
    if error["type"] == "model_type":
        return f"be a mapping of {', '.join(_keys_at(model, error['loc']))}"
    message = re.sub(r"^(Input|String|Value|List|Dictionary) should ", "", error["msg"])
    message = re.sub(r" after validation, not \d+$", "", message)
    message = message.replace("valid dictionary", "mapping").replace("valid list", "list")
    return message[0].lower() + message[1:]


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
