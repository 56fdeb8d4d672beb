"""The manifests for KubeRay: keys and types, that they fit each other, and the placement config they serve.

Planted faults these tests catch: a misspelt or misplaced key; a number where Ray's parameters are text;
two images; another Ray than the image has; a volume or a Secret that nobody makes; a group too small, or
without the label or the accelerator that a worker asks for; a job that cannot resume; a real secret.
"""

from __future__ import annotations

import copy
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from pydantic import ValidationError
from ray.autoscaler._private.kuberay.autoscaling_config import (
    _derive_autoscaling_config_from_ray_cr,
)

from pipeline.config import load_cluster
from pipeline.fleet.placement import Node, PlacementError, bundles_of, check_fit
from tests.cluster import CLUSTER
from tests.cluster.kubernetes import (
    Container,
    RayCluster,
    RayClusterSpec,
    RayJob,
    Secret,
    VolumeClaim,
    checked,
)

FOLDER = CLUSTER / "kubernetes"
MANIFESTS = sorted(FOLDER.glob("*.yaml"))


def tree_of(path: Path) -> dict[str, Any]:
    tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(tree, dict)
    return tree


def read(name: str) -> Any:
    return checked(tree_of(FOLDER / f"{name}.yaml"))


CLUSTER_MANIFEST: RayCluster = read("raycluster")
JOB: RayJob = read("rayjob")
SECRET: Secret = read("secret.example")
VOLUME: VolumeClaim = read("volume")
SPEC: RayClusterSpec = CLUSTER_MANIFEST.spec


def containers() -> list[Container]:
    groups = [SPEC.headGroupSpec, *SPEC.workerGroupSpecs]
    return [container for group in groups for container in group.template.spec.containers]


def test_every_manifest_is_checked() -> None:
    stems = [path.stem for path in MANIFESTS]
    assert stems == ["raycluster", "rayjob", "secret.example", "volume"]


def number(tree: dict[str, Any]) -> None:
    tree["spec"]["headGroupSpec"]["rayStartParams"]["num-cpus"] = 0


def misspelt(tree: dict[str, Any]) -> None:
    tree["spec"]["workerGroupSpec"] = tree["spec"].pop("workerGroupSpecs")


def misplaced(tree: dict[str, Any]) -> None:
    tree["spec"]["idleTimeoutSeconds"] = 60


def as_root(tree: dict[str, Any]) -> None:
    pod = tree["spec"]["workerGroupSpecs"][0]["template"]["spec"]
    pod["securityContext"]["runAsUser"] = 0


def old_kind(tree: dict[str, Any]) -> None:
    tree["apiVersion"] = "ray.io/v1alpha1"


@pytest.mark.parametrize("fault", [number, misspelt, misplaced, as_root, old_kind])
def test_a_fault_is_found(fault: Callable[[dict[str, Any]], None]) -> None:
    tree = copy.deepcopy(tree_of(FOLDER / "raycluster.yaml"))
    fault(tree)
    with pytest.raises(ValidationError):
        checked(tree)


def test_a_job_has_the_same_cluster() -> None:
    assert JOB.spec.rayClusterSpec == SPEC


def test_all_nodes_have_one_image_and_the_ray_of_this_environment() -> None:
    assert len({container.image for container in containers()}) == 1
    assert SPEC.rayVersion == ray.__version__
    build = (CLUSTER / "Dockerfile").read_text(encoding="utf-8")
    assert f"-t {containers()[0].image} " in build


def test_the_token_is_that_of_the_secret() -> None:
    assert SPEC.authOptions.secretName == SECRET.metadata.name
    # The key under which KubeRay looks; what is under it is no token that anyone could use.
    assert SECRET.stringData == {"auth_token": ""}


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_no_token_stands_in_a_manifest(path: Path) -> None:
    assert "RAY_AUTH_TOKEN" not in path.read_text(encoding="utf-8")


def test_what_is_mounted_is_there() -> None:
    for group in (SPEC.headGroupSpec, *SPEC.workerGroupSpecs):
        pod = group.template.spec
        claims = [v.persistentVolumeClaim for v in pod.volumes if v.persistentVolumeClaim]
        assert [claim.claimName for claim in claims] == [VOLUME.metadata.name]
        volumes = {volume.name for volume in pod.volumes}
        assert {mount.name for c in pod.containers for mount in c.volumeMounts} == volumes


def test_a_job_resumes_on_what_outlives_its_cluster() -> None:
    assert JOB.spec.backoffLimit > 0
    assert JOB.spec.shutdownAfterJobFinishes
    words = shlex.split(JOB.spec.entrypoint)
    assert words[:3] == ["speccascade", "run", "/job/job.yaml"]
    given = dict(word.split("=") for word in words[3:] if word != "--set")
    head = SPEC.headGroupSpec.template.spec
    kept = {volume.name for volume in head.volumes if volume.persistentVolumeClaim}
    places = [m.mountPath for m in head.containers[0].volumeMounts if m.name in kept]
    assert any(given["output"].startswith(f"{place}/") for place in places)
    assert given["cluster"] == "/job/cluster.yaml"


def node_types(tree: dict[str, Any]) -> dict[str, Any]:
    """As Ray's autoscaler reads the groups."""
    config = {**copy.deepcopy(tree), "metadata": {**tree["metadata"], "namespace": "default"}}
    types = _derive_autoscaling_config_from_ray_cr(config)["available_node_types"]
    return {name: types[name] for name in ("drafters", "verifiers")}


def nodes_of(tree: dict[str, Any], without: str = "") -> list[Node]:
    return [
        Node({k: float(v) for k, v in kind["resources"].items() if k != without}, kind["labels"])
        for kind in node_types(tree).values()
        for _ in range(kind["max_workers"])
    ]


def test_the_groups_hold_the_workers_of_many_nodes() -> None:
    tree = tree_of(FOLDER / "raycluster.yaml")
    cluster = load_cluster(CLUSTER / "many-nodes.yaml")
    check_fit(bundles_of(cluster), cluster.placement, nodes_of(tree))
    for resource in ("GPU", "memory", "accelerator_type:H100"):
        nodes = nodes_of(tree, without=resource)
        with pytest.raises(PlacementError):
            check_fit(bundles_of(cluster), cluster.placement, nodes)


def test_the_groups_grow_from_nothing() -> None:
    for kind in node_types(tree_of(FOLDER / "raycluster.yaml")).values():
        assert kind["min_workers"] == 0 < kind["max_workers"]


def test_requests_are_limits() -> None:
    # Ray counts the limits; a pod that was promised less could be ended for what Ray gave away.
    for container in containers():
        assert container.resources.requests == container.resources.limits


def test_resources_in_start_parameters_are_what_ray_reads() -> None:
    for group in SPEC.workerGroupSpecs:
        given = json.loads(json.loads(group.rayStartParams["resources"]))
        assert all(name.startswith("accelerator_type:") for name in given)
