"""What crosses the wire may be smaller; the rows stay the same wherever the transport is exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.config import JobError
from pipeline.run import prepare, run
from tests.fleet.test_same_rows import Silent, rows_of

LINES = (
    "drafter, verifier, spec_decode, {use: token_cascade.entropy, alpha: 0.8}, "
    "{use: oracle_cascade.diff_log, alpha: 0.1}, {use: lossy_spec_decode, alpha: 0.4, beta: tuned}, "
    "{use: bild_star, alpha: 1}, {use: spec_cascade.opt, alpha: [0.1, 0.5]}, "
    "{use: spec_cascade.opt_log, alpha: 0.4}, {use: spec_cascade.token_v2, alpha: 0.3}, "
    "{use: spec_cascade.token_v3, alpha: 0.7}, {use: sequence_cascade.chow, alpha: 0.6}"
)
ALL_BUT_V1 = f"strategies=[{LINES}]"


@pytest.mark.parametrize(
    ("transport", "sampling"),
    [
        ("tokens", ["decoding.temperature=0"]),
        ("top_k", ["decoding.temperature=0.8", "decoding.top_k=7"]),
        ("top_k", ["decoding.drafter={top_k: 3}", "decoding.top_p=0.9"]),
    ],
)
def test_exact_transports_give_the_same_rows(
    g2p_job: Any, tmp_path: Path, transport: str, sampling: list[str]
) -> None:
    tables = {}
    for name in ("float32", transport, "auto"):
        job = g2p_job(ALL_BUT_V1, *sampling, f"transport={name}", f"output={tmp_path / name}")
        tables[name] = rows_of(job)
    assert tables[transport].equals(tables["float32"])
    assert tables["auto"].equals(tables["float32"])


def test_a_smaller_transport_moves_fewer_bytes(g2p_job: Any, tmp_path: Path) -> None:
    sizes = {}
    for name in ("float32", "bfloat16", "top_k"):
        job = g2p_job(
            ALL_BUT_V1, "decoding.top_k=5", f"transport={name}", f"output={tmp_path / name}"
        )
        finished = run(prepare(job), Silent())
        sizes[name] = sum(worker.bytes_sent for worker in finished.workers)
    assert sizes["bfloat16"] < 0.6 * sizes["float32"]
    assert sizes["top_k"] < 0.4 * sizes["float32"]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["transport=tokens"], "temperature above 0"),
        (["transport=top_k"], "not sampled with top_k"),
        (["transport=tokens", "decoding.temperature=0", "trace=true"], "a trace or a rule"),
        (
            [
                "transport=top_k",
                "decoding.top_k=4",
                "strategies=[{use: spec_cascade.token_v1, alpha: 0.1}]",
            ],
            "a trace or a rule",
        ),
    ],
)
def test_a_transport_that_is_not_exact_is_refused(
    g2p_job: Any, overrides: list[str], said: str
) -> None:
    with pytest.raises(JobError, match=said):
        prepare(g2p_job(*overrides))


@pytest.mark.parametrize(
    ("overrides", "chosen"),
    [
        (["decoding.temperature=0"], "tokens"),
        (["decoding.temperature=[0,1]"], "float32"),
        (["decoding.top_k=8"], "top_k"),
        (["decoding.top_k=90"], "float32"),
        (["decoding.temperature=0", "trace=true"], "float32"),
        (
            ["decoding.temperature=0", "strategies=[{use: spec_cascade.token_v1, alpha: 0.1}]"],
            "float32",
        ),
    ],
)
def test_auto_takes_the_smallest_that_is_exact(
    g2p_job: Any, overrides: list[str], chosen: str
) -> None:
    assert prepare(g2p_job(*overrides)).transport == chosen
