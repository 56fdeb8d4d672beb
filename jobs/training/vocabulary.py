"""Builds the tokenizers; both models of a pair share one.

Invariant: pad is 0, end of sequence 1, unknown 2, and a prompt gets exactly one end token.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from unicodedata import normalize

from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, WordLevel
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

PAD, END, UNKNOWN = "<pad>", "</s>", "<unk>"
SPECIAL = [PAD, END, UNKNOWN]


def finished(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """Wraps a tokenizer for `transformers`, with an end token after every text."""
    tokenizer.post_processor = TemplateProcessing(
        single=f"$A {END}", pair=f"$A $B {END}", special_tokens=[(END, SPECIAL.index(END))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


def commonest_letters(texts: Iterable[str], most: int) -> list[str]:
    """The most frequent characters, ties in code order; the trainer's own choice is random."""
    counts = Counter(letter for text in texts for letter in text.replace(" ", "▁"))
    ranked = sorted(counts, key=lambda letter: (-counts[letter], letter))
    return sorted(ranked[:most])


def subword_tokenizer(texts: Sequence[str], size: int) -> PreTrainedTokenizerFast:
    """Trains byte-pair encoding: single digits, punctuation apart, spaces kept."""
    tokenizer = Tokenizer(BPE(unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Metaspace(prepend_scheme="always"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.Punctuation(),
        ]
    )
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    alphabet = commonest_letters(map(partial(normalize, "NFC"), texts), most=160)
    trainer = BpeTrainer(
        vocab_size=size,
        special_tokens=SPECIAL,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return finished(tokenizer)


def symbol_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """One token for each distinct symbol of texts that are written with spaces between."""
    symbols = sorted({symbol for text in texts for symbol in text.split()})
    vocabulary = {symbol: index for index, symbol in enumerate([*SPECIAL, *symbols])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return finished(tokenizer)
