"""A Ray that a run starts for itself: reachable from this machine only, and only with its token."""

from __future__ import annotations

import ipaddress
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import JobError
from pipeline.fleet import connection
from pipeline.fleet.connection import connected
from pipeline.results.writer import read_rows

REPOSITORY = Path(__file__).parents[2]
LIMIT_SECONDS = 240
OWN_TARGET = "def verifier(drafter_probs, verifier_probs, alpha):\n    return verifier_probs\n"
SHADOWED = ("colorsys", "safetensors", "tokenizers", "transformers")


@dataclass(frozen=True)
class Probed:
    """What the probe printed, all that it said, and the folders that it left files in."""

    found: dict[str, Any]
    said: str
    working: Path
    folders: tuple[Path, ...]


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Probed]:
    """A run in a process of its own, in which nobody has said anything about authentication.

    It is started in a folder that has a target of the job's own, and files that bear the names of
    modules which workers import.
    """
    output = tmp_path_factory.mktemp("run")
    working = tmp_path_factory.mktemp("working")
    for name in ("jobs", "cluster"):
        (working / name).symlink_to(REPOSITORY / name)
    (working / "own_target.py").write_text(OWN_TARGET, encoding="utf-8")
    for name in SHADOWED:
        text = f"open({str(working / 'marker')!r}, 'w').write('it was run')\nraise ImportError"
        (working / f"{name}.py").write_text(text, encoding="utf-8")
    home = tmp_path_factory.mktemp("home")
    # Ray's sockets stand in this folder, and their paths must be short.
    folder = Path(tempfile.mkdtemp(prefix="sc"))
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    environment |= {"RAY_TMPDIR": str(folder), "HOME": str(home), "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("ray_probe.py"), str(output)],
        cwd=working,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    line = done.stdout.strip().splitlines()[-1]
    said = done.stdout.replace(line, "") + done.stderr
    yield Probed(json.loads(line), said, working, (output, home, folder))
    shutil.rmtree(folder)


@pytest.mark.ray
@pytest.mark.slow
class TestARayOfItsOwn:
    def test_runs_the_job(self, probed: Probed) -> None:
        assert probed.found["shards_written"] == 1
        assert probed.found["left_behind"] == []
        rows = read_rows(probed.folders[0]).to_pylist()
        assert {(row["strategy"], row["error_code"]) for row in rows} == {
            ("verifier", None),
            ("custom", None),
        }

    def test_runs_no_file_that_bears_the_name_of_a_module(self, probed: Probed) -> None:
        assert not (probed.working / "marker").exists()

    def test_listens_on_the_loopback_interface_only(self, probed: Probed) -> None:
        sockets = probed.found["sockets"]
        whose = {socket["process"] for socket in sockets}
        assert {"gcs_server", "raylet", "ray::DrafterActor", "ray::VerifierActor"} <= whose
        reachable = [socket for socket in sockets if not is_loopback(socket["address"])]
        assert not reachable

    def test_answers_nobody_without_the_token(self, probed: Probed) -> None:
        answers = probed.found["answers"]
        assert {"gcs_server", "ray::DrafterActor", "ray::VerifierActor"} <= {a[0] for a in answers}
        # Only some sockets of a process take the call; those that do not know it say so.
        known = [answer for answer in answers if answer[1] != "UNIMPLEMENTED"]
        assert {name for name, *_ in known} >= {"gcs_server", "raylet", "ray::DrafterActor"}
        for name, without, with_token in known:
            assert (without, with_token) == ("UNAUTHENTICATED", "OK"), name
        assert probed.found["runtime_environments"] == 401

    def test_keeps_its_token_out_of_files_command_lines_and_messages(self, probed: Probed) -> None:
        token = probed.found["token"]
        assert len(token) == 64
        folders = [*probed.folders, Path(probed.found["session"])]
        files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
        assert any("gcs_server" in path.name for path in files), "the session's logs were not read"
        assert not [path for path in files if token.encode() in path.read_bytes()]
        assert token not in probed.said
        assert not [command for command in probed.found["commands"] if token in command]


def is_loopback(address: str) -> bool:
    found = ipaddress.ip_address(address)
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return (mapped or found).is_loopback


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """What Ray would have been started with: its address and what the environment said then."""
    calls: list[dict[str, str]] = []

    def init(address: str, **_: object) -> None:
        said = {k: v for k, v in os.environ.items() if k.startswith("RAY_AUTH")}
        calls.append({"address": address, **said})

    for name in list(os.environ):
        if name.startswith(("RAY_AUTH", "RAY_ADDRESS")):
            monkeypatch.delenv(name)
    monkeypatch.setattr(connection.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(connection.ray, "init", init)
    monkeypatch.setattr(connection.ray, "shutdown", lambda: None)
    return calls


def test_each_run_has_a_token_of_its_own(started: list[dict[str, str]]) -> None:
    for _ in range(2):
        with connected(None):
            pass
    assert [call["RAY_AUTH_MODE"] for call in started] == ["token", "token"]
    assert started[0]["RAY_AUTH_TOKEN"] != started[1]["RAY_AUTH_TOKEN"]
    assert not [name for name in os.environ if name.startswith("RAY_AUTH")]


@pytest.mark.parametrize(
    "chosen",
    [{"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_TOKEN": "mine"}, {"RAY_AUTH_TOKEN_PATH": "/mine"}],
)
def test_what_the_user_says_about_authentication_stands(
    started: list[dict[str, str]], chosen: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    with connected(None):
        pass
    assert started == [{"address": "local", **chosen}]


def test_a_cluster_is_met_as_the_environment_says(
    started: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    with connected(None):
        pass
    with connected("other:6379"):
        pass
    assert started == [{"address": "head:6379"}, {"address": "other:6379"}]


def test_a_cluster_that_does_not_answer_is_named_with_the_remedy(
    started: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: object) -> None:
        raise ConnectionError("Failed to connect to Ray cluster")

    monkeypatch.setattr(connection.ray, "init", refuse)
    with pytest.raises(JobError, match=r"^RAY_ADDRESS is 'head:6379'.*RAY_AUTH_TOKEN"):
        connected("head:6379").__enter__()
