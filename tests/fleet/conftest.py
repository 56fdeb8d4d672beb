"""The tiny trained pair, and one Ray cluster for all tests that need one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from pipeline.config import Job, load_job

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _in_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)


@pytest.fixture(scope="session")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A local Ray with eight logical CPUs. It is shut down, never stopped by name."""
    ray.init(
        num_cpus=8,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=200 * 2**20,
    )
    yield
    ray.shutdown()


@pytest.fixture
def g2p_job(tmp_path: Path) -> Any:
    """Makes the job of the tiny pair; arguments are overrides as on the command line."""

    def make(*overrides: str) -> Job:
        fixed = [f"output={tmp_path / 'run'}", "fleet=local", "dataset.limit=24"]
        return load_job("jobs/g2p.yaml", [*fixed, *overrides])

    return make


@pytest.fixture
def cluster_file(tmp_path: Path) -> Any:
    """Writes a cluster config; arguments are its lines for drafter and verifier."""

    def write(drafter: str, verifier: str = "{}") -> str:
        path = tmp_path / f"cluster-{abs(hash((drafter, verifier)))}.yaml"
        path.write_text(f"drafter: {drafter}\nverifier: {verifier}\n", encoding="utf-8")
        return str(path)

    return write
