"""The image of a cluster's nodes: the Ray of this environment, files that are there, no root, no secret.

Planted faults these tests catch: another Ray; a folder that was renamed; a package that is installed but
not copied; a last user that is root; a token, or an index of packages, baked in.
"""

from __future__ import annotations

import re

import ray

from tests.cluster import CLUSTER, REPOSITORY

LINES = (CLUSTER / "Dockerfile").read_text(encoding="utf-8").splitlines()
STEPS = [tuple(line.split(maxsplit=1)) for line in LINES if line and not line.startswith("#")]


def said(instruction: str) -> list[str]:
    return [rest for word, rest in STEPS if word == instruction]


def copied() -> set[str]:
    return {
        word
        for rest in said("COPY")
        for word in rest.split()[:-1]
        if not word.startswith("--chown=")
    }


def test_it_has_the_ray_of_this_environment() -> None:
    assert said("FROM") == [f"rayproject/ray:{ray.__version__}-py311-gpu"]


def test_what_is_copied_is_there_and_enough_to_install() -> None:
    assert all((REPOSITORY / name).exists() for name in copied())
    project = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    packages = set(re.findall(r'"(\w+)\*"', project))
    assert packages == {"pipeline", "jobs"}
    assert {*packages, "pyproject.toml", "README.md"} <= copied()
    assert 'pip install --no-cache-dir ".[gpu]"' in said("RUN")


def test_the_steps_are_known_and_the_user_is_not_root() -> None:
    assert {word for word, _ in STEPS} == {"FROM", "WORKDIR", "COPY", "RUN", "USER"}
    assert said("USER")[-1] == "1000"
    assert STEPS[-1][0] == "USER"


def test_nothing_is_baked_in_that_should_not_be() -> None:
    text = "\n".join(LINES).lower()
    for word in ("token", "password", "index-url", "http://", "https://", "arg ", "env "):
        assert word not in text
