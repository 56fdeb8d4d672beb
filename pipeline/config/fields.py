"""The types of fields: what a value must be, and what is said where it is not."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

_PATH_BYTES, _PATH_PART_BYTES = 4095, 255
"""The longest path, and the longest name in one, that file systems take."""

_LABEL = r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
_LABEL_PREFIX = r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?"
"""Names and values of node labels, as Ray and Kubernetes spell them."""


def _one_line(text: str) -> str:
    if not text.strip() or not text.isprintable():
        raise ValueError(f"{reprlib.repr(text)} is not a name; give one line of text")
    return text


def _path(text: str) -> str:
    longest = 0 if "://" in text else max(len(part.encode()) for part in text.split("/"))
    if longest > _PATH_PART_BYTES or len(text.encode()) > _PATH_BYTES:
        raise ValueError(f"{reprlib.repr(text)} is too long for a path; shorten it")
    if text.startswith("~"):
        _expanded(text)
    return text


def _local(text: str) -> str:
    if "://" in text:
        raise ValueError(f"{text!r} is not on this machine; give a local path")
    return _expanded(text)


def _expanded(text: str) -> str:
    try:
        return str(Path(text).expanduser())
    except RuntimeError as error:
        raise ValueError(f"{text!r} names no home folder; write the path out") from error


def _matching(
    pattern: str, otherwise: str, shown: Callable[[str], str] = reprlib.repr
) -> AfterValidator:
    """Holds a text to a pattern; `otherwise` is what is said of another one, behind the text."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(f"{shown(text)} {otherwise}")
        return text

    return AfterValidator(check)


def _memory(value: Any) -> Any:
    """A text such as `16GiB` as bytes."""
    if not isinstance(value, str):
        return value
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?) ?([KMGT])(i?)B", value, re.ASCII)
    if found is None:
        raise ValueError(
            f"{reprlib.repr(value)} is no amount of memory; give bytes, or a text such as 16GiB"
        )
    amount, prefix, binary = found.groups()
    return round(float(amount) * (1024 if binary else 1000) ** ("KMGT".index(prefix) + 1))


def _temperature(value: float) -> float:
    if 0 < value < 1e-6:  # logits divided by less leave the range of float32
        raise ValueError(f"{value:g} is too close to 0; give 0, which is greedy, or 1e-6 and more")
    return value


Fraction = Annotated[float, Field(gt=0, le=1)]
Positive = Annotated[int, Field(ge=1, lt=2**31)]
OneLine = Annotated[str, AfterValidator(_one_line)]
PathText = Annotated[OneLine, AfterValidator(_path)]
"""A path, perhaps with `~`, or a hub name or URL in its place."""
LocalPath = Annotated[PathText, AfterValidator(_local)]
Device = Annotated[
    str,
    _matching(
        r"auto|cpu|cuda(:\d{1,3})?",
        "is not a device; give auto, cpu, cuda, or one GPU as cuda:0",
        repr,
    ),
]
Memory = Annotated[int, Field(ge=0, lt=2**63), BeforeValidator(_memory)]
"""Bytes, or a text such as `16GiB` or `500MB`."""
Label = Annotated[
    str,
    _matching(
        rf"({_LABEL_PREFIX}/)?{_LABEL}",
        "is no name of a label; give one as pool or example.com/pool",
    ),
]
LabelSelector = Annotated[
    str,
    _matching(
        rf"!?({_LABEL}|in\({_LABEL}(, ?{_LABEL})*\))",
        "selects no label; give a value, in(a, b), or either with ! for all others",
    ),
]
FunctionName = Annotated[
    str,
    _matching(
        r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*",
        "names no function; write it as module:function",
        repr,
    ),
]
Accelerator = Annotated[
    str,
    _matching(
        r"[A-Za-z0-9][A-Za-z0-9_.-]*",
        "is no type of accelerator; give Ray's name of one, as H100",
    ),
]
Temperature = Annotated[float, Field(ge=0), AfterValidator(_temperature)]


class Config(BaseModel):
    """What all parts have in common: they are frozen, and no key is unknown."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
