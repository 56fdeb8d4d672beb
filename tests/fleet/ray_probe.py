"""Runs a small job on a Ray of its own and looks at that Ray from outside, once it is ready.

    python tests/fleet/ray_probe.py OUTPUT

The job has a target of its own, `own_target.py` in the working directory. What was found is printed
as one line of JSON. This is a program because the other tests share a Ray that was started without a
token.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import grpc
import ray  # makes psutil importable
from psutil import Process

from pipeline.config import load_job
from pipeline.records import WorkerStats
from pipeline.run import prepare, run

CALLS = {
    "gcs_server": "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo",
    "raylet": "/ray.rpc.NodeManagerService/GetNodeStats",
    "ray::DrafterActor": "/ray.rpc.CoreWorkerService/NumPendingTasks",
    "ray::VerifierActor": "/ray.rpc.CoreWorkerService/NumPendingTasks",
}
"""A harmless call that each process answers to those it knows."""


@dataclass(frozen=True)
class Socket:
    """A socket that listens, and whose it is."""

    process: str
    address: str
    port: int


@dataclass(frozen=True)
class Found:
    """What was seen while the run was ready."""

    token: str
    session: str
    sockets: Sequence[Socket]
    commands: Sequence[str]
    answers: Sequence[tuple[str, str, str]]
    """Process, and the status of a call without the token and with it."""
    runtime_environments: int
    """HTTP status of asking, without the token, for an environment to be installed."""
    shards_written: int = 0
    left_behind: Sequence[str] = ()
    """Variables about authentication that outlived the run."""


class Probe:
    """The watcher of a run that looks around when all models are loaded."""

    found: Found

    def started(self, rows_done: int, rows_total: int | None) -> None:
        pass

    def ready(self) -> None:
        token = os.environ.get("RAY_AUTH_TOKEN", "")
        tree = [Process(), *Process().children(recursive=True)]
        sockets = [socket for process in tree for socket in listening(process)]
        agents = [one for one in sockets if one.process.startswith("ray::RuntimeEnvAgent")]
        self.found = Found(
            token=token,
            session=ray._private.worker._global_node.get_session_dir_path(),
            sockets=sockets,
            commands=[" ".join(process.cmdline()) for process in tree],
            answers=[
                (one.process, status(one.port, call, ""), status(one.port, call, token))
                for one in sockets
                for name, call in CALLS.items()
                if one.process.startswith(name)
            ],
            runtime_environments=http_status(agents[0], "/get_or_create_runtime_env"),
        )

    def progressed(self, rows_done: int, workers: Sequence[WorkerStats]) -> None:
        pass


def listening(process: Process) -> Iterator[Socket]:
    name = process.cmdline()[0].rpartition("/")[2]
    for connection in process.net_connections(kind="tcp"):
        if connection.status == "LISTEN":
            yield Socket(name, connection.laddr.ip, connection.laddr.port)


def status(port: int, call: str, token: str) -> str:
    metadata = [("authorization", f"Bearer {token}")] if token else []
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            channel.unary_unary(call)(b"", metadata=metadata, timeout=20)
        except grpc.RpcError as error:
            return str(error.code().name)
        return "OK"


def http_status(at: Socket, path: str) -> int:
    url = f"http://{at.address}:{at.port}{path}"
    request = urllib.request.Request(url, data=b"", method="POST")
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def main(output: str) -> None:
    probe = Probe()
    own = "strategies=[verifier, {use: custom, target: 'own_target:verifier'}]"
    overrides = [f"output={output}", "dataset.limit=8", own, "allow_custom_code=true"]
    job = load_job("jobs/g2p.yaml", overrides)
    finished = run(prepare(job), probe)
    left = [name for name in os.environ if name.startswith("RAY_AUTH")]
    found = replace(probe.found, shards_written=finished.shards_written, left_behind=left)
    print(json.dumps(asdict(found)))


if __name__ == "__main__":
    main(sys.argv[1])
