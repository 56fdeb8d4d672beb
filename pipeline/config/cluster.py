"""The cluster config: what each worker is given, and what is tried when one fails."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from pipeline.config.errors import JobError
from pipeline.config.fields import (
    Accelerator,
    Config,
    Label,
    LabelSelector,
    Memory,
    OneLine,
    Positive,
)

MOST_REPLICAS = 10_000
"""The most workers that a role may have."""


class _Role(Config):
    """How many workers a role has, what each is given, and the nodes that they may stand on."""

    replicas: Annotated[int, Field(ge=1, le=MOST_REPLICAS)] | Literal["auto"] = 1
    """`auto` is as many as fit what is free in the cluster beside the other role."""
    num_cpus: Annotated[float, Field(ge=0)] = 1
    num_gpus: Annotated[float, Field(ge=0)] = 0
    memory: Memory = 0
    """What Ray sets aside for each; it is counted, not enforced."""
    accelerator_type: Accelerator | None = None
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


class FailureConfig(Config):
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


class ClusterConfig(Config):
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
