"""The manifest of a run: what was asked for, with what, so that a folder holds one job only.

The fingerprint covers all that decides the determined columns, and nothing else: where the
workers run and where the rows go may change between a run and its resumption.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pipeline.config import DatasetConfig, Job, JobError
from pipeline.data.files import glob_files, is_file_format
from pipeline.redaction import redact, redacted
from pipeline.results.schema import SCHEMA_VERSION
from pipeline.results.writer import draft_path, finished_shards, publish

_PACKAGES = (
    "datasets",
    "evaluate",
    "numpy",
    "pyarrow",
    "ray",
    "rouge_score",
    "sacrebleu",
    "torch",
    "transformers",
)
_UNDECIDING = {"output", "fleet", "cluster", "step_seconds", "max_error_share", "allow_custom_code"}
_WHOLE_HASH_BYTES = 64 * 2**20
_SAMPLE_BYTES = 2**20


@dataclass(frozen=True)
class Manifest:
    """What `manifest.json` says. `facts` is what the fingerprint covers, one line a field."""

    job: Mapping[str, Any]
    facts: Mapping[str, Any]
    fingerprint: str
    schema_version: int = SCHEMA_VERSION
    started: str = ""
    python: str = ""
    packages: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)


def make_manifest(job: Job, extra: Mapping[str, Any] | None = None) -> Manifest:
    """The manifest of a job about to run; `extra` is kept beside it and decides nothing.

    Reads the local data and model files to hash them: all of a file up to 64 MiB, else its size
    and both ends.
    """
    facts = fingerprint_facts(job)
    return Manifest(
        job=redacted(job.model_dump(mode="json")),
        facts=facts,
        fingerprint=_sha256(json.dumps(facts, sort_keys=True).encode()),
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        python=platform.python_version(),
        packages={name: version(name) for name in _PACKAGES},
        extra=redacted(dict(extra or {})),
    )


def manifest_file(output: Path) -> Path:
    """Where a run's manifest is."""
    return output / "manifest.json"


def write_manifest(output: Path, manifest: Manifest) -> Path:
    """Write the manifest at once; it must be there before the first row. Returns its path."""
    path = manifest_file(output)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = draft_path(path)
    draft.write_text(json.dumps(asdict(manifest), indent=2, ensure_ascii=False) + "\n", "utf-8")
    publish(draft, path)
    return path


def read_manifest(output: Path) -> Manifest | None:
    """The manifest of a folder, or None if no run was begun in it. Raises `JobError` if unreadable."""
    path = manifest_file(output)
    if not path.is_file():
        return None
    try:
        return Manifest(**json.loads(path.read_text("utf-8")))
    except (ValueError, TypeError) as error:
        raise JobError(f"output: {path} is not a manifest of this version: {error}") from error


def check_same_run(output: Path, manifest: Manifest) -> None:
    """Refuse to put the rows of two different jobs into one folder.

    Raises:
        JobError: the folder belongs to another job; the message has a line for each difference.
    """
    found = read_manifest(output)
    if found is None:
        if finished_shards(output):
            raise JobError(f"output: {output} holds rows without a manifest; choose another folder")
        return
    if found.schema_version == manifest.schema_version and found.facts == manifest.facts:
        return
    before = {"schema_version": found.schema_version, **found.facts}
    after = {"schema_version": manifest.schema_version, **manifest.facts}
    lines = "\n".join(f"  {line}" for line in _differences(before, after))
    raise JobError(
        f"output: {output} holds a different run; choose another folder, or undo:\n{lines}"
    )


def fingerprint_facts(job: Job) -> dict[str, Any]:
    """All that decides the determined columns, flat: `dataset.prompt`, `models.drafter.files…`.

    A local folder or file counts by its contents, so that moving it changes nothing.
    """
    tree = redacted(job.model_dump(mode="json", exclude=_UNDECIDING))
    del tree["dataset"]["streaming"]
    _use_data_contents(tree["dataset"], job.dataset)
    for strategy in tree["strategies"]:
        if strategy["target"] is not None:
            strategy["target"] = _with_code_hash(strategy["target"])
    for role, model in (("drafter", job.models.drafter), ("verifier", job.models.verifier)):
        folder = Path(model.path).expanduser()
        if folder.is_dir():
            tree["models"][role]["path"] = _folder_hashes(folder)
    return dict(_flat("", tree))


def _use_data_contents(tree: dict[str, Any], dataset: DatasetConfig) -> None:
    """Put hashes in the place of local names; what is not local stands for itself."""
    given = dataset.data_files
    folder = Path(dataset.path).expanduser()
    if not is_file_format(dataset):
        tree["path"] = _folder_hashes(folder) if folder.is_dir() else tree["path"]
    elif isinstance(given, dict):
        tree["data_files"] = {split: _pattern_hashes(names) for split, names in given.items()}
    elif given is not None:
        tree["data_files"] = _pattern_hashes(given)


def _with_code_hash(target: str) -> str:
    """`module:function`, and the hash of the module's file, which lies below the working directory."""
    module = Path(*target.partition(":")[0].split("."))
    files = [file for file in (module.with_suffix(".py"), module / "__init__.py") if file.is_file()]
    return " ".join([target, *map(_file_hash, files)])


def _pattern_hashes(patterns: str | list[str]) -> list[str]:
    """Name and hash of each file in order; a pattern that is not local stands for itself."""
    lines: list[str] = []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        files = [] if "://" in pattern else glob_files(pattern)
        lines += [f"{file.name} {_file_hash(file)}" for file in files] or [redact(pattern)]
    return lines


def _folder_hashes(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    visible = [
        file for file in files if not any(p.startswith(".") for p in file.relative_to(folder).parts)
    ]
    return {str(file.relative_to(folder)): _file_hash(file) for file in visible}


def _file_hash(file: Path) -> str:
    size = file.stat().st_size
    if size <= _WHOLE_HASH_BYTES:
        return _sha256(file.read_bytes())
    with file.open("rb") as stream:
        head = stream.read(_SAMPLE_BYTES)
        stream.seek(size - _SAMPLE_BYTES)
        return f"{_sha256(head + stream.read())} of both ends of {size} bytes"


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _flat(prefix: str, tree: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict | list) and tree:
        pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
        for key, value in pairs:
            yield from _flat(f"{prefix}.{key}" if prefix else str(key), value)
    else:
        yield prefix, tree


def _differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    for name in [*before, *(name for name in after if name not in before)]:
        if name not in after:
            yield f"{name}: was {before[name]!r}, now not there"
        elif name not in before:
            yield f"{name}: was not there, now {after[name]!r}"
        elif before[name] != after[name]:
            yield f"{name}: was {before[name]!r}, now {after[name]!r}"
