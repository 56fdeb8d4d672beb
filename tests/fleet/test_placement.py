"""A plan that does not fit is refused within seconds; what was taken is given back."""

from __future__ import annotations

import time
from typing import Any

import pytest
import ray

from pipeline.config import ClusterConfig
from pipeline.fleet.placement import PlacementError, bundles_of, check_fit
from pipeline.run import prepare, run
from tests.fleet.test_same_rows import Silent

ONE_GPU = {"CPU": 8.0, "GPU": 1.0}


def plan(**given: Any) -> ClusterConfig:
    return ClusterConfig.model_validate(given)


@pytest.mark.parametrize(
    ("cluster", "nodes", "fits"),
    [
        (plan(), [{"CPU": 2.0}], True),
        (plan(), [{"CPU": 1.0}], False),
        (plan(), [{"CPU": 1.0}, {"CPU": 1.0}], True),
        (plan(placement="STRICT_PACK"), [{"CPU": 1.0}, {"CPU": 1.0}], False),
        (plan(placement="STRICT_SPREAD"), [{"CPU": 8.0}], False),
        (plan(placement="STRICT_SPREAD"), [{"CPU": 8.0}, {"CPU": 8.0}], True),
        (plan(drafter={"num_gpus": 0.5}, verifier={"num_gpus": 0.5}), [ONE_GPU], True),
        (plan(drafter={"num_gpus": 0.5}, verifier={"num_gpus": 1}), [ONE_GPU], False),
        (plan(drafter={"replicas": 3}, verifier={"num_gpus": 4}), [ONE_GPU, ONE_GPU], False),
        (plan(drafter={"resources": {"fast": 1}}), [ONE_GPU], False),
    ],
)
def test_a_plan_is_fitted_to_the_nodes(
    cluster: ClusterConfig, nodes: list[dict[str, float]], fits: bool
) -> None:
    if fits:
        check_fit(bundles_of(cluster), cluster.placement, nodes)
        return
    with pytest.raises(PlacementError, match=r"needs .*the cluster has"):
        check_fit(bundles_of(cluster), cluster.placement, nodes)


@pytest.mark.ray
def test_an_impossible_plan_ends_in_seconds_and_gives_everything_back(
    g2p_job: Any, cluster_file: Any, ray_cluster: None
) -> None:
    before = ray.available_resources()
    job = g2p_job("fleet=ray", f"cluster={cluster_file('{}', '{num_gpus: 4}')}")
    started = time.monotonic()
    with pytest.raises(PlacementError, match=r"verifier-0 needs 1 CPU, 4 GPU.*cluster has 8 CPU"):
        run(prepare(job), Silent())
    assert time.monotonic() - started < 20
    ok = g2p_job("fleet=ray", "dataset.limit=2", f"output={job.output}-ok")
    run(prepare(ok), Silent())
    deadline = time.monotonic() + 30
    while ray.available_resources().get("CPU") != before["CPU"] and time.monotonic() < deadline:
        time.sleep(0.2)
    assert ray.available_resources()["CPU"] == before["CPU"]
