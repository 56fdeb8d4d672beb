"""Functions of a user's own: imported only from the folder of a job that allows it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

_FOLDERS: set[Path] = set()
"""Where modules may lie. It belongs to the process, as `sys.path` does."""


class CustomCodeError(ValueError):
    """A function that is not there, or lies where nothing is imported from."""


def import_from(folder: str) -> None:
    """Let functions be imported from a folder: the working directory of a job that allows it.

    Until this is called they are imported from nowhere. An empty name is no folder.
    """
    if not folder:
        return
    if folder not in sys.path:
        # Behind all others, so that no file in it stands in for a module of Python or of a library.
        sys.path.append(folder)
    _FOLDERS.add(Path(folder).resolve())


def imported(name: str) -> Callable[..., Any]:
    """The function that `module:function` names. Raises `CustomCodeError`."""
    module, _, function = name.partition(":")
    try:
        _check_origin(module)
        found = vars(importlib.import_module(module))[function]
    except CustomCodeError:
        raise
    except Exception as error:  # the module is a user's and may raise anything
        raise CustomCodeError(
            f"there is no function {function} in a module {module} that can be imported from here: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not callable(found):
        raise CustomCodeError(f"{function} in {module} is no function")
    return found  # type: ignore[no-any-return]


def _check_origin(module: str) -> None:
    """Refuse a module, or a package around it, that lies elsewhere, before any of it is run."""
    parts = module.split(".")
    for length in range(1, len(parts) + 1):
        name = ".".join(parts[:length])
        spec = importlib.util.find_spec(name)  # imports the packages around it, checked before
        if spec is None:
            raise ModuleNotFoundError(f"No module named '{name}'")
        holds_no_code = spec.origin is None and spec.submodule_search_locations is not None
        if not holds_no_code and not _is_allowed(spec):
            raise CustomCodeError(
                f"the module {name} is not in the folder that the job is run in but is "
                f"{spec.origin}; targets are imported from that folder only"
            )


def _is_allowed(spec: ModuleSpec) -> bool:
    """Whether a module's file, behind all symbolic links, lies in an allowed folder."""
    if not spec.has_location or spec.origin is None:
        return False
    file = Path(spec.origin).resolve()
    return any(file.is_relative_to(folder) for folder in _FOLDERS)
