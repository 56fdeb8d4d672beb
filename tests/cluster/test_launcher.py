"""The files for `ray up`: checked by Ray's own schema, and against the placement config they are for.

Planted faults these tests catch: a misspelt key; a head type that is not there; groups larger than
max_workers; a group too small, without the label or without the accelerator that a worker asks for; a
process of Ray that is started without authentication, or reachable without a tunnel; a token in the file.
"""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import ray
import ray.autoscaler
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from pipeline.config import load_cluster
from pipeline.fleet.placement import Node, PlacementError, bundles_of, check_fit
from tests.cluster import CLUSTER

LAUNCHERS = sorted((CLUSTER / "launcher").glob("*.yaml"))
CLOUDS = [path for path in LAUNCHERS if path.stem != "on-premise"]


def tree_of(path: Path) -> dict[str, Any]:
    tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(tree, dict)
    return tree


def check(tree: dict[str, Any]) -> None:
    """The schema on the file as it is, and all that `ray up` checks before it asks a provider."""
    schema = Path(ray.autoscaler.__file__).with_name("ray-schema.json")
    jsonschema.validate(tree, json.loads(schema.read_text(encoding="utf-8")))
    validate_config(prepare_config(copy.deepcopy(tree)))


def test_there_is_a_launcher_for_each_place() -> None:
    assert [path.stem for path in LAUNCHERS] == ["aws", "gcp", "on-premise"]


@pytest.mark.parametrize("path", LAUNCHERS, ids=lambda path: path.stem)
def test_ray_takes_it(path: Path) -> None:
    check(tree_of(path))


@pytest.mark.parametrize("path", CLOUDS, ids=lambda path: path.stem)
@pytest.mark.parametrize(
    ("key", "value"),
    [("setup_command", ["true"]), ("head_node_type", "haed"), ("max_workers", -1)],
)
def test_ray_would_refuse_a_mistake(path: Path, key: str, value: Any) -> None:
    with pytest.raises((jsonschema.ValidationError, ValueError)):
        check({**tree_of(path), key: value})


@pytest.mark.parametrize("path", CLOUDS, ids=lambda path: path.stem)
def test_each_role_has_a_group_that_scales(path: Path) -> None:
    tree = tree_of(path)
    groups = tree["available_node_types"]
    assert set(groups) == {"head", "drafters", "verifiers"}
    for role in ("drafters", "verifiers"):
        assert 0 <= groups[role]["min_workers"] < groups[role]["max_workers"]
        assert groups[role]["labels"] == {"pool": role}
    assert tree["max_workers"] == sum(group["max_workers"] for group in groups.values())
    assert groups["head"]["resources"] == {"CPU": 0}, "no worker of ours beside the driver"
    assert tree["idle_timeout_minutes"] > 0


def nodes_of(tree: dict[str, Any], without: str = "") -> list[Node]:
    groups = tree["available_node_types"].values()
    return [
        Node({k: float(v) for k, v in group["resources"].items() if k != without}, group["labels"])
        for group in groups
        if "labels" in group
        for _ in range(group["max_workers"])
    ]


@pytest.mark.parametrize("path", CLOUDS, ids=lambda path: path.stem)
def test_the_groups_hold_the_workers_of_many_nodes(path: Path) -> None:
    cluster = load_cluster(CLUSTER / "many-nodes.yaml")
    assert cluster.autoscaling_seconds, "else a run would refuse a cluster that is yet to grow"
    check_fit(bundles_of(cluster), cluster.placement, nodes_of(tree_of(path)))
    # An autoscaler starts nodes of a type only if the type is known to have what is asked for.
    for resource in ("GPU", "memory", "accelerator_type:H100"):
        nodes = nodes_of(tree_of(path), without=resource)
        with pytest.raises(PlacementError):
            check_fit(bundles_of(cluster), cluster.placement, nodes)


@pytest.mark.parametrize("path", LAUNCHERS, ids=lambda path: path.stem)
def test_every_ray_asks_for_a_token(path: Path) -> None:
    tree = tree_of(path)
    starts = [
        command
        for key in ("head_start_ray_commands", "worker_start_ray_commands")
        for command in tree[key]
        if "ray start" in command
    ]
    assert len(starts) == 2
    for command in starts:
        assert command.index("export RAY_AUTH_MODE=token;") < command.index("ray start")
    remote = next(there for there, here in tree["file_mounts"].items() if "auth_token" in here)
    assert re.fullmatch(r"/home/(ray|ubuntu)/\.ray/auth_token", remote), "where Ray looks for it"
    text = path.read_text(encoding="utf-8")
    assert "RAY_AUTH_TOKEN=" not in text
    assert "0.0.0.0" not in text, "the dashboard is reached through a tunnel"


@pytest.mark.parametrize("path", LAUNCHERS, ids=lambda path: path.stem)
def test_every_node_installs_this_clone(path: Path) -> None:
    tree = tree_of(path)
    remote = next(there for there, here in tree["file_mounts"].items() if here == ".")
    installs = [command for command in tree["setup_commands"] if "pip install -e" in command]
    assert len(installs) == 1
    assert f"{remote.replace('/home/ubuntu', '$HOME')}[gpu]" in installs[0]


@pytest.mark.parametrize("path", CLOUDS, ids=lambda path: path.stem)
def test_the_containers_run_the_ray_of_this_environment(path: Path) -> None:
    assert tree_of(path)["docker"]["image"] == f"rayproject/ray:{ray.__version__}-py311-gpu"
