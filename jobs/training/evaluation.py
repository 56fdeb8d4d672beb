"""Measures a saved pair on held-out text: likelihood, agreement and greedy quality."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from sacrebleu.metrics import BLEU, CHRF
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    T5ForConditionalGeneration,
)

from jobs.training.batches import TokenPair, make_batch, padded, token_pairs
from jobs.training.corpora import Example
from jobs.training.models import target_logits, target_tokens
from jobs.training.trainer import agreement

ROWS = 64
Scorer = Callable[[list[str], Sequence[Example]], dict[str, float]]


@dataclass(frozen=True)
class Agreement:
    """Per target token: both likelihoods and the share of drafts the verifier would keep."""

    verifier_nll: float
    drafter_nll: float
    acceptance: float


def load(folder: Path) -> tuple[T5ForConditionalGeneration, PreTrainedTokenizerFast]:
    """A saved model in float32 with its tokenizer."""
    model = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(folder)


@torch.inference_mode()
def forced(
    verifier: T5ForConditionalGeneration,
    drafter: T5ForConditionalGeneration,
    pairs: Sequence[TokenPair],
) -> Agreement:
    """Scores the reference targets with both models."""
    ordered = sorted(pairs, key=lambda pair: len(pair[1]))
    total = torch.zeros(4)
    for start in range(0, len(ordered), ROWS):
        batch = make_batch(ordered[start : start + ROWS])
        logits = [target_logits(model, batch) for model in (verifier, drafter)]
        total += agreement(logits[0], logits[1], target_tokens(batch))
    return Agreement(*(total[:3] / total[3]).tolist())


@torch.inference_mode()
def greedy(
    model: T5ForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, sources: Sequence[str]
) -> list[str]:
    """The most likely continuation, token by token, of each source."""
    ids = tokenizer(list(sources)).input_ids
    order = sorted(range(len(ids)), key=lambda index: len(ids[index]))
    texts = [""] * len(ids)
    for start in range(0, len(order), ROWS):
        rows = order[start : start + ROWS]
        source = padded([ids[row] for row in rows])
        made = model.generate(
            input_ids=source,
            attention_mask=(source != 0).long(),
            do_sample=False,
            num_beams=1,
            max_new_tokens=64,
        )
        found = tokenizer.batch_decode(made, skip_special_tokens=True)
        for row, text in zip(rows, found, strict=True):
            texts[row] = text
    return texts


def translation_scores(texts: list[str], examples: Sequence[Example]) -> dict[str, float]:
    """Corpus BLEU and chrF."""
    references = [[example.targets[0] for example in examples]]
    return {
        "bleu": BLEU().corpus_score(texts, references).score,
        "chrf": CHRF().corpus_score(texts, references).score,
    }


def distance(left: Sequence[str], right: Sequence[str]) -> int:
    """Edit distance between two sequences."""
    row = list(range(len(right) + 1))
    for i, a in enumerate(left, start=1):
        above, row[0] = row[0], i
        for j, b in enumerate(right, start=1):
            above, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, above + (a != b))
    return row[-1]


def pronunciation_scores(texts: list[str], examples: Sequence[Example]) -> dict[str, float]:
    """Word accuracy and phoneme error rate, against the nearest of the references."""
    right = errors = length = 0
    for text, example in zip(texts, examples, strict=True):
        gaps = [(distance(text.split(), t.split()), len(t.split())) for t in example.targets]
        nearest = min(gaps)
        right += nearest[0] == 0
        errors, length = errors + nearest[0], length + nearest[1]
    return {"word_accuracy": 100 * right / len(texts), "phoneme_error_rate": 100 * errors / length}


def read_translations(path: Path) -> list[Example]:
    """The examples of a translation file."""
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [Example(row["id"], row["en"], (row["de"],)) for row in rows]


def read_pronunciations(path: Path) -> list[Example]:
    """The examples of a pronunciation file."""
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [Example(row["id"], row["word"], tuple(row["phonemes"])) for row in rows]


def measure(folder: Path, examples: Sequence[Example], scorer: Scorer) -> dict[str, float]:
    """Everything about a saved pair on held-out examples."""
    verifier, tokenizer = load(folder / "verifier")
    drafter, _ = load(folder / "drafter")
    pairs = token_pairs(examples, tokenizer, longest=64)
    found: dict[str, float] = asdict(forced(verifier, drafter, pairs))
    for role, model in (("verifier", verifier), ("drafter", drafter)):
        texts = greedy(model, tokenizer, [e.source for e in examples])
        found |= {f"{role}_{name}": value for name, value in scorer(texts, examples).items()}
    return found
