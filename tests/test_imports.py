"""The structure, held by the imports: one way down, and each heavy library behind one door."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

LAYERS = [
    {"jobs"},
    {"pipeline.planning"},
    {"pipeline.run"},
    {"pipeline.fleet"},
    {"pipeline.workers", "pipeline.report"},
    {"pipeline.protocol", "pipeline.models", "pipeline.results"},
    {"pipeline.data", "pipeline.quality"},
    {"pipeline.randomness", "pipeline.config"},
    {"pipeline.records", "pipeline.redaction"},
]
"""From the top down: a part imports from layers below it, never from its neighbours."""

HOMES = {
    "ray": {"pipeline.fleet", "jobs"},
    "transformers": {"pipeline.models", "jobs"},
    "pyarrow": {"pipeline.results", "pipeline.report", "pipeline.data"},
    "datasets": {"pipeline.data", "pipeline.quality"},
    "evaluate": {"pipeline.quality"},
    "sacrebleu": {"pipeline.quality", "jobs"},
    "rouge_score": {"pipeline.quality"},
    "matplotlib": {"pipeline.report"},
    "pydantic": {"pipeline.config"},
    "yaml": {"pipeline.config"},
    "typer": {"jobs"},
    "rich": {"jobs", "pipeline.report"},
    "torch": {
        "pipeline.protocol", "pipeline.models", "pipeline.workers", "pipeline.randomness", "jobs",
    },
}  # fmt: skip
"""The only parts that import a library; whoever wants more says so here."""


@dataclass(frozen=True)
class Import:
    """One import statement: the module that has it, what it imports, and where."""

    importer: str
    imported: str
    line: int
    nested: bool

    def __str__(self) -> str:
        return f"{self.importer} imports {self.imported} (line {self.line})"


def imports() -> Iterator[Import]:
    for folder in ("pipeline", "jobs"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            tree = ast.parse(path.read_text())
            top = set(tree.body)
            for node in ast.walk(tree):
                if isinstance(node, ast.Import | ast.ImportFrom):
                    for name in imported(node):
                        importer = module.removesuffix(".__init__")
                        yield Import(importer, name, node.lineno, node not in top)


def imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    """Full names; `from pipeline import run` counts as `pipeline.run`."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    assert node.level == 0, "imports are absolute"
    assert node.module is not None
    if node.module in ("pipeline", "jobs"):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return [node.module]


def part(module: str) -> str:
    """`jobs`, or the module or folder directly below `pipeline`."""
    return ".".join(module.split(".")[: 2 if module.startswith("pipeline.") else 1])


def layer(of: str) -> int:
    return next(index for index, parts in enumerate(LAYERS) if of in parts)


ALL = list(imports())
OURS = [i for i in ALL if i.imported.split(".")[0] in ("pipeline", "jobs")]


def test_every_part_has_a_layer() -> None:
    parts = {"jobs"}
    for path in (ROOT / "pipeline").iterdir():
        if path.suffix == ".py" or (path.is_dir() and (path / "__init__.py").exists()):
            parts.add(f"pipeline.{path.stem}")
    assert parts - {"pipeline.__init__"} == set().union(*LAYERS)


def test_imports_go_one_way() -> None:
    wrong = []
    for one in OURS:
        upper, lower = part(one.importer), part(one.imported)
        if upper != lower and layer(lower) <= layer(upper):
            wrong.append(str(one))
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("library", HOMES)
def test_a_library_stays_in_its_home(library: str) -> None:
    users = [one for one in ALL if one.imported.split(".")[0] == library]
    wrong = [str(one) for one in users if part(one.importer) not in HOMES[library]]
    assert not wrong, "\n".join(wrong)


def test_ray_is_the_fleets_and_the_submit_commands() -> None:
    modules = {one.importer for one in ALL if one.imported.split(".")[0] == "ray"}
    assert all(name.startswith("pipeline.fleet.") or "submit" in name for name in modules), modules
    assert "pipeline.fleet.local" not in modules


def test_the_nouns_import_nothing_but_the_language() -> None:
    known = {"__future__", "dataclasses", "typing", "collections.abc", "enum"}
    assert {one.imported for one in ALL if one.importer == "pipeline.records"} <= known


def test_the_protocol_knows_no_model_and_no_file() -> None:
    inside = [one for one in ALL if part(one.importer) == "pipeline.protocol"]
    parts = {part(one.imported) for one in inside if one.imported.startswith("pipeline.")}
    assert parts <= {"pipeline.protocol", "pipeline.randomness", "pipeline.records"}


def test_nothing_is_imported_inside_a_function() -> None:
    nested = [str(one) for one in ALL if one.nested and one.importer.startswith("pipeline")]
    assert not nested, "\n".join(nested)


def test_parts_do_not_import_each_other_in_circles() -> None:
    modules = {one.importer for one in OURS}
    below = {name: {one.imported for one in OURS if one.importer == name} for name in modules}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join([*path, name])
        if name not in done:
            for other in sorted(below.get(name, ())):
                visit(other, (*path, name))
            done.add(name)

    for name in sorted(modules):
        visit(name, ())
