"""Tokens a second of the engine against `transformers`, on the demo pair, one thread, greedy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
from transformers import AutoModelForSeq2SeqLM, PreTrainedModel

from pipeline.config import load_job
from pipeline.data.shards import iter_shards
from pipeline.models.interface import LanguageModel
from pipeline.models.loading import load_model
from pipeline.records import Strategy
from pipeline.run import Prepared, prepare
from tests.benchmarks.ratio import Ratio
from tests.loop import decode

RUNS = 3
BATCH = 32
ASSISTED = 8


def measure() -> Iterator[Ratio]:
    """Our batched speculation and our verifier alone, each against what `transformers` offers."""
    job = prepare(load_job("jobs/demo.yaml", ["decoding.temperature=0", f"dataset.limit={BATCH}"]))
    shard = next(iter_shards(job.job.dataset.model_copy(update={"shard_size": BATCH}), job.reader))
    prompts = [example.prompt_ids for example in shard.examples]
    hf_drafter, hf_verifier = (
        AutoModelForSeq2SeqLM.from_pretrained(model.path, dtype=torch.float32).eval()
        for model in (job.job.models.drafter, job.job.models.verifier)
    )
    pair = [
        load_model(model, job.pairing.vocabulary)
        for model in (job.job.models.drafter, job.job.models.verifier)
    ]
    ours = [rate(lambda: speculative(job, pair, prompts, "spec_decode")) for _ in range(RUNS)]
    alone = [rate(lambda: speculative(job, pair, prompts, "verifier")) for _ in range(RUNS)]
    assisted = [
        rate(lambda: generated(job, hf_verifier, prompts[:ASSISTED], 1, hf_drafter))
        for _ in range(RUNS)
    ]
    batched = [rate(lambda: generated(job, hf_verifier, prompts, BATCH)) for _ in range(RUNS)]
    yield Ratio(
        f"speculative, {BATCH} slots / assisted generation, batch 1",
        [a / b for a, b in zip(ours, assisted, strict=True)],
        ">= 15",
    )
    yield Ratio(
        f"verifier in our lanes (with a drafter) / `generate`, batch {BATCH}",
        [a / b for a, b in zip(alone, batched, strict=True)],
        ">= 1",
    )


def rate(work: Callable[[], int]) -> float:
    """Tokens a second."""
    started = time.perf_counter()
    return work() / (time.perf_counter() - started)


def speculative(
    job: Prepared, pair: list[LanguageModel], prompts: list[tuple[int, ...]], use: str
) -> int:
    """Decode with the engine in this process; how many tokens came out."""
    outcomes = decode(*pair, prompts, [Strategy(use)], job.settings[0], slots=BATCH)
    return sum(len(outcome.output_ids) for outcome in outcomes.values())


def generated(
    job: Prepared,
    model: PreTrainedModel,
    prompts: list[tuple[int, ...]],
    batch: int,
    assistant: PreTrainedModel | None = None,
) -> int:
    """Decode with `generate`; how many tokens came out."""
    tokens = 0
    if assistant is not None:
        assistant.generation_config.num_assistant_tokens = job.settings[0].block_size
        assistant.generation_config.num_assistant_tokens_schedule = "constant"
        assistant.generation_config.assistant_confidence_threshold = 0
    for start in range(0, len(prompts), batch):
        part = prompts[start : start + batch]
        width = max(len(prompt) for prompt in part)
        ids = torch.tensor([[*prompt, *[0] * (width - len(prompt))] for prompt in part])
        output = model.generate(
            ids,
            attention_mask=(ids != 0).long(),
            do_sample=False,
            max_new_tokens=job.settings[0].max_new_tokens,
            assistant_model=assistant,
        )
        tokens += int((output[:, 1:] != 0).sum())
    return tokens
