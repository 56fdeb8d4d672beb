"""What pydantic finds wrong, as one sentence with field, value and remedy."""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from pipeline.config.errors import JobError

Checked = TypeVar("Checked", bound=BaseModel)


def checked(model: type[Checked], tree: dict[str, Any], source: str) -> Checked:
    """A tree as what it is to be. Raises `JobError`, which begins with the source."""
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        raise JobError(f"{source}: {_sentence(model, tree, error.errors())}") from error


def _sentence(model: type[BaseModel], tree: Any, errors: Sequence[ErrorDetails]) -> str:
    """The most telling of the errors: a key that is not known, else the first, at its deepest."""
    places = [(tuple(_field(tree, error)), error) for error in errors]
    unknown = [found for found in places if found[1]["type"] == "extra_forbidden"]
    first = (unknown or places)[0][0]
    branches = [found for found in places if found[0][: len(first)] == first]
    deepest = max(len(place) for place, _ in branches)
    place, error = next(found for found in branches if len(found[0]) == deepest)
    field = ".".join(printable(part) for part in place)
    if error["type"] == "extra_forbidden":
        return _unknown_key(model, error, field)
    if error["type"] == "missing":
        return f"{field} is missing"
    if error["type"] == "value_error":
        return f"{field or 'job'}: {error['ctx']['error']}"
    here = [other for at, other in branches if at == place]
    of_right_type = [
        other for other in here if not other["type"].endswith(("_type", "literal_error"))
    ]
    wanted = dict.fromkeys(_wanted(model, other) for other in of_right_type or here)
    return f"{field or 'job'} is {reprlib.repr(error['input'])}, but must {' or '.join(wanted)}"


def _field(tree: Any, error: ErrorDetails) -> Iterator[int | str]:
    """Where in the tree an error is: its location without the names that Pydantic gives to types."""
    for part in error["loc"]:
        known = (
            tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
        )
        if part in known:
            tree = tree[part]
        elif error["type"] != "missing" or part != error["loc"][-1]:
            continue
        yield part


def printable(part: int | str) -> str:
    """A key as it can stand in a line."""
    text = str(part)
    return text if text and text.isprintable() else ascii(text)


def _wanted(model: type[BaseModel], error: ErrorDetails) -> str:
    """What a value must be, as it goes on behind "must"."""
    if error["type"] == "model_type":
        return f"be a mapping of {', '.join(_keys_at(model, error['loc']))}"
    message = re.sub(r"^(Input|String|Value|List|Dictionary) should ", "", error["msg"])
    message = re.sub(r" after validation, not \d+$", "", message)
    message = message.replace("valid dictionary", "mapping").replace("valid list", "list")
    return message[0].lower() + message[1:]


def _unknown_key(model: type[BaseModel], error: ErrorDetails, field: str) -> str:
    known = _keys_at(model, error["loc"][:-1])
    near = difflib.get_close_matches(str(error["loc"][-1]), known, n=1, cutoff=0.5)
    remedy = f"did you mean '{near[0]}'?" if near else f"known keys: {', '.join(known)}"
    return f"{field} is not a key; {remedy}"


def _keys_at(model: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    for part in location:
        if isinstance(part, str) and part in model.model_fields:
            model = _nested_model(model.model_fields[part].annotation) or model
    return list(model.model_fields)


def _nested_model(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = (_nested_model(inner) for inner in get_args(annotation))
    return next((model for model in found if model is not None), None)
