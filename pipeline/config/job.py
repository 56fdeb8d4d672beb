"""The job: one evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field, field_validator, model_validator

from pipeline.config.fields import (
    Config,
    Device,
    Fraction,
    FunctionName,
    LocalPath,
    OneLine,
    PathText,
    Positive,
    Temperature,
)
from pipeline.records import Bonus, Sampling, Setting

LongPrompts = Literal["error", "truncate", "skip"]
TransportName = Literal["auto", "tokens", "top_k", "bfloat16", "float32"]
Item = TypeVar("Item")

DataFiles = PathText | Annotated[list[PathText], Field(min_length=1)]


class DatasetConfig(Config):
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


class ModelConfig(Config):
    """A model for `transformers`: a local folder or a hub name, and how to load it."""

    path: PathText
    revision: OneLine | None = None
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    device: Device = "auto"
    compile: bool = False
    """Compile the steps: quicker for small models and on GPUs, a minute at the start, other last bits."""
    trust_remote_code: bool = False


class ModelsConfig(Config):
    """The two models of a pair. They must share their vocabulary."""

    drafter: ModelConfig
    verifier: ModelConfig
    allow_different_vocabularies: bool = False


class SamplingConfig(Config):
    """How the drafter samples where it differs from the verifier; what is not given is the same."""

    temperature: Temperature | None = None
    top_k: Positive | None = None
    top_p: Fraction | None = None
    min_p: Fraction | None = None


class DecodingConfig(Config):
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


class StrategyConfig(Config):
    """A line under `strategies:`. A list for a parameter is a sweep."""

    use: OneLine
    alpha: float | list[float] | None = None
    beta: float | Literal["tuned"] | list[float | Literal["tuned"]] | None = None
    normalize: Literal["none", "mean"] | list[Literal["none", "mean"]] | None = None
    fallback: float | list[float] | None = None
    rollback: float | list[float] | None = None
    target: FunctionName | None = None


def _named_strategy(value: Any) -> Any:
    return {"use": value} if isinstance(value, str) else value


StrategyLine = Annotated[StrategyConfig, BeforeValidator(_named_strategy)]


class StepSeconds(Config):
    """Seconds of one forward pass at batch 1 on the hardware that latency is modelled for."""

    drafter: Annotated[float, Field(gt=0)]
    verifier: Annotated[float, Field(gt=0)]


class Job(Config):
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


def _as_list(value: Item | list[Item]) -> list[Item]:
    return value if isinstance(value, list) else [value]
