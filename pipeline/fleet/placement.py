"""Where the actors go: a plan of bundles, fitted to the cluster before anything starts.

Ray lets a request that can never be met wait for ever; here it ends within seconds in a sentence
that says what is needed and what there is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from pipeline.config import ClusterConfig, DrafterRole, JobError, VerifierRole

PLACEMENT_SECONDS = 30
"""How long busy resources may take to become free."""

Resources = dict[str, float]


class PlacementError(JobError):
    """The actors do not fit the cluster: says what is needed and what there is."""


@dataclass(frozen=True)
class Bundle:
    """What one actor is given."""

    actor: str
    resources: Resources

    def __str__(self) -> str:
        return f"{self.actor} needs {_described(self.resources)}"


def bundles_of(cluster: ClusterConfig) -> list[Bundle]:
    """One bundle an actor: verifiers first, since they are the larger ones."""
    roles = (("verifier", cluster.verifier), ("drafter", cluster.drafter))
    return [
        Bundle(f"{name}-{index}", _resources(role))
        for name, role in roles
        for index in range(role.replicas)
    ]


def place(cluster: ClusterConfig) -> PlacementGroup:
    """Reserve the resources of all actors.

    Raises:
        PlacementError: they can never be had here, or were not free in time.
    """
    bundles = bundles_of(cluster)
    check_fit(bundles, cluster.placement, _nodes())
    # Ray refuses bundles of nothing; a millionth of a CPU stands for an actor that asks for none.
    wanted = [bundle.resources or {"CPU": 1e-4} for bundle in bundles]
    group = placement_group(wanted, strategy=cluster.placement)
    if not group.wait(PLACEMENT_SECONDS):
        state = placement_group_table(group)["stats"]["scheduling_state"]
        remove_placement_group(group)
        raise PlacementError(
            f"the actors were not placed within {PLACEMENT_SECONDS} s ({state}): "
            f"{'; '.join(map(str, bundles))}. Free now: {_described(ray.available_resources())}"
        )
    return group


def check_fit(bundles: Sequence[Bundle], strategy: str, nodes: Sequence[Resources]) -> None:
    """Fit bundles to the nodes' totals, largest first, as the placement strategy demands.

    Raises:
        PlacementError: they do not fit even an empty cluster.
    """
    free = [dict(node) for node in nodes]
    if strategy == "STRICT_PACK":
        bundles = [Bundle("the group", _sum([bundle.resources for bundle in bundles]))]
    for bundle in sorted(bundles, key=lambda b: -sum(b.resources.values())):
        node = next((node for node in free if _holds(node, bundle.resources)), None)
        if node is None:
            there = "; ".join(_described(node) for node in nodes) or "no nodes"
            raise PlacementError(
                f"{bundle}, which no node can give beside the other actors under {strategy} "
                f"placement; the cluster has {there}. Lower the cluster config or add nodes"
            )
        if strategy == "STRICT_SPREAD":
            free.remove(node)
        else:
            node.update({k: node[k] - v for k, v in bundle.resources.items()})


def _resources(role: DrafterRole | VerifierRole) -> Resources:
    named = {"CPU": role.num_cpus, "GPU": role.num_gpus, **role.resources}
    return {name: amount for name, amount in named.items() if amount > 0}


def _nodes() -> list[Resources]:
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _holds(node: Mapping[str, float], wanted: Mapping[str, float]) -> bool:
    return all(node.get(name, 0) + 1e-9 >= amount for name, amount in wanted.items())


def _sum(parts: Sequence[Resources]) -> Resources:
    names = {name for part in parts for name in part}
    return {name: sum(part.get(name, 0) for part in parts) for name in names}


def _described(resources: Mapping[str, float]) -> str:
    shown = {
        k: v for k, v in resources.items() if not k.startswith(("node:", "object_store", "mem"))
    }
    return ", ".join(f"{amount:g} {name}" for name, amount in sorted(shown.items())) or "nothing"
