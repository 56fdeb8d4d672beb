"""The job and the cluster config: frozen models, read from YAML and checked once, at the door.

Every mistake becomes one `JobError` sentence that names the field, the value and the remedy.
Paths are relative to the working directory.
"""

from __future__ import annotations

from pipeline.config.cluster import (
    MOST_REPLICAS,
    ClusterConfig,
    DrafterRole,
    FailureConfig,
    VerifierRole,
)
from pipeline.config.errors import JobError, all_of, one_line
from pipeline.config.job import DatasetConfig, Job, ModelConfig, ModelsConfig, StrategyConfig
from pipeline.config.loading import load_cluster, load_job, parse_job
from pipeline.config.yaml_files import near_path

__all__ = [
    "MOST_REPLICAS",
    "ClusterConfig",
    "DatasetConfig",
    "DrafterRole",
    "FailureConfig",
    "Job",
    "JobError",
    "ModelConfig",
    "ModelsConfig",
    "StrategyConfig",
    "VerifierRole",
    "all_of",
    "load_cluster",
    "load_job",
    "near_path",
    "one_line",
    "parse_job",
]
