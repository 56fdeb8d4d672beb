"""What stands in `cluster/`."""

from __future__ import annotations

from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
CLUSTER = REPOSITORY / "cluster"

PLACEMENT_CONFIGS = sorted(path.stem for path in CLUSTER.glob("*.yaml"))
