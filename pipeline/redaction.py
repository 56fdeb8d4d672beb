"""Secrets are taken out of whatever is written or said: one place for all of it.

Credentials are meant to stand in the environment only. Where one reaches a text all the same, in a URL
that a job names or in what a library says about it, three asterisks stand for it.
"""

from __future__ import annotations

import logging
import os
import re
from typing import Any

HIDDEN = "***"
_USER = re.compile(r"(:/+)[^/@\s'\"]+@")  # one slash where a library took a URL for a path
_QUERY = re.compile(
    r"([?&;][^=&;\s'\"]*"
    r"(?:token|key|secret|sig|signature|credential|password|passwd|auth|session)[^=&;\s'\"]*=)"
    r"[^&;\s'\"]+",
    re.IGNORECASE,
)
_TOKEN = re.compile(r"\b(?:hf_[A-Za-z0-9]{16,}|AKIA[A-Z0-9]{16}|gh[pousr]_[A-Za-z0-9]{20,})\b")
_SECRET_VARIABLE = re.compile(
    r"(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|(^|_)KEY|KEY_ID)$", re.IGNORECASE
)
_SHORTEST = 8
"""A shorter value of a variable is no secret, and would be found in ordinary words."""


def redact(text: str) -> str:
    """A text without credentials: of URLs, of known forms, and all that the environment holds."""
    for name, value in os.environ.items():
        if len(value) >= _SHORTEST and value in text and _SECRET_VARIABLE.search(name):
            text = text.replace(value, HIDDEN)
    text = _USER.sub(rf"\1{HIDDEN}@", text)
    return _TOKEN.sub(HIDDEN, _QUERY.sub(rf"\1{HIDDEN}", text))


def redacted(tree: Any) -> Any:
    """The same for all texts in a tree of mappings and lists."""
    if isinstance(tree, dict):
        return {redacted(key): redacted(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [redacted(value) for value in tree]
    return redact(tree) if isinstance(tree, str) else tree


def redact_logs() -> None:
    """Do it to all that this process logs from now on, also through the loggers of libraries."""
    make = logging.getLogRecordFactory()

    def make_redacted(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        record.msg, record.args = redact(record.getMessage()), None
        return record

    logging.setLogRecordFactory(make_redacted)
