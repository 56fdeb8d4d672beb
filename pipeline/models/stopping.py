"""Stop strings: texts that end an output, however they fall into tokens."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase


class StopStrings:
    """Says whether output ids hold a stop string.

    Only the last tokens are looked at: a text is asked about at every token, and each token adds at
    least a quarter of a character (one byte of four).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._window = 4 * max(len(text) for text in stop) + 16

    def __call__(self, output_ids: Sequence[int]) -> bool:
        """Whether the text of the ids holds a stop string near its end."""
        text = self._tokenizer.decode(list(output_ids[-self._window :]), skip_special_tokens=True)
        return any(stop in text for stop in self._stop)


def text_before(text: str, stop: Sequence[str]) -> str:
    """The text up to its first stop string."""
    return text[: min((at for s in stop if (at := text.find(s)) >= 0), default=len(text))]
