"""Places the workers of a placement config on a Ray cluster, without models, and says where they are.

    python -m tests.cluster.placing ADDRESS CONFIG TAKEN

TAKEN is what somebody else has of an L4 node meanwhile, as JSON. It prints a line of JSON: for each
worker its node's labels, the type of its accelerators and how many GPUs it has; or the sentence that
refuses it. It is a program of its own because the other tests have a Ray of their own.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from typing import Any

import ray
from ray.util.placement_group import placement_group

from pipeline.config import load_cluster
from pipeline.fleet.interface import FleetPlan
from pipeline.fleet.placement import PlacementError, bundles_of, placed
from pipeline.fleet.ray_fleet import RayFleet


class Worker:
    """Stands where a drafter or a verifier would."""

    def place(self) -> tuple[str, int]:
        return ray.get_runtime_context().get_node_id(), len(ray.get_gpu_ids())


def kinds(resources: dict[str, float]) -> list[str]:
    return [name.split(":")[1] for name in resources if name.startswith("accelerator_type:")]


def found(fleet: RayFleet) -> Iterator[tuple[str, Any]]:
    plan = fleet._plan
    roles = {"drafter": plan.cluster.drafter, "verifier": plan.cluster.verifier}
    nodes = {node["NodeID"]: node for node in ray.nodes()}
    for index, bundle in enumerate(bundles_of(plan.cluster)):
        options = fleet._options(index, roles[bundle.actor.split("-")[0]])
        actor = ray.remote(Worker).options(**options).remote()
        node, gpus = ray.get(actor.place.remote(), timeout=120)
        labels = {k: v for k, v in nodes[node]["Labels"].items() if not k.startswith("ray.io/")}
        yield bundle.actor, [labels, kinds(nodes[node]["Resources"]), gpus]


def taken(resources: dict[str, float]) -> None:
    if resources:
        group = placement_group([{**resources, "accelerator_type:L4": 0.001}])
        assert group.wait(60)


def main(address: str, path: str, others: str) -> None:
    plan = FleetPlan(None, 8, (), (), load_cluster(path))  # type: ignore[arg-type]
    fleet = RayFleet(plan, address)
    try:
        fleet._connect()
        taken(json.loads(others))
        fleet._reserve()
        assert fleet._group is not None
        asyncio.run(placed(fleet._group, fleet._plan.cluster))
        print(json.dumps(dict(found(fleet))))
    except PlacementError as error:
        print(json.dumps(str(error)))
    finally:
        fleet._release()


if __name__ == "__main__":
    main(*sys.argv[1:])
