"""From a dataset row to an `Example`: the prompt, its references and its token ids.

A mistake in the job is a `JobError` here; a mistake in a row becomes an example that carries its
error and no token ids, and never an exception: the other rows go on.
"""

from __future__ import annotations

import math
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol

from pipeline.config import DatasetConfig, JobError, one_line
from pipeline.records import SKIPPED, Example, RowError

Row = Mapping[str, Any]
KeptEnd = Literal["first", "last"]


class Tokenizer(Protocol):
    """What is asked of a `transformers` tokenizer."""

    bos_token_id: int | None
    eos_token_id: int | None
    chat_template: Any

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The token ids of a text."""

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        """A conversation as the text that the model was trained on."""


@dataclass(frozen=True)
class Template:
    """A format string over columns: `{name}` is a column, doubled braces are braces."""

    field: str
    text: str
    pieces: tuple[tuple[str, str | None], ...]
    """Literal text, and the column that follows it (None at the end)."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that it reads, in order of first use."""
        return tuple(dict.fromkeys(name for _, name in self.pieces if name is not None))

    def render(self, row: Row) -> str:
        """The text for one row. Raises `_BadRow` for a column that is missing, null or no text."""
        return "".join(
            literal + ("" if name is None else _text(row, name)) for literal, name in self.pieces
        )


@dataclass(frozen=True)
class PromptReader:
    """Turns rows into examples with one tokenizer.

    Args:
        needs_references: whether a row without a reference is an error.
        max_prompt_tokens: the longest prompt that the models hold; None if they hold any. The job
            may allow less. What becomes of a longer one is `dataset.long_prompts`.
        kept_end: the end of a long prompt that `truncate` keeps; see `shortened`.
    """

    config: DatasetConfig
    tokenizer: Tokenizer
    needs_references: bool = False
    max_prompt_tokens: int | None = None
    kept_end: KeptEnd = "last"

    def __post_init__(self) -> None:
        if self.config.messages is None:
            return
        if not self.tokenizer.chat_template:
            raise JobError(
                "dataset.messages: the tokenizer has no chat template; write dataset.prompt instead"
            )
        turns = [{"role": role, "content": "text"} for role, _ in self._messages]
        try:
            self._chat(turns)
        except _BadRow as bad:
            raise JobError(f"dataset.messages: {bad}; change the messages' roles") from bad

    @cached_property
    def _messages(self) -> list[tuple[str, Template]]:
        return message_templates(self.config)

    def read(self, example_id: str, row: Row) -> Example:
        """The example of a row; `error` is set, and the prompt ids are empty, if it is a bad one."""
        prompt: str | None = None
        references: tuple[str, ...] = ()
        try:
            references = self._references(row)
            prompt = self._prompt(row)
            if self.needs_references and not references:
                raise _BadRow("missing_reference", f"column '{self.config.references}' holds none")
            ids = self._fitted(self._encode(prompt))
        except _BadRow as bad:
            return Example(example_id, prompt, references, (), bad.error)
        return Example(example_id, prompt, references, ids)

    def _prompt(self, row: Row) -> str:
        parts = [template.render(row) for _, template in self._messages]
        if not any(part.strip() for part in parts):
            raise _BadRow("empty_prompt", "the prompt is empty or white space only")
        for part in parts:
            _check_unicode(part, "the prompt")
        if self.config.messages is None:
            return parts[0]
        turns = [
            {"role": role, "content": part}
            for (role, _), part in zip(self._messages, parts, strict=True)
        ]
        return self._chat(turns)

    def _chat(self, turns: list[dict[str, str]]) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=True
            )
        except (
            Exception
        ) as error:  # a template is a program, and says so when it takes no such chat
            raise _BadRow(
                "chat_template", f"the chat template takes no such chat: {one_line(error)}"
            ) from error

    def _references(self, row: Row) -> tuple[str, ...]:
        column = self.config.references
        value = None if column is None else row.get(column)
        if value is None:
            return ()
        items = value if isinstance(value, list | tuple) else [value]
        texts = tuple(_as_text(item, str(column)) for item in items)
        for text in texts:
            _check_unicode(text, f"column '{column}'")
        return texts

    def _encode(self, prompt: str) -> tuple[int, ...]:
        """Token ids with one BOS at most: a chat template writes its own special tokens."""
        is_chat = self.config.messages is not None
        ids = self.tokenizer.encode(prompt, add_special_tokens=not is_chat)
        return _without_doubles(ids, self.tokenizer.bos_token_id, self.tokenizer.eos_token_id)

    def _fitted(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        """The ids of a prompt that may be too long, as the job wants it."""
        if not ids:
            raise _BadRow("empty_prompt", "the prompt has no tokens")
        limits = (self.config.max_prompt_tokens, self.max_prompt_tokens)
        room = min(limit for limit in (*limits, len(ids)) if limit is not None)
        if len(ids) <= room:
            return ids
        if self.config.long_prompts == "truncate":
            special = (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id)
            return shortened(ids, room, self.kept_end, special)
        code = SKIPPED if self.config.long_prompts == "skip" else "prompt_too_long"
        raise _BadRow(code, f"the prompt has {len(ids)} tokens, more than {room}")


def shortened(
    ids: tuple[int, ...], room: int, kept: KeptEnd, special: tuple[int | None, int | None]
) -> tuple[int, ...]:
    """`room` ids of a longer prompt: one end of it, between the BOS and EOS that it had.

    A decoder-only model goes on from the end of its prompt, where few-shot prompts and chats have
    their question, so the beginning is dropped, as lm-evaluation-harness does; but the BOS stays,
    without which many models are lost. An encoder reads a text from its beginning, so of that the end
    is dropped, as the tokenizers of T5 do; the EOS, which it was trained to find there, stays.

    Args:
        special: the BOS and the EOS of the tokenizer.
    """
    bos, eos = special
    first = ids[:1] if ids[0] == bos else ()
    last = ids[-1:] if ids[-1] == eos else ()
    inner, left = ids[len(first) : len(ids) - len(last)], room - len(first) - len(last)
    if left < 1:  # no room for more than the ends themselves
        return ids[:room] if kept == "first" else ids[-room:]
    return (*first, *(inner[:left] if kept == "first" else inner[-left:]), *last)


class _BadRow(Exception):  # noqa: N818 - it never leaves this module
    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.error = RowError(code, message)


def message_templates(config: DatasetConfig) -> list[tuple[str, Template]]:
    """The role and template of each message; a plain prompt is one message without a role.

    Raises:
        JobError: a template is malformed, or a message lacks `role` or `content`.
    """
    if config.messages is None:
        return [("", parse_template("dataset.prompt", config.prompt or ""))]
    if not config.messages:
        raise JobError("dataset.messages is empty; give at least one message")
    return [_message(index, message) for index, message in enumerate(config.messages)]


def _message(index: int, message: Mapping[str, str]) -> tuple[str, Template]:
    field = f"dataset.messages.{index}"
    if set(message) != {"role", "content"}:
        raise JobError(f"{field} has the keys {sorted(message)}; it takes role and content")
    return message["role"], parse_template(f"{field}.content", message["content"])


def parse_template(field: str, text: str) -> Template:
    """Read a template once. Raises `JobError`: unbalanced braces, or more than a column name in them."""
    try:
        parsed = list(string.Formatter().parse(text))
    except ValueError as error:
        raise JobError(
            f"{field}: {text!r}: {error}; double a brace that is meant as text"
        ) from error
    pieces = []
    for literal, name, spec, conversion in parsed:
        if name is not None and (spec or conversion or not name or set(name) & set(".[]")):
            raise JobError(
                f"{field}: {text!r} may hold plain column names in braces only, as in '{{text}}'"
            )
        pieces.append((literal, name))
    return Template(field, text, tuple(pieces))


def _text(row: Row, column: str) -> str:
    if column not in row:
        raise _BadRow("missing_field", f"the row has no column '{column}'")
    if row[column] is None:
        raise _BadRow("null_field", f"column '{column}' is null")
    return _as_text(row[column], column)


def _as_text(value: Any, column: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, float) and math.isnan(value):  # how tables write that there is nothing
        raise _BadRow("null_field", f"column '{column}' is NaN")
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise _BadRow("wrong_type", f"column '{column}' holds a {type(value).__name__}, not text")


def _check_unicode(text: str, where: str) -> None:
    """A lone surrogate has no UTF-8, so it could be neither tokenized nor written."""
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise _BadRow("bad_unicode", f"{where} holds a lone surrogate, which is no valid text")


def _without_doubles(ids: Sequence[int], bos: int | None, eos: int | None) -> tuple[int, ...]:
    """The ids with one BOS and one EOS where the text spelled out what the tokenizer also adds."""
    first = 1 if len(ids) > 1 and ids[0] == ids[1] == bos else 0
    last = len(ids) - 1 if len(ids) - first > 1 and ids[-1] == ids[-2] == eos else len(ids)
    return tuple(ids[first:last])
