"""A few runs of the random failures of `tests.fleet.chaos`; many are run by hand."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.fleet.conftest import REPOSITORY


@pytest.mark.ray
@pytest.mark.endurance
def test_rows_survive_what_is_done_to_a_run() -> None:
    given = ["--runs", "3", "--seed", "16", "--examples", "160"]
    # A process of its own: it looks at all processes below it, and this one may have a Ray.
    done = subprocess.run(
        [sys.executable, "-m", "tests.fleet.chaos", *given],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 of 3 passed" in done.stdout
