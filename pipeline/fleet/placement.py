"""Where the actors go: a plan of bundles, fitted to the cluster before anything starts.

Ray lets a request that can never be met wait for ever; here it ends within seconds in a sentence
that says what is needed and what there is.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import ray
from ray._private.state import available_resources_per_node
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
)

from pipeline.config import MOST_REPLICAS, ClusterConfig, DrafterRole, JobError, VerifierRole

PLACEMENT_SECONDS = 30
"""How long busy resources may take to become free."""

_ACCELERATOR = "accelerator_type:"
"""Begins the resource that Ray gives to a node for the type of its accelerators."""

_NODE_ID = "ray.io/node-id"
"""A label that tells nothing: each node has one of its own."""

_TOLERANCE = 1e-9

Resources = dict[str, float]


class PlacementError(JobError):
    """The actors do not fit the cluster: says what is needed and what there is."""


@dataclass(frozen=True)
class Bundle:
    """What one actor is given, and the labels that its node must have, as pairs of key and selector."""

    actor: str
    resources: Resources
    labels: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        labels = [f"label {key}={selector}" for key, selector in self.labels]
        return f"{self.actor} needs {', '.join([_described(self.resources), *labels])}"


@dataclass(frozen=True)
class Node:
    """A machine of the cluster: what it has, or has free, and its labels."""

    resources: Resources
    labels: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        labels = [f"{key}={value}" for key, value in sorted(self.labels.items()) if key != _NODE_ID]
        return _described(self.resources) + (f" ({', '.join(labels)})" if labels else "")


def bundles_of(cluster: ClusterConfig) -> list[Bundle]:
    """One bundle an actor: verifiers first, since they are the larger ones."""
    roles = (
        (cluster.verifier, cluster.verifier_names()),
        (cluster.drafter, cluster.drafter_names()),
    )
    return [_bundle(name, role) for role, names in roles for name in names]


def settled(cluster: ClusterConfig, free: Sequence[Node]) -> ClusterConfig:
    """The config with a number for `auto`: as many as fit what is free beside the other role.

    Raises:
        PlacementError: not even one fits.
    """
    if cluster.drafter.replicas == "auto":
        return _most(cluster, "drafter", cluster.drafter, free)
    if cluster.verifier.replicas == "auto":
        return _most(cluster, "verifier", cluster.verifier, free)
    return cluster


def reserve(cluster: ClusterConfig) -> PlacementGroup:
    """Ask for the resources of all actors.

    Raises:
        PlacementError: they can never be had here.
    """
    bundles = bundles_of(cluster)
    if not cluster.autoscaling_seconds:
        check_fit(bundles, cluster.placement, nodes_there())
    return placement_group(
        # Ray refuses bundles of nothing; a sliver of a CPU stands for an actor that asks for none.
        [bundle.resources or {"CPU": 1e-4} for bundle in bundles],
        strategy=cluster.placement,
        bundle_label_selector=[dict(bundle.labels) for bundle in bundles],
    )


async def placed(group: PlacementGroup, cluster: ClusterConfig) -> None:
    """Wait until all resources are reserved.

    Raises:
        PlacementError: they were not free in time.
    """
    seconds = max(PLACEMENT_SECONDS, cluster.autoscaling_seconds)
    deadline = time.monotonic() + seconds
    # A second at a time: a thread cannot be interrupted, and Ctrl-C should not wait for it.
    while not await asyncio.to_thread(group.wait, 1):
        if time.monotonic() > deadline:
            state = placement_group_table(group)["stats"]["scheduling_state"]
            raise PlacementError(
                f"the actors were not placed within {seconds:g} s ({state}): "
                f"{'; '.join(map(str, bundles_of(cluster)))}. Free now: {_listed(nodes_free())}"
            )


def check_fit(
    bundles: Sequence[Bundle],
    strategy: str,
    nodes: Sequence[Node],
    there: str = "the cluster has",
) -> dict[str, int]:
    """Fit bundles to the nodes as the placement strategy demands.

    Args:
        there: how the sentence about a bundle that fits none goes on to the nodes.

    Returns:
        The index of a node for each actor; Ray may choose others.

    Raises:
        PlacementError: they do not fit even if nothing else runs there.
    """
    fit = _fit(bundles, strategy, nodes)
    if fit.unplaced is not None:
        raise PlacementError(
            f"{fit.unplaced}, which no node can give beside the other actors under {strategy} "
            f"placement; {there} {_listed(nodes)}. Lower the cluster config or add nodes"
        )
    return fit.places


def nodes_there() -> list[Node]:
    """The nodes that are up, with all that they have."""
    return [Node(node["Resources"], node["Labels"]) for node in ray.nodes() if node["Alive"]]


def nodes_free() -> list[Node]:
    """The nodes that are up, with what nobody has taken."""
    free = available_resources_per_node()
    return [
        Node(free.get(node["NodeID"], {}), node["Labels"]) for node in ray.nodes() if node["Alive"]
    ]


def _most(
    cluster: ClusterConfig, name: str, role: DrafterRole | VerifierRole, free: Sequence[Node]
) -> ClusterConfig:
    def planned(count: int) -> ClusterConfig:
        return cluster.model_copy(update={name: role.model_copy(update={"replicas": count})})

    def is_too_many(count: int) -> bool:
        return _fit(bundles_of(planned(count)), cluster.placement, free).unplaced is not None

    bound = min(MOST_REPLICAS, sum(_copies(_resources(role), node) for node in free))
    found = planned(max(1, bisect_left(range(1, bound + 1), True, key=is_too_many)))
    check_fit(bundles_of(found), cluster.placement, free, "what is free is")
    return found


def _copies(wanted: Mapping[str, float], node: Node) -> int:
    """How often a node holds what a worker needs, at most."""
    given = node.resources
    return min(math.floor(given.get(n, 0) / amount + _TOLERANCE) for n, amount in wanted.items())


@dataclass(frozen=True)
class _Fit:
    """The node of each actor, by index, and the first bundle that found no place."""

    places: dict[str, int]
    unplaced: Bundle | None = None


def _fit(bundles: Sequence[Bundle], strategy: str, nodes: Sequence[Node]) -> _Fit:
    """Find places for bundles. Those that the fewest nodes can take choose first."""
    rooms = {index: _Room(node) for index, node in enumerate(nodes)}
    ordered = sorted(bundles, key=lambda bundle: _order(bundle, nodes))
    if strategy == "STRICT_PACK":
        for index, room in rooms.items():
            if all(room.take(bundle) for bundle in ordered):
                return _Fit({bundle.actor: index for bundle in bundles})
        return _Fit({}, _merged(bundles))
    places: dict[str, int] = {}
    for bundle in ordered:
        found = next((index for index, room in rooms.items() if room.take(bundle)), None)
        if found is None:
            return _Fit(places, bundle)
        places[bundle.actor] = found
        if strategy == "STRICT_SPREAD":
            del rooms[found]
    return _Fit(places)


class _Room:
    """What is left of a node while bundles are fitted to it."""

    def __init__(self, node: Node) -> None:
        self._labels = node.labels
        self._left = dict(node.resources)
        whole, part = divmod(self._left.get("GPU", 0), 1)
        # A share of a GPU is a share of a single one: three of 0.6 do not fit two GPUs.
        self._gpus = [part] * (part > 0) + [1.0] * int(whole)

    def take(self, bundle: Bundle) -> bool:
        """Give the bundle its place, if there is one."""
        wanted = bundle.resources.get("GPU", 0)
        share, number = min(wanted, 1), math.ceil(wanted)
        able = [index for index, left in enumerate(self._gpus) if left + _TOLERANCE >= share]
        if len(able) < number or not self._holds(bundle):
            return False
        for index in able[:number]:  # those that have least left come first
            self._gpus[index] -= share
        self._gpus.sort()
        for name, amount in bundle.resources.items():
            self._left[name] -= amount
        return True

    def _holds(self, bundle: Bundle) -> bool:
        return all(_selects(text, self._labels.get(key)) for key, text in bundle.labels) and all(
            self._left.get(name, 0) + _TOLERANCE >= amount
            for name, amount in bundle.resources.items()
        )


def _order(bundle: Bundle, nodes: Sequence[Node]) -> tuple[float, ...]:
    able = sum(_Room(node).take(bundle) for node in nodes)
    return (able, *(-bundle.resources.get(name, 0) for name in ("GPU", "CPU", "memory")))


def _selects(selector: str, value: str | None) -> bool:
    """Whether Ray's selector takes a label's value; None is a node without the label."""
    text = selector.removeprefix("!")
    among = re.fullmatch(r"in\((.*)\)", text)
    values = re.split(", ?", among[1]) if among else [text]
    return (value in values) != selector.startswith("!")


def _bundle(actor: str, role: DrafterRole | VerifierRole) -> Bundle:
    return Bundle(actor, _resources(role), tuple(role.labels.items()))


def _resources(role: DrafterRole | VerifierRole) -> Resources:
    named = {"CPU": role.num_cpus, "GPU": role.num_gpus, "memory": role.memory, **role.resources}
    if role.accelerator_type is not None:
        # As Ray's own option: so little that all workers of a node have their share.
        named[_ACCELERATOR + role.accelerator_type] = 0.001
    return {name: amount for name, amount in named.items() if amount > 0}


def _merged(bundles: Sequence[Bundle]) -> Bundle:
    """All bundles as one, for one node."""
    names = dict.fromkeys(name for bundle in bundles for name in bundle.resources)
    resources = {name: sum(b.resources.get(name, 0) for b in bundles) for name in names}
    labels = dict.fromkeys(label for bundle in bundles for label in bundle.labels)
    return Bundle("the group", resources, tuple(labels))


def _listed(nodes: Iterable[Node]) -> str:
    counts = Counter(map(str, nodes))
    each = [text if n == 1 else f"{n} nodes with {text}" for text, n in counts.items()]
    return "; ".join(each) or "no nodes"


def _described(resources: Mapping[str, float]) -> str:
    hidden = ("node:", "object_store", "bundle_group_")
    shown = {k: v for k, v in resources.items() if not k.startswith(hidden) and "_group_" not in k}
    return ", ".join(_amount(*item) for item in sorted(shown.items())) or "nothing"


def _amount(name: str, amount: float) -> str:
    if name.startswith(_ACCELERATOR):
        return f"{name.removeprefix(_ACCELERATOR)} accelerators"
    return f"{amount / 2**30:.3g} GiB memory" if name == "memory" else f"{amount:g} {name}"
