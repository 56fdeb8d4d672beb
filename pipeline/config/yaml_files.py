"""YAML files and overrides: a tree of mappings and lists, not yet checked."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any

import yaml

from pipeline.config.errors import JobError, one_line
from pipeline.config.sentences import printable


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping that a file holds. Raises `JobError`."""
    if path.is_dir():
        raise JobError(f"{path} is a folder; name a YAML file")
    if not path.is_file():
        near = near_path(path)
        raise JobError(f"{path}: there is no such file{near}; paths are relative to {Path.cwd()}")
    try:
        tree = _parse_yaml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise JobError(f"{path} is not YAML: {one_line(error)}") from error
    if not isinstance(tree, dict):
        raise JobError(f"{path} must hold a mapping of keys to values")
    return tree


def near_path(path: str | Path) -> str:
    """A hint at the file or folder that was perhaps meant; empty if none is called alike."""
    folder, name = Path(path).parent, Path(path).name
    names = [other.name for other in folder.iterdir()] if folder.is_dir() else []
    near = difflib.get_close_matches(name, [other for other in names if other != name], n=1)
    return f" (did you mean '{folder / near[0]}'?)" if near else ""


class _Loader(yaml.SafeLoader):
    """YAML in which no key stands twice, a date is text, and `1e-3` is a number."""

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        value = super().construct_scalar(node)
        value.encode()  # raises what is a `ValueError` for a lone surrogate
        return value

    def construct_document(self, node: yaml.Node) -> Any:
        if _spelled_out(node, {}) > _MOST_NODES:
            raise ValueError("it is too large once its aliases are spelled out")
        return super().construct_document(node)

    def compose_mapping_node(self, anchor: dict[Any, yaml.Node]) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        names = [key.value for key in keys]
        for number, key in enumerate(keys):
            if key.value in names[:number]:
                line = key.start_mark.line + 1
                raise ValueError(f"the key {key.value!r} stands twice (line {line}); remove one")
        return node


_MOST_NODES = 1_000_000
"""Aliases of aliases, and merges of them, make a few lines of YAML fill any memory."""


def _spelled_out(node: Any, sizes: dict[int, int]) -> int:
    """How many nodes there are if each alias is what it stands for; `sizes` has those known."""
    if isinstance(node, tuple):
        return sum(_spelled_out(part, sizes) for part in node)
    if id(node) not in sizes:
        sizes[id(node)] = 1  # for an alias of what is around it
        parts = node.value if isinstance(node, yaml.CollectionNode) else ()
        sizes[id(node)] = 1 + sum(_spelled_out(part, sizes) for part in parts)
    return sizes[id(node)]


_Loader.yaml_implicit_resolvers = {
    first: [pair for pair in pairs if pair[0] != "tag:yaml.org,2002:timestamp"]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def _parse_yaml(text: str) -> Any:
    """Raises `ValueError` for all that is not YAML."""
    try:
        return yaml.load(text, _Loader)
    except ValueError:
        raise
    except Exception as error:  # PyYAML lets pass whatever the value of a tag raises
        raise ValueError(str(error)) from error


def set_value(tree: dict[str, Any], override: str) -> None:
    """Set one `path.to.key=value` in the tree, the value read as YAML; list items go by number.

    Raises:
        JobError: it is not written so, or there is no such place.
    """
    path, separator, text = override.partition("=")
    override = printable(override)
    if not separator or not path:
        raise JobError(f"--set {override}: write it as path.to.key=value")
    *parents, last = path.split(".")
    node: Any = tree
    for part in parents:
        node = _child(node, part, override)
    try:
        value = _parse_yaml(text)
    except ValueError as error:
        raise JobError(f"--set {override}: the value is not YAML: {one_line(error)}") from error
    if isinstance(node, list):
        node[_index(node, last, override)] = value
    elif isinstance(node, dict):
        node[last] = value
    else:
        raise JobError(f"--set {override}: '{parents[-1]}' holds a single value, not keys")


def _child(node: Any, part: str, override: str) -> Any:
    if isinstance(node, list):
        return node[_index(node, part, override)]
    if isinstance(node, dict):
        return node.setdefault(part, {})
    raise JobError(f"--set {override}: nothing stands below '{part}'")


def _index(items: list[Any], part: str, override: str) -> int:
    if not part.isdecimal() or int(part) >= len(items):
        raise JobError(f"--set {override}: '{part}' must be a number from 0 to {len(items) - 1}")
    return int(part)
