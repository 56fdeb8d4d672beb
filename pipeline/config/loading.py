"""From files to checked jobs and cluster configs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.config.cluster import ClusterConfig
from pipeline.config.job import Job
from pipeline.config.sentences import checked
from pipeline.config.yaml_files import read_yaml, set_value


def load_job(path: str | Path, overrides: Sequence[str] = ()) -> Job:
    """Read a job file, apply `path=value` overrides, and check it.

    Raises:
        JobError: the file is missing, is not YAML, or a field is wrong.
    """
    tree = read_yaml(Path(path))
    for override in overrides:
        set_value(tree, override)
    return parse_job(tree, str(path))


def parse_job(tree: dict[str, Any], source: str = "job") -> Job:
    """Check a job that is already a mapping. Raises `JobError`."""
    return checked(Job, tree, source)


def load_cluster(path: str | Path) -> ClusterConfig:
    """Read and check a cluster config. Raises `JobError`."""
    return checked(ClusterConfig, read_yaml(Path(path)), str(path))
