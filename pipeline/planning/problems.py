"""Everything that is wrong with a job, as far as it shows before a weight is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pipeline.config import Job, JobError, ModelsConfig, all_of
from pipeline.models.loading import load_tokenizer
from pipeline.models.sizes import ModelSize
from pipeline.planning.prompts import Prompts
from pipeline.protocol.strategies import KINDS
from pipeline.records import SKIPPED
from pipeline.results.containment import check_contained
from pipeline.results.manifest import check_same_run, make_manifest
from pipeline.run import CHECKS, JobParts, Prepared

_SPECIAL = ("bos", "eos", "unk")
"""Of the special tokens, those that either model reads or writes here. Nobody pads."""


@dataclass(frozen=True)
class Problem:
    """What is wrong, with its remedy."""

    sentence: str
    is_refused: bool = True
    """Whether a run would stop at it. Other problems it would go on with, and probably in vain."""


def refusals(parts: JobParts) -> list[Problem]:
    """All that a run would stop at before it starts a worker, each once."""
    checks = [partial(check, parts) for check in (*CHECKS, _check_folder)]
    try:
        all_of(checks)
    except JobError as error:
        return [Problem(sentence) for sentence in dict.fromkeys(map(str, error.all))]
    return []


def doubts(
    prepared: Prepared, sizes: Mapping[str, ModelSize], prompts: Prompts
) -> Iterator[Problem]:
    """What a run would not stop at.

    Args:
        sizes: of `drafter` and `verifier`.
    """
    for sentence in (
        *_half_precision(sizes),
        *_special_tokens(prepared.job.models),
        *_short_drafter(prepared, sizes["drafter"], prompts),
        *_bad_rows(prepared.job, prompts),
    ):
        yield Problem(sentence, is_refused=False)


def _check_folder(parts: JobParts) -> None:
    """What `run` looks at in the output folder before it writes there."""
    output = Path(parts.job.output)
    check_contained(output)
    check_same_run(output, make_manifest(parts.job))


def _half_precision(sizes: Mapping[str, ModelSize]) -> Iterator[str]:
    for role, size in sizes.items():
        if size.has_encoder and size.dtype == "float16":
            yield (
                f"models.{role}.dtype is float16, in which activations of T5 models overflow; use "
                "bfloat16 or float32"
            )


def _special_tokens(models: ModelsConfig) -> Iterator[str]:
    if models.allow_different_vocabularies:
        return
    drafter, verifier = load_tokenizer(models.drafter), load_tokenizer(models.verifier)
    for name in _SPECIAL:
        ids = [getattr(tokenizer, f"{name}_token_id") for tokenizer in (drafter, verifier)]
        if ids[0] != ids[1]:
            yield (
                f"models: the {name.upper()} token is id {ids[0]} to the drafter and {ids[1]} to the "
                "verifier, whose word counts; choose two models that were trained alike, or set "
                "models.allow_different_vocabularies: true"
            )


def _short_drafter(prepared: Prepared, drafter: ModelSize, prompts: Prompts) -> Iterator[str]:
    longest = prompts.longest + prepared.settings[0].max_new_tokens
    alone = [s.use for s in prepared.strategies if not KINDS[s.use].uses_verifier]
    if drafter.context is not None and longest > drafter.context and alone:
        yield (
            f"strategies: {alone[0]} has no verifier, and texts of up to {longest} tokens do not fit the "
            f"drafter's context of {drafter.context}; lower decoding.max_new_tokens or "
            "dataset.max_prompt_tokens"
        )


def _bad_rows(job: Job, prompts: Prompts) -> Iterator[str]:
    if share := prompts.error_share:
        kinds = ", ".join(_counted(prompts.errors))
        stops = "; above dataset errors of " if share > job.max_error_share else ""
        yield (
            f"dataset: of the first {prompts.looked_at} rows {kinds}, which become rows with errors"
            + (f"{stops}{job.max_error_share:.0%} the run stops" if stops else "")
        )


def _counted(errors: Mapping[str, int]) -> Sequence[str]:
    return [f"{count} have {code}" for code, count in errors.items() if code != SKIPPED]
