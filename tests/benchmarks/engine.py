"""Tokens a second of the engine against `transformers`: one thread, greedy, the demo pair."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel

from pipeline.config import ModelConfig, ModelsConfig, load_job
from pipeline.data.shards import iter_shards
from pipeline.models.loading import load_config, load_model
from pipeline.records import Setting, Strategy
from pipeline.run import prepare
from pipeline.workers.transport import exact_transport
from tests.benchmarks.ratio import Ratio
from tests.loop import Outcomes, decode

RUNS = 3
BATCH = 32
PROMPTS = 256
ASSISTED = 16

Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Contest:
    """What everybody decodes: the same models, prompts and limits."""

    models: ModelsConfig
    vocabulary: int
    prompts: Prompts
    setting: Setting


class Ours:
    """The pair in our engine, in this process, all prompts at once."""

    def __init__(self, contest: Contest) -> None:
        self._contest = contest
        models = contest.models
        self._drafter = load_model(models.drafter, contest.vocabulary)
        self._verifier = load_model(models.verifier, contest.vocabulary)

    def outcomes(self, use: str) -> Outcomes:
        """What a strategy makes of the prompts."""
        pair = (self._drafter, self._verifier)
        of = self._contest
        strategies = [Strategy(use)]
        # As a job would choose with `transport: auto`.
        transport = exact_transport(strategies, [of.setting], of.vocabulary, trace=False)
        return decode(*pair, of.prompts, strategies, of.setting, slots=BATCH, transport=transport)

    def tokens(self, use: str) -> int:
        """How many tokens come out."""
        return sum(len(outcome.output_ids) for outcome in self.outcomes(use).values())


class Theirs:
    """The pair in `transformers`."""

    def __init__(self, contest: Contest) -> None:
        self._contest = contest
        self._drafter, self._verifier = map(
            loaded, (contest.models.drafter, contest.models.verifier)
        )
        assisting = self._drafter.generation_config
        assisting.num_assistant_tokens = contest.setting.block_size
        assisting.num_assistant_tokens_schedule = "constant"
        assisting.assistant_confidence_threshold = 0

    def batched(self) -> int:
        """The verifier alone, batch by batch; how many tokens come out."""
        prompts, setting = self._contest.prompts, self._contest.setting
        return sum(
            generated(self._verifier, prompts[start : start + BATCH], setting)
            for start in range(0, len(prompts), BATCH)
        )

    def assisted(self) -> int:
        """Some prompts one by one, as assisted generation takes no more; how many tokens come out."""
        return sum(
            generated(self._verifier, [prompt], self._contest.setting, self._drafter)
            for prompt in self._contest.prompts[:ASSISTED]
        )


def measure() -> Iterator[Ratio]:
    """The demo pair."""
    prepared = prepare(
        load_job("jobs/demo.yaml", ["decoding.temperature=0", f"dataset.limit={PROMPTS}"])
    )
    dataset = prepared.job.dataset.model_copy(update={"shard_size": PROMPTS})
    shard = next(iter_shards(dataset, prepared.reader))
    contest = Contest(
        models=prepared.job.models,
        vocabulary=prepared.pairing.vocabulary,
        prompts=[example.prompt_ids for example in shard.examples],
        setting=prepared.settings[0],
    )
    yield from against_transformers(contest, speculative_target=">= 15")


def against_transformers(contest: Contest, speculative_target: str) -> Iterator[Ratio]:
    """Our batched speculation and our verifier alone, each against what `transformers` offers."""
    ours, theirs = Ours(contest), Theirs(contest)
    speculative, assisted, alone, batched = in_turns(
        lambda: ours.tokens("spec_decode"),
        theirs.assisted,
        lambda: ours.tokens("verifier"),
        theirs.batched,
    )
    yield Ratio(
        f"speculative, {BATCH} slots / assisted generation, batch 1",
        over(speculative, assisted),
        speculative_target,
    )
    yield Ratio(
        f"verifier alone in our engine / `generate`, batch {BATCH}",
        over(alone, batched),
        ">= 1",
    )


def in_turns(*works: Callable[[], int], runs: int = RUNS) -> list[list[float]]:
    """Tokens a second of each, measured in turns: what slows the machine down hits all of them."""
    rounds = [[rate(work) for work in works] for _ in range(runs)]
    return [list(rates) for rates in zip(*rounds, strict=True)]


def rate(work: Callable[[], int]) -> float:
    """Tokens a second."""
    started = time.perf_counter()
    return work() / (time.perf_counter() - started)


def over(rates: Sequence[float], others: Sequence[float]) -> list[float]:
    """Run by run."""
    return [one / other for one, other in zip(rates, others, strict=True)]


def generated(
    model: PreTrainedModel,
    prompts: Prompts,
    setting: Setting,
    assistant: PreTrainedModel | None = None,
) -> int:
    """Decode one batch with `generate`; how many tokens come out, an end of text among them."""
    encodes = model.config.is_encoder_decoder
    tokens, mask = padded(prompts, left=not encodes)
    output = model.generate(
        tokens,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=setting.max_new_tokens,
        assistant_model=assistant,
    )
    start = 1 if encodes else tokens.shape[1]
    return written(output[:, start:], setting.eos_token_ids)


def padded(prompts: Prompts, left: bool) -> tuple[Tensor, Tensor]:
    """Prompts as int64 (N, longest), and the mask of what is no padding."""
    width = max(map(len, prompts))
    rows, masks = [], []
    for prompt in prompts:
        padding, real = [0] * (width - len(prompt)), [1] * len(prompt)
        rows.append([*padding, *prompt] if left else [*prompt, *padding])
        masks.append([*padding, *real] if left else [*real, *padding])
    return torch.tensor(rows), torch.tensor(masks)


def written(output: Tensor, eos_token_ids: Sequence[int]) -> int:
    """Tokens up to the end of each text (N, L), with the one that ends it: as our engine counts."""
    ends = torch.isin(output, torch.tensor(eos_token_ids)).long()
    return int((ends.cumsum(dim=1) - ends == 0).sum())


def loaded(config: ModelConfig) -> PreTrainedModel:
    """A model as `transformers` has it."""
    encodes = load_config(config).is_encoder_decoder
    auto = AutoModelForSeq2SeqLM if encodes else AutoModelForCausalLM
    return auto.from_pretrained(config.path, dtype=torch.float32).eval()
