"""A look at the first prompts of a job: how long they are, and how many rows are bad."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.data.shards import iter_shards
from pipeline.records import SKIPPED
from pipeline.run import Prepared

LOOKED_AT = 256


@dataclass(frozen=True)
class Prompts:
    """The first rows of a dataset, tokenized."""

    looked_at: int
    longest: int
    """Tokens of the longest prompt that would be decoded; 0 if there is none."""
    errors: Mapping[str, int]
    """How many rows have an error, by its code."""

    @property
    def error_share(self) -> float:
        """Of the rows; those that the job asks to skip have no error."""
        wrong = sum(count for code, count in self.errors.items() if code != SKIPPED)
        return wrong / self.looked_at


def first_prompts(prepared: Prepared, rows: int = LOOKED_AT) -> Prompts:
    """Read and tokenize the first rows of the job, as many as it has."""
    dataset = prepared.job.dataset
    rows = min(rows, dataset.limit or rows)
    some = dataset.model_copy(update={"limit": rows, "shard_size": rows})
    examples = [e for shard in iter_shards(some, prepared.reader) for e in shard.examples]
    return Prompts(
        len(examples),
        max((len(example.prompt_ids) for example in examples), default=0),
        Counter(example.error.code for example in examples if example.error is not None),
    )
