"""`speccascade plan` as a user meets it: what it prints and its exit status."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
SPECCASCADE = Path(sys.executable).with_name("speccascade")


def plan(*arguments: str, status: int) -> str:
    done = subprocess.run(
        [str(SPECCASCADE), "plan", *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "COLUMNS": "140"},
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


def test_a_good_job_ends_with_status_zero_and_a_prediction(tmp_path: Path) -> None:
    said = plan(
        "jobs/demo.yaml",
        f"--set=output={tmp_path / 'run'}",
        "--cluster=cluster/eight-gpus.yaml",
        "--drafter-seconds=0.004",
        "--verifier-seconds=0.03",
        "--acceptance=0.7",
        status=0,
    )
    for words in (
        "400 examples, 30 strategies",
        "4 drafters",
        "70% of drafted tokens accepted",
        "from the options: drafter 4 ms a token, verifier 30 ms a block",
        "Bottleneck: the verifiers are it",
        "No problem was found.",
    ):
        assert words in said
    assert not (tmp_path / "run").exists()


def test_problems_end_with_status_two_and_are_all_there() -> None:
    said = plan("jobs/g2p.yaml", "--set=dataset.id=nme", "--set=dataset.prompt='{wrod}'", status=2)
    assert said.count("problem:") == 2


def test_a_file_that_is_no_job_and_half_of_two_options_end_in_a_sentence() -> None:
    assert "there is no such file" in plan("jobs/none.yaml", status=2)
    assert "give both" in plan("jobs/g2p.yaml", "--drafter-seconds=1", status=2)


def test_help_shows_examples() -> None:
    said = plan("--help", status=0)
    for words in ("--cluster", "--acceptance", "Example:", "speccascade plan jobs/demo.yaml"):
        assert words in said
