"""A plan that does not fit is refused within seconds; what was taken is given back.

Planted faults these tests catch: labels or accelerators that are not looked at; a node that has a label
with another value; shares of several GPUs added up; memory counted as free after it was given; a worker
without needs that takes the only node another could have had; one more drafter than there is room for.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import ray

from pipeline.config import ClusterConfig
from pipeline.fleet.interface import FleetPlan
from pipeline.fleet.placement import Node, PlacementError, bundles_of, check_fit, settled
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
    there = [Node(node) for node in nodes]
    if fits:
        check_fit(bundles_of(cluster), cluster.placement, there)
        return
    with pytest.raises(PlacementError, match=r"needs .*the cluster has"):
        check_fit(bundles_of(cluster), cluster.placement, there)


H100 = Node(
    {"CPU": 32.0, "GPU": 4.0, "memory": 64 * 2**30, "accelerator_type:H100": 1.0},
    {"pool": "verifiers", "zone": "a", "ray.io/node-id": "1f"},
)
L4 = Node(
    {"CPU": 16.0, "GPU": 2.0, "memory": 32 * 2**30, "accelerator_type:L4": 1.0},
    {"pool": "drafters", "ray.io/node-id": "2f"},
)
NO_LABEL = Node({"CPU": 16.0, "GPU": 8.0, "memory": 32 * 2**30})


@pytest.mark.parametrize(
    ("verifier", "nodes", "fits"),
    [
        ({"num_gpus": 4, "accelerator_type": "H100"}, [L4, H100], True),
        ({"num_gpus": 2, "accelerator_type": "H100"}, [L4, NO_LABEL], False),
        ({"replicas": 2, "num_gpus": 1, "accelerator_type": "L4"}, [L4], True),
        ({"replicas": 2000, "num_cpus": 0, "accelerator_type": "L4"}, [L4], False),
        ({"labels": {"pool": "verifiers"}}, [L4, H100], True),
        ({"labels": {"pool": "verifiers"}}, [L4, NO_LABEL], False),
        ({"labels": {"pool": "verifiers", "zone": "b"}}, [H100], False),
        ({"num_gpus": 4, "labels": {"pool": "in(drafters, verifiers)"}}, [H100], True),
        ({"num_gpus": 8, "labels": {"pool": "in(drafters, verifiers)"}}, [H100, NO_LABEL], False),
        ({"num_gpus": 8, "labels": {"pool": "!drafters"}}, [L4, NO_LABEL], True),
        ({"labels": {"pool": "!in(drafters,verifiers)"}}, [L4, H100], False),
        ({"replicas": 2, "memory": "30GiB"}, [H100], True),
        ({"replicas": 2, "memory": "33GiB"}, [H100], False),
        ({"replicas": 3, "num_gpus": 0.6}, [L4], False),
        ({"replicas": 4, "num_gpus": 0.5}, [L4], True),
    ],
)
def test_constraints_are_looked_at(verifier: dict[str, Any], nodes: list[Node], fits: bool) -> None:
    cluster = plan(verifier=verifier, drafter={"num_cpus": 0})
    if fits:
        check_fit(bundles_of(cluster), "PACK", nodes)
        return
    with pytest.raises(PlacementError, match=r"needs .*the cluster has"):
        check_fit(bundles_of(cluster), "PACK", nodes)


def test_a_bundle_that_few_nodes_can_take_chooses_first() -> None:
    # The drafters' CPUs would be taken from the only node with the label, by order or by size.
    cluster = plan(
        drafter={"num_cpus": 8, "replicas": 2}, verifier={"num_cpus": 1, "labels": {"zone": "a"}}
    )
    labelled = Node({"CPU": 8.0}, {"zone": "a"})
    check_fit(bundles_of(cluster), "PACK", [labelled, Node({"CPU": 16.0})])


def test_need_and_supply_are_one_sentence() -> None:
    needs = {
        "num_gpus": 8,
        "accelerator_type": "H100",
        "memory": "16GiB",
        "labels": {"pool": "verifiers"},
    }
    with pytest.raises(PlacementError) as caught:
        check_fit(bundles_of(plan(verifier=needs)), "SPREAD", [H100, L4, L4])
    assert str(caught.value) == (
        "verifier-0 needs 1 CPU, 8 GPU, H100 accelerators, 16 GiB memory, label pool=verifiers, which "
        "no node can give beside the other actors under SPREAD placement; the cluster has 32 CPU, 4 GPU, "
        "H100 accelerators, 64 GiB memory (pool=verifiers, zone=a); 2 nodes with 16 CPU, 2 GPU, "
        "L4 accelerators, 32 GiB memory (pool=drafters). Lower the cluster config or add nodes"
    )


@pytest.mark.parametrize(
    ("cluster", "drafters", "verifiers"),
    [
        (plan(drafter={"replicas": "auto", "num_gpus": 1}, verifier={"num_gpus": 4}), 4, 1),
        (plan(drafter={"replicas": "auto", "num_gpus": 0.4}, verifier={"num_gpus": 4}), 8, 1),
        (plan(drafter={"replicas": 2, "num_gpus": 1}, verifier={"replicas": "auto"}), 2, 62),
        (plan(drafter={"replicas": "auto", "labels": {"pool": "drafters"}}), 32, 1),
        (plan(drafter={"replicas": "auto"}, placement="STRICT_PACK"), 31, 1),
        (plan(drafter={"replicas": "auto"}, placement="STRICT_SPREAD"), 2, 1),
        (plan(drafter={"replicas": 3}, verifier={"replicas": 2}), 3, 2),
    ],
)
def test_auto_is_as_many_as_fit(cluster: ClusterConfig, drafters: int, verifiers: int) -> None:
    found = settled(cluster, [H100, L4, L4])
    assert (found.drafter.count, found.verifier.count) == (drafters, verifiers)
    assert found.placement == cluster.placement


def test_auto_without_room_for_one_says_what_is_free() -> None:
    cluster = plan(drafter={"replicas": "auto", "num_gpus": 1}, verifier={"num_gpus": 1})
    free = Node({"CPU": 4.0, "GPU": 1.0, "CPU_group_0_f00": 2.0, "bundle_group_f00": 1000.0})
    with pytest.raises(PlacementError, match=r"drafter-0 needs .* what is free is 4 CPU, 1 GPU\."):
        settled(cluster, [free])


def fleet_plan(cluster: ClusterConfig) -> FleetPlan:
    return FleetPlan(None, 8, (), (), cluster)  # type: ignore[arg-type]


def test_linked_drafters_call_their_own_verifiers_only() -> None:
    linked = fleet_plan(
        plan(
            drafter={"replicas": 2},
            verifier={"replicas": 3},
            links={"drafter-1": ["verifier-0"], "drafter-0": ["verifier-2", "verifier-1"]},
        )
    )
    assert linked.verifiers_of(0) == [2, 1, 2, 1]
    assert linked.verifiers_of(1) == [0, 0, 0, 0]


def test_unlinked_banks_are_dealt_to_all_verifiers() -> None:
    dealt = fleet_plan(plan(drafter={"replicas": 2, "banks": 3}, verifier={"replicas": 3}))
    assert dealt.verifiers_of(0) == [0, 2, 1]
    assert dealt.verifiers_of(1) == [1, 0, 2]


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
