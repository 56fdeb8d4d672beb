"""On a real Ray cluster of several nodes, with GPUs that are only said to be there.

Planted faults these tests catch: labels or accelerators that are checked but not asked of Ray; a
selector that Ray reads in another way than we do; `auto` that counts what is taken; a plan that does
not fit and waits.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster

from tests.cluster import CLUSTER, REPOSITORY

GIB = 2**30
STORE = {"object_store_memory": 80 * 2**20}
H100 = {"num_cpus": 16, "num_gpus": 4, "resources": {"accelerator_type:H100": 1}}
L4 = {"num_cpus": 8, "num_gpus": 4, "resources": {"accelerator_type:L4": 1}}

pytestmark = [pytest.mark.ray, pytest.mark.endurance]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A head for nothing, four H100s for verifiers and twice four L4s, one lot without a label."""
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **STORE}
    )
    cluster.add_node(**H100, labels={"pool": "verifiers"}, memory=64 * GIB, **STORE)
    cluster.add_node(**L4, labels={"pool": "drafters"}, memory=64 * GIB, **STORE)
    cluster.add_node(**L4, memory=64 * GIB, **STORE)
    yield cluster.address
    cluster.shutdown()


def placed(address: str, config: Path, taken: dict[str, float] | None = None) -> Any:
    """What `placing.py` says."""
    arguments = [address, str(config), json.dumps(taken or {})]
    done = subprocess.run(
        [sys.executable, "-m", "tests.cluster.placing", *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "RAY_AUTH_MODE": "disabled"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def config(tmp_path: Path) -> Any:
    def write(text: str) -> Path:
        path = tmp_path / "cluster.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_workers_stand_where_many_nodes_says(address: str, config: Any) -> None:
    text = (CLUSTER / "many-nodes.yaml").read_text(encoding="utf-8")
    workers = placed(address, config(text.replace("replicas: 8", "replicas: 4")))
    assert Counter(json.dumps(place) for place in workers.values()) == {
        json.dumps([{"pool": "drafters"}, ["L4"], 1]): 4,
        json.dumps([{"pool": "verifiers"}, ["H100"], 1]): 4,
    }


def test_ray_reads_selectors_as_we_do(address: str, config: Any) -> None:
    workers = placed(
        address,
        config(
            "drafter: {replicas: 4, num_gpus: 1, labels: {pool: '!in(drafters, verifiers)'}}\n"
            "verifier: {replicas: 2, num_gpus: 2, labels: {pool: '!drafters'}, accelerator_type: H100}"
        ),
    )
    places = Counter(json.dumps(place) for place in workers.values())
    assert places == {
        json.dumps([{}, ["L4"], 1]): 4,
        json.dumps([{"pool": "verifiers"}, ["H100"], 2]): 2,
    }


@pytest.mark.parametrize(("taken", "drafters"), [({}, 16), ({"GPU": 3, "CPU": 1}, 10)])
def test_auto_takes_what_others_leave(
    address: str, config: Any, taken: dict[str, float], drafters: int
) -> None:
    workers = placed(
        address,
        config(
            "drafter: {replicas: auto, num_gpus: 0.5, num_cpus: 0.5, accelerator_type: L4}\n"
            "verifier: {num_gpus: 4, accelerator_type: H100}"
        ),
        taken,
    )
    assert len(workers) == 1 + drafters
    assert workers["verifier-0"] == [{"pool": "verifiers"}, ["H100"], 4]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("verifier: {labels: {pool: nowhere}}", "label pool=nowhere"),
        ("verifier: {num_gpus: 1, accelerator_type: A100}", "A100 accelerators"),
        ("verifier: {replicas: 2, num_gpus: 4, labels: {pool: verifiers}}", "4 GPU"),
        ("verifier: {memory: 65GiB}", "65 GiB memory"),
    ],
)
def test_what_does_not_fit_is_refused_at_once(
    address: str, config: Any, text: str, said: str
) -> None:
    began = time.monotonic()
    sentence = placed(address, config(text))
    assert time.monotonic() - began < 40, "imports and connecting included"
    assert said in sentence
    assert "the cluster has" in sentence
    assert "H100 accelerators, 64 GiB memory (pool=verifiers)" in sentence


def test_nodes_that_may_come_are_waited_for(address: str, config: Any) -> None:
    began = time.monotonic()
    text = "verifier: {labels: {pool: nowhere}}\nautoscaling_seconds: 31"
    sentence = placed(address, config(text))
    assert time.monotonic() - began > 31
    assert "not placed within 31 s (INFEASIBLE)" in sentence
