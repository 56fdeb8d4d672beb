"""Groups tokenised pairs into padded batches of similar length.

Invariant: every process builds the same list of batches and takes its own rows of each.
"""

import random
from collections.abc import Iterator, Sequence

import torch
from transformers import PreTrainedTokenizerFast

from jobs.training.corpora import Example
from jobs.training.models import Batch

TokenPair = tuple[list[int], list[int]]


def token_pairs(
    examples: Sequence[Example], tokenizer: PreTrainedTokenizerFast, longest: int
) -> list[TokenPair]:
    """Token ids of every (source, target) with at most `longest` tokens on either side."""
    couples = [(e.source, target) for e in examples for target in e.targets]
    sources = tokenizer([source for source, _ in couples]).input_ids
    targets = tokenizer([target for _, target in couples]).input_ids
    pairs = zip(sources, targets, strict=True)
    return [pair for pair in pairs if max(map(len, pair)) <= longest]


def batch_rows(pairs: Sequence[TokenPair], order: Sequence[int], tokens: int) -> list[list[int]]:
    """Cuts an order, sorted by length, into rows whose padded size stays within `tokens`."""
    batches: list[list[int]] = []
    rows: list[int] = []
    source = target = 0
    for index in order:
        longer = max(source, len(pairs[index][0])), max(target, len(pairs[index][1]))
        if rows and (len(rows) + 1) * sum(longer) > tokens:
            batches.append(rows)
            rows, longer = [], (len(pairs[index][0]), len(pairs[index][1]))
        rows.append(index)
        source, target = longer
    return [*batches, rows] if rows else batches


def endless_batches(pairs: Sequence[TokenPair], tokens: int, seed: int) -> Iterator[list[int]]:
    """Yields row numbers of batches, epoch after epoch, lengths jittered and batches shuffled."""
    if not pairs:
        raise ValueError("no training pair is short enough")
    chance = random.Random(seed)
    while True:
        keys = [(len(t) + chance.random() * 2, len(s) + chance.random() * 2) for s, t in pairs]
        order = sorted(range(len(pairs)), key=lambda i: (round(keys[i][0]), keys[i][1]))
        batches = batch_rows(pairs, order, tokens)
        chance.shuffle(batches)
        yield from batches


def padded(rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """Right-pads token rows with zeros."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])


def make_batch(pairs: Sequence[TokenPair]) -> Batch:
    """Padded tensors of some pairs."""
    source = padded([source for source, _ in pairs])
    return Batch(source, (source != 0).long(), padded([target for _, target in pairs]))
