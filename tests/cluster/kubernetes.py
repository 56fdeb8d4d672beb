"""The parts of KubeRay's and Kubernetes' manifests that ours use, strict: no schema ships with Ray.

Written after the API types of KubeRay 1.6 (`ray.io/v1`). A key that is not here is refused: whoever
needs it looks it up and adds it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")]
Quantity = Annotated[str, StringConstraints(pattern=r"^\d+(\.\d+)?(m|[KMGT]i?)?$")]
Quantities = dict[Literal["cpu", "memory", "nvidia.com/gpu", "storage"], Quantity]
Count = Annotated[int, Field(ge=0)]


class Metadata(Strict):
    name: Name


class Resources(Strict):
    requests: Quantities
    limits: Quantities


class Variable(Strict):
    name: str
    value: str


class Port(Strict):
    containerPort: Annotated[int, Field(gt=0, lt=65536)]  # noqa: N815
    name: Annotated[str, StringConstraints(max_length=15)]


class Mount(Strict):
    name: Name
    mountPath: Annotated[str, StringConstraints(pattern="^/")]  # noqa: N815
    readOnly: bool = False  # noqa: N815


class ContainerSecurity(Strict):
    allowPrivilegeEscalation: Literal[False]  # noqa: N815


class Container(Strict):
    name: Name
    image: str
    securityContext: ContainerSecurity  # noqa: N815
    ports: list[Port] = []
    env: list[Variable] = []
    resources: Resources
    volumeMounts: list[Mount] = []  # noqa: N815


class Claim(Strict):
    claimName: Name  # noqa: N815


class Volume(Strict):
    name: Name
    persistentVolumeClaim: Claim | None = None  # noqa: N815
    configMap: Metadata | None = None  # noqa: N815


class Toleration(Strict):
    key: str
    operator: Literal["Exists", "Equal"]
    effect: Literal["NoSchedule", "NoExecute", "PreferNoSchedule"]


class PodSecurity(Strict):
    runAsNonRoot: Literal[True]  # noqa: N815
    runAsUser: Annotated[int, Field(gt=0)]  # noqa: N815
    fsGroup: Count  # noqa: N815


class PodSpec(Strict):
    restartPolicy: Literal["Never"]  # noqa: N815
    securityContext: PodSecurity  # noqa: N815
    nodeSelector: dict[str, str] = {}  # noqa: N815
    tolerations: list[Toleration] = []
    containers: Annotated[list[Container], Field(min_length=1)]
    volumes: list[Volume] = []


class PodTemplate(Strict):
    spec: PodSpec


class HeadGroup(Strict):
    rayStartParams: dict[str, str]  # noqa: N815
    template: PodTemplate


class WorkerGroup(HeadGroup):
    groupName: Name  # noqa: N815
    minReplicas: Count  # noqa: N815
    maxReplicas: Count  # noqa: N815
    labels: dict[str, str] = {}


class AuthOptions(Strict):
    mode: Literal["token"]
    secretName: Name  # noqa: N815


class AutoscalerOptions(Strict):
    version: Literal["v1", "v2"]
    idleTimeoutSeconds: Count  # noqa: N815


class RayClusterSpec(Strict):
    rayVersion: Annotated[str, StringConstraints(pattern=r"^\d+\.\d+\.\d+$")]  # noqa: N815
    authOptions: AuthOptions  # noqa: N815
    enableInTreeAutoscaling: Literal[True]  # noqa: N815
    autoscalerOptions: AutoscalerOptions  # noqa: N815
    headGroupSpec: HeadGroup  # noqa: N815
    workerGroupSpecs: list[WorkerGroup]  # noqa: N815


class RayJobSpec(Strict):
    entrypoint: str
    submissionMode: Literal["K8sJobMode", "HTTPMode", "SidecarMode", "InteractiveMode"]  # noqa: N815
    backoffLimit: Count  # noqa: N815
    shutdownAfterJobFinishes: bool  # noqa: N815
    ttlSecondsAfterFinished: Count  # noqa: N815
    rayClusterSpec: RayClusterSpec  # noqa: N815


class RayCluster(Strict):
    apiVersion: Literal["ray.io/v1"]  # noqa: N815
    kind: Literal["RayCluster"]
    metadata: Metadata
    spec: RayClusterSpec


class RayJob(Strict):
    apiVersion: Literal["ray.io/v1"]  # noqa: N815
    kind: Literal["RayJob"]
    metadata: Metadata
    spec: RayJobSpec


class Secret(Strict):
    apiVersion: Literal["v1"]  # noqa: N815
    kind: Literal["Secret"]
    metadata: Metadata
    type: Literal["Opaque"]
    stringData: dict[str, str]  # noqa: N815


class VolumeRequests(Strict):
    requests: Quantities


class VolumeSpec(Strict):
    accessModes: list[Literal["ReadWriteMany"]]  # noqa: N815
    resources: VolumeRequests


class VolumeClaim(Strict):
    apiVersion: Literal["v1"]  # noqa: N815
    kind: Literal["PersistentVolumeClaim"]
    metadata: Metadata
    spec: VolumeSpec


KINDS: dict[str, type[RayCluster | RayJob | Secret | VolumeClaim]] = {
    "RayCluster": RayCluster,
    "RayJob": RayJob,
    "Secret": Secret,
    "PersistentVolumeClaim": VolumeClaim,
}


def checked(manifest: dict[str, Any]) -> RayCluster | RayJob | Secret | VolumeClaim:
    """The manifest as its kind. Raises `ValidationError`."""
    return KINDS[manifest["kind"]].model_validate(manifest)
