"""The placement configs that ship: each is read, and fits the cluster that its name promises, no less.

Planted faults these tests catch: an unknown key in a config; a config that fits only a larger cluster, or
also one that its comment rules out; a file that nobody speaks of.
"""

from __future__ import annotations

import pytest

from pipeline.config import ClusterConfig, load_cluster
from pipeline.fleet.placement import Node, PlacementError, bundles_of, check_fit, settled
from tests.cluster import CLUSTER, PLACEMENT_CONFIGS

GIB = 2**30


def machine(cpus: int, gpus: int = 0, kind: str = "A100", **labels: str) -> Node:
    has = {"CPU": float(cpus), "memory": 128.0 * GIB}
    if gpus:
        has |= {"GPU": float(gpus), f"accelerator_type:{kind}": 1.0}
    return Node(has, labels)


DRAFTING = machine(8, 2, "L4", pool="drafters")
VERIFYING = machine(16, 2, "H100", pool="verifiers")

FITS: dict[str, list[list[Node]]] = {
    "local": [[machine(2)], [machine(1), machine(1)]],
    "laptop": [[machine(4)]],
    "one-gpu": [[machine(2, 1)]],
    "two-gpus": [[machine(2, 2)], [machine(1, 1), machine(1, 1)]],
    "eight-gpus": [[machine(12, 8)]],
    "many-nodes": [[*[DRAFTING] * 4, *[VERIFYING] * 2]],
}
TOO_SMALL: dict[str, list[list[Node]]] = {
    "local": [[machine(1)]],
    "laptop": [[machine(3)], [machine(2), machine(2)]],
    "one-gpu": [[machine(2)], [machine(1, 1), machine(1, 1)]],
    "two-gpus": [[machine(2, 1)]],
    "eight-gpus": [[machine(64, 7)], [machine(32, 4), machine(32, 4)]],
    "many-nodes": [
        [*[DRAFTING] * 3, *[VERIFYING] * 2],
        [*[DRAFTING] * 8, *[machine(16, 2, "A100", pool="verifiers")] * 2],
        [*[machine(8, 2, "L4")] * 4, *[VERIFYING] * 2],
    ],
}


@pytest.mark.parametrize("name", PLACEMENT_CONFIGS)
def test_it_fits_the_cluster_that_it_is_for(name: str) -> None:
    cluster = load_cluster(CLUSTER / f"{name}.yaml")
    for nodes in FITS[name]:
        check_fit(bundles_of(cluster), cluster.placement, nodes)
    for nodes in TOO_SMALL[name]:
        with pytest.raises(PlacementError):
            check_fit(bundles_of(cluster), cluster.placement, nodes)


def test_one_gpu_is_shared_by_both() -> None:
    cluster = load_cluster(CLUSTER / "one-gpu.yaml")
    assert cluster.drafter.num_gpus + cluster.verifier.num_gpus <= 1


def test_eight_gpus_are_all_used() -> None:
    cluster = load_cluster(CLUSTER / "eight-gpus.yaml")
    given = sum(bundle.resources["GPU"] for bundle in bundles_of(cluster))
    assert given == 8


def test_the_default_spells_out_the_defaults() -> None:
    assert load_cluster(CLUSTER / "local.yaml") == ClusterConfig()


@pytest.mark.parametrize("name", PLACEMENT_CONFIGS)
def test_every_config_is_in_the_readme(name: str) -> None:
    assert f"{name}.yaml" in (CLUSTER / "README.md").read_text(encoding="utf-8")


def test_auto_fills_a_node_beside_the_verifier_over_four_gpus() -> None:
    cluster = load_cluster(CLUSTER / "eight-gpus.yaml")
    drafters = cluster.drafter.model_copy(update={"replicas": "auto"})
    found = settled(cluster.model_copy(update={"drafter": drafters}), [machine(64, 8)])
    assert found.drafter.count == 4
