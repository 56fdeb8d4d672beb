"""Rows to examples: templates, special tokens, and rows that are bad."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from pipeline.config import DatasetConfig, JobError
from pipeline.data.prompts import PromptReader, parse_template, shortened
from pipeline.records import SKIPPED

WORDS = ["<unk>", "<s>", "</s>", "user:", "assistant:", "hello", "world", "{", "}"]
BOS, EOS = 1, 2
CHAT = "{{ bos_token }} {% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}assistant:"


def tokenizer(single: str, chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """A tokenizer of whole words; `single` says which special tokens it adds, as `<s> $A`."""
    core = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    core.pre_tokenizer = WhitespaceSplit()
    specials = [("<s>", BOS), ("</s>", EOS)]
    core.post_processor = TemplateProcessing(single=single, special_tokens=specials)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    fast.chat_template = chat_template
    return fast


LLAMA, T5 = "<s> $A", "$A </s>"


def reader(
    dataset: dict[str, Any], single: str = LLAMA, chat: str | None = None, **options: Any
) -> PromptReader:
    config = DatasetConfig(path="json", **dataset)
    return PromptReader(config, tokenizer(single, chat), **options)


def test_a_template_renders_columns_and_doubled_braces() -> None:
    template = parse_template("dataset.prompt", "{{ {a} }} {b}{a}")
    assert template.render({"a": "x", "b": 3}) == "{ x } 3x"
    assert template.columns == ("a", "b")


@pytest.mark.parametrize("text", ["{a.b}", "{a[0]}", "{}", "{a!r}", "{a:>10}", "{a", "a}"])
def test_only_plain_column_names_are_allowed_in_braces(text: str) -> None:
    with pytest.raises(JobError, match=r"dataset\.prompt"):
        parse_template("dataset.prompt", text)


def test_a_template_does_not_reach_into_the_value_it_renders() -> None:
    assert parse_template("dataset.prompt", "{a}").render({"a": "{b} {{"}) == "{b} {{"


def test_the_tokenizer_adds_its_one_bos() -> None:
    example = reader({"prompt": "{t}"}).read("0", {"t": "hello world"})
    assert example.prompt_ids == (BOS, 5, 6)


def test_a_bos_written_in_the_prompt_is_not_doubled() -> None:
    example = reader({"prompt": "<s> {t}"}).read("0", {"t": "hello"})
    assert example.prompt_ids == (BOS, 5)


@pytest.mark.parametrize("single", [LLAMA, "<s> $A </s>", "$A"])
def test_a_chat_template_writes_all_special_tokens_itself(single: str) -> None:
    messages = [{"role": "user", "content": "{t}"}]
    example = reader({"messages": messages}, single, CHAT).read("0", {"t": "hello"})
    assert example.prompt_ids == (BOS, 3, 5, 4)
    assert example.prompt is not None
    assert example.prompt.endswith("assistant:")


def test_encoding_the_chat_text_with_special_tokens_would_double_the_bos() -> None:
    """The planted fault: what the reader must not do."""
    text = reader({"messages": [{"role": "user", "content": "hello"}]}, chat=CHAT).read("0", {})
    assert tokenizer(LLAMA).encode(text.prompt, add_special_tokens=True)[:2] == [BOS, BOS]


@pytest.mark.parametrize("text", ["hello", "hello </s>"])
def test_t5_keeps_exactly_one_eos(text: str) -> None:
    assert reader({"prompt": "{t}"}, T5).read("0", {"t": text}).prompt_ids == (5, EOS)


def test_messages_need_a_chat_template_and_their_two_keys() -> None:
    with pytest.raises(JobError, match="no chat template"):
        reader({"messages": [{"role": "user", "content": "{t}"}]})
    with pytest.raises(JobError, match=r"dataset\.messages\.0 has the keys"):
        reader({"messages": [{"role": "user", "text": "x"}]}, chat=CHAT).read("0", {})


BAD_ROWS = {
    "missing_field": {"de": "x"},
    "null_field": {"en": None, "de": "x"},
    "wrong_type": {"en": ["hello"], "de": "x"},
    "empty_prompt": {"en": " \t\n", "de": "x"},
    "bad_unicode": {"en": "hello \ud800", "de": "x"},
    "missing_reference": {"en": "hello", "de": None},
    "prompt_too_long": {"en": "hello " * 9, "de": "x"},
}


@pytest.mark.parametrize("code", BAD_ROWS)
def test_a_bad_row_is_an_example_with_its_error(code: str) -> None:
    read = reader(
        {"prompt": "{en}", "references": "de"}, needs_references=True, max_prompt_tokens=8
    )
    example = read.read("7", BAD_ROWS[code])
    assert example.error is not None
    assert (example.example_id, example.error.code, example.prompt_ids) == ("7", code, ())
    assert (example.prompt is not None) == (code in {"missing_reference", "prompt_too_long"})
    f"{example}".encode()


def test_bad_references_are_errors_too() -> None:
    read = reader({"prompt": "{en}", "references": "de"})
    codes = [
        error.code if error else None
        for value in ("a\udfff", {"a": 1}, ["a", None], [], None, 5)
        for error in [read.read("0", {"en": "hello", "de": value}).error]
    ]
    assert codes == ["bad_unicode", "wrong_type", "wrong_type", None, None, None]


def test_references_are_one_text_or_several() -> None:
    read = reader({"prompt": "{en}", "references": "de"})
    assert read.read("0", {"en": "hello", "de": "a"}).references == ("a",)
    assert read.read("0", {"en": "hello", "de": ["a", "b"]}).references == ("a", "b")
    assert reader({"prompt": "{en}"}).read("0", {"en": "hello", "de": "a"}).references == ()


@pytest.mark.parametrize("value", [float("nan"), True, {"a": "b"}, b"bytes"])
def test_a_value_that_is_no_text_is_an_error_and_no_prompt(value: Any) -> None:
    error = reader({"prompt": "{en}"}).read("0", {"en": value}).error
    assert error is not None
    assert error.code == ("null_field" if isinstance(value, float) else "wrong_type")


def test_a_prompt_without_tokens_is_empty() -> None:
    read = reader({"prompt": "{en}"}, "$A")
    read.tokenizer.encode = (
        lambda text, add_special_tokens: []
    )  # as one that drops what it does not know
    error = read.read("0", {"en": "\u200b"}).error
    assert error is not None
    assert error.code == "empty_prompt"


def test_a_chat_that_the_template_refuses_is_a_mistake_of_the_job() -> None:
    strict = "{% if messages[0].role != 'user' %}{{ raise_exception('user\\nfirst') }}{% endif %}"
    with pytest.raises(
        JobError, match=r"dataset\.messages: .*user first; change the messages' roles"
    ):
        reader({"messages": [{"role": "assistant", "content": "{t}"}]}, chat=strict)


def test_a_chat_that_the_template_refuses_for_its_text_is_a_bad_row() -> None:
    strict = "{% if 'bad' in messages[0].content %}{{ raise_exception('no') }}{% endif %}hello"
    read = reader({"messages": [{"role": "user", "content": "{t}"}]}, chat=strict)
    assert read.read("0", {"t": "good"}).error is None
    error = read.read("1", {"t": "bad"}).error
    assert error is not None
    assert error.code == "chat_template"


# --- long prompts -----------------------------------------------------------------------------------

FIVE = {"en": "hello world hello user: world"}
IDS = (5, 6, 5, 3, 6)


@pytest.mark.parametrize(
    ("kept", "single", "expected"),
    [
        ("last", LLAMA, (BOS, 5, 3, 6)),
        ("last", "$A", (6, 5, 3, 6)),
        ("first", T5, (5, 6, 5, EOS)),
        ("first", "<s> $A </s>", (BOS, 5, 6, EOS)),
        ("last", "<s> $A </s>", (BOS, 3, 6, EOS)),
    ],
)
def test_truncation_keeps_one_end_and_the_special_tokens(
    kept: Any, single: str, expected: tuple[int, ...]
) -> None:
    given = {"prompt": "{en}", "long_prompts": "truncate"}
    example = reader(given, single, max_prompt_tokens=4, kept_end=kept).read("0", FIVE)
    assert example.error is None
    assert example.prompt_ids == expected
    assert example.prompt == FIVE["en"]


def test_no_room_for_more_than_the_special_tokens() -> None:
    assert shortened((BOS, *IDS, EOS), 1, "last", (BOS, EOS)) == (EOS,)
    assert shortened((BOS, *IDS, EOS), 2, "first", (BOS, EOS)) == (BOS, 5)
    assert shortened(IDS, 2, "last", (None, None)) == (3, 6)


@pytest.mark.parametrize("policy", ["error", "truncate", "skip"])
def test_a_prompt_that_just_fits_is_left_alone(policy: str) -> None:
    given = {"prompt": "{en}", "long_prompts": policy}
    example = reader(given, "$A", max_prompt_tokens=5).read("0", FIVE)
    assert (example.error, example.prompt_ids) == (None, IDS)


@pytest.mark.parametrize(
    ("policy", "code"), [("error", "prompt_too_long"), ("skip", SKIPPED), ("truncate", None)]
)
@pytest.mark.parametrize(("asked", "held"), [(4, None), (None, 4), (4, 9), (9, 4)])
def test_the_shorter_of_both_limits_holds(
    policy: str, code: str | None, asked: int | None, held: int | None
) -> None:
    given = {"prompt": "{en}", "long_prompts": policy, "max_prompt_tokens": asked}
    example = reader(given, "$A", max_prompt_tokens=held).read("0", FIVE)
    assert (example.error.code if example.error else None) == code
    assert len(example.prompt_ids) == (0 if code else 4)
