"""The numeric environment of all tests: one thread, and linear algebra that ignores the batch."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import pytest
import torch

from pipeline.protocol.custom_code import import_from

torch.set_num_threads(1)
import_from(str(Path(__file__).parents[1]))  # where the tests' own targets are


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where tests run in several processes, one of them has all that need the cluster."""
    for item in items:
        if item.get_closest_marker("ray"):
            item.add_marker(pytest.mark.xdist_group("ray"))
