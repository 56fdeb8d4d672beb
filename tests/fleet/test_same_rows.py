"""The rows of a job do not depend on where and in what company they were decoded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pipeline.config import Job
from pipeline.results.schema import determined_columns
from pipeline.results.writer import read_rows
from pipeline.run import prepare, run

ALL_STRATEGIES = (
    "strategies=[drafter, verifier, spec_decode, "
    "{use: token_cascade.chow, alpha: [0.1, 0.4]}, {use: lossy_spec_decode, alpha: [0.3]}, "
    "{use: spec_cascade.chow, alpha: [0.2]}, {use: spec_cascade.diff, alpha: [-0.1, 0.1]}, "
    "{use: spec_cascade.opt, alpha: [0.2, 0.6]}, {use: spec_cascade.token_v3, alpha: [0.3, 0.9]}]"
)


class Silent:
    """A watcher that says nothing."""

    def started(self, rows_done: int, rows_total: int | None) -> None: ...

    def ready(self) -> None: ...

    def progressed(self, rows_done: int, workers: object) -> None: ...


def rows_of(job: Job, sort: bool = False) -> pa.Table:
    """Run a job; its determined columns, without the shard where shards may differ."""
    run(prepare(job), Silent())
    table = read_rows(Path(job.output))
    columns = [name for name in determined_columns(table.schema) if name not in {"shard", "job"}]
    table = table.select(columns)
    return table.sort_by([("example_id", "ascending")]) if sort else table


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_banks_slots_and_workers_do_not_matter(
    g2p_job: Any, cluster_file: Any, tmp_path: Path, temperature: float
) -> None:
    fleets = [
        cluster_file("{banks: 3, slots: 32}"),
        cluster_file("{banks: 1, slots: 1}"),
        cluster_file("{banks: 2, slots: 5, replicas: 2}", "{replicas: 3}"),
    ]
    tables = [
        rows_of(
            g2p_job(
                ALL_STRATEGIES,
                f"cluster={cluster}",
                f"output={tmp_path / str(index)}",
                f"decoding.temperature={temperature}",
                f"dataset.shard_size={[64, 5, 7][index]}",
            )
        )
        for index, cluster in enumerate(fleets)
    ]
    assert tables[0].num_rows == 24 * 13
    for table in tables[1:]:
        assert table.equals(tables[0])


def test_a_strategy_alone_has_the_row_it_has_in_company(g2p_job: Any, tmp_path: Path) -> None:
    together = rows_of(g2p_job(ALL_STRATEGIES, "dataset.limit=12"))
    lines = (
        "drafter",
        "verifier",
        "spec_decode",
        "{use: token_cascade.chow, alpha: 0.4}",
        "{use: spec_cascade.opt, alpha: 0.6}",
        "{use: spec_cascade.token_v3, alpha: 0.9}",
    )
    for index, line in enumerate(lines):
        alone = rows_of(
            g2p_job(f"strategies=[{line}]", "dataset.limit=12", f"output={tmp_path / str(index)}")
        )
        strategy, alpha = alone["strategy"][0].as_py(), alone["alpha"][0].as_py()
        same = [
            row
            for row in together.to_pylist()
            if row["strategy"] == strategy and row["alpha"] == alpha
        ]
        assert alone.to_pylist() == same


@pytest.mark.ray
@pytest.mark.parametrize(("drafters", "verifiers"), [(1, 1), (2, 2), (1, 2)])
def test_ray_actors_give_the_rows_of_one_process(
    g2p_job: Any,
    cluster_file: Any,
    tmp_path: Path,
    ray_cluster: None,
    drafters: int,
    verifiers: int,
) -> None:
    cluster = cluster_file(f"{{replicas: {drafters}, slots: 8}}", f"{{replicas: {verifiers}}}")
    local = rows_of(g2p_job(ALL_STRATEGIES))
    on_ray = rows_of(
        g2p_job(
            ALL_STRATEGIES,
            "fleet=ray",
            f"cluster={cluster}",
            "dataset.shard_size=6",
            f"output={tmp_path / 'ray'}",
        )
    )
    assert on_ray.equals(local)
