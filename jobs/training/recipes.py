"""The two shipped recipes: data, tokenizer, models and schedule of each pair."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from jobs.training.batches import token_pairs
from jobs.training.corpora import Corpus, Example, pronunciation_corpus, translation_corpora
from jobs.training.models import Architecture
from jobs.training.optimizers import Rates
from jobs.training.trainer import Plan, Task
from jobs.training.vocabulary import subword_tokenizer, symbol_tokenizer

TRANSLATION = Plan(
    drafter=Architecture(160, 5, 512, 1, 1),
    verifier=Architecture(256, 4, 1024, 3, 2),
    drafter_rates=Rates(adam=2e-3, muon=4e-3, decay=0.1),
    verifier_rates=Rates(adam=1e-3, muon=3e-3, decay=0.1),
    steps=1940,
    knots=((0, 0), (0.1, 1), (0.8, 1), (0.81, 0.15), (0.9, 0.15), (1, 0)),
    polish_steps=600,
    tokens_per_step=8000,
    teacher_mix=0.8,
    validate_every=200,
)
PRONUNCIATION = Plan(
    drafter=Architecture(64, 4, 128, 1, 1),
    verifier=Architecture(192, 4, 512, 3, 2),
    drafter_rates=Rates(adam=2e-3, muon=4e-3),
    verifier_rates=Rates(adam=1e-3, muon=2e-3),
    steps=1800,
    knots=((0, 0), (1 / 12, 1), (1, 0)),
    tokens_per_step=3000,
    teacher_mix=0.5,
    validate_every=300,
)
LONGEST = {"translation": 56, "pronunciation": 24}
VOCABULARY = 4096


@dataclass(frozen=True)
class Data:
    """The corpora of a pair, their tokenizer and the longest text kept, in tokens."""

    corpora: list[Corpus]
    tokenizer: PreTrainedTokenizerFast
    longest: int


def translation_data(cache: Path) -> Data:
    """Both translation corpora under one sub-word tokenizer built from their training texts."""
    corpora = translation_corpora(cache)
    texts = [text for c in corpora for e in c.train for text in (e.source, *e.targets)]
    return Data(corpora, subword_tokenizer(texts, VOCABULARY), LONGEST["translation"])


def pronunciation_data(cache: Path) -> Data:
    """CMUdict under one token for each letter and phoneme."""
    corpus = pronunciation_corpus(cache)
    texts = (text for e in corpus.train for text in (e.source, *e.targets))
    return Data([corpus], symbol_tokenizer(texts), LONGEST["pronunciation"])


def short_enough(examples: Sequence[Example], data: Data) -> list[Example]:
    """The examples whose source and targets all fit into the longest length."""
    texts = [[e.source, *e.targets] for e in examples]
    lengths = [max(map(len, data.tokenizer(group).input_ids)) for group in texts]
    return [e for e, length in zip(examples, lengths, strict=True) if length <= data.longest]


def task_for(data: Data, plan: Plan, folder: Path, log: Path, processes: int) -> Task:
    """Everything a training run needs."""
    train = [example for corpus in data.corpora for example in corpus.train]
    held_out = [example for corpus in data.corpora for example in corpus.validation]
    return Task(
        plan,
        token_pairs(train, data.tokenizer, data.longest),
        token_pairs(held_out, data.tokenizer, data.longest),
        data.tokenizer,
        folder,
        log,
        processes,
    )


def scaled(plan: Plan, steps: int | None) -> Plan:
    """The plan with another number of steps, validations kept in proportion."""
    if steps is None or steps == plan.steps:
        return plan
    every = max(1, plan.validate_every * steps // plan.steps)
    return replace(plan, steps=steps, validate_every=every)


def translation_row(example: Example) -> dict[str, object]:
    """One line of a translation file."""
    return {"id": example.id, "en": example.source, "de": example.targets[0]}


def pronunciation_row(example: Example) -> dict[str, object]:
    """One line of a pronunciation file."""
    return {"id": example.id, "word": example.source, "phonemes": list(example.targets)}


def write_rows(rows: Sequence[dict[str, object]], path: Path) -> None:
    """Writes JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_text(text, encoding="utf-8")


def write_translations(data: Data, folder: Path) -> None:
    """Writes the held-out pairs, one file for each corpus and split, since licences differ."""
    for corpus in data.corpora:
        mark = "" if corpus.name == "home-assistant" else f"-{corpus.name}"
        for split, examples in (("validation", corpus.validation), ("test", corpus.test)):
            rows = [translation_row(e) for e in short_enough(examples, data)]
            write_rows(rows, folder / f"{split}{mark}.jsonl")


def write_pronunciations(data: Data, folder: Path) -> None:
    """Writes the held-out words."""
    for split, examples in (
        ("validation", data.corpora[0].validation),
        ("test", data.corpora[0].test),
    ):
        rows = [pronunciation_row(e) for e in short_enough(examples, data)]
        write_rows(rows, folder / f"{split}.jsonl")
