"""What the page about clusters says is there.

Planted faults these tests catch: a file that nobody speaks of; a link or a file in a command that does not
exist; a command of ours, or of Ray's, that does not exist; a metric that Ray does not have; a config in
the page with a key that is none; another Ray than the files have.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import ray
import ray.scripts.scripts
import yaml
from ray.dashboard.modules.metrics.dashboards import default_dashboard_panels

from jobs.cli import app
from pipeline.config import ClusterConfig
from tests.cluster import CLUSTER, REPOSITORY

README = (CLUSTER / "README.md").read_text(encoding="utf-8")
COMMANDS = "\n".join(re.findall(r"```bash\n(.*?)```", README, re.DOTALL))


def test_every_file_is_spoken_of() -> None:
    files = [path for path in CLUSTER.rglob("*") if path.is_file() and path.name != "README.md"]
    missing = [str(path) for path in files if path.name not in README]
    assert not missing


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert links
    assert [link for link in links if not (CLUSTER / link).exists()] == []


def test_files_in_commands_are_there() -> None:
    named = set(re.findall(r"\b(?:cluster|jobs)/[\w./-]+", COMMANDS))
    assert named
    assert [name for name in named if not (REPOSITORY / name).exists()] == []


def test_our_commands_exist() -> None:
    ours = {command.callback.__name__ for command in app.registered_commands if command.callback}
    used = set(re.findall(r"\bspeccascade ([a-z]+) ", README))
    assert used
    assert used <= ours


def test_rays_commands_exist() -> None:
    used = set(re.findall(r"\bray ([a-z][a-z-]+) ", COMMANDS))
    assert {"up", "down", "job", "dashboard"} <= used
    there = set(ray.scripts.scripts.cli.commands)
    assert {command.replace("-", "_") for command in used} <= {c.replace("-", "_") for c in there}


def test_metrics_exist() -> None:
    panels = Path(default_dashboard_panels.__file__).read_text(encoding="utf-8")
    named = set(re.findall(r"`(ray_\w+)`", README))
    assert len(named) > 5
    assert [name for name in named if f"{name}{{" not in panels] == []


def test_no_metric_of_ours_is_kept_quiet() -> None:
    sources = [path.read_text(encoding="utf-8") for path in (REPOSITORY / "pipeline").rglob("*.py")]
    assert not any("ray.util.metrics" in source for source in sources), "say so in the page"


@pytest.mark.parametrize("text", re.findall(r"```yaml\n(.*?)```", README, re.DOTALL))
def test_the_config_in_the_page_is_one(text: str) -> None:
    tree = yaml.safe_load(text)
    config = ClusterConfig.model_validate(tree)
    # It shows every key but two, which have their own words.
    assert {*ClusterConfig.model_fields} - {*tree} == {"links", "failure"}
    assert {*type(config.drafter).model_fields} == {*tree["drafter"]}


def test_it_names_the_ray_of_this_environment() -> None:
    assert f"Ray {ray.__version__}, " in README
