"""Bytes of a round against what real local runs have sent."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config import load_job
from pipeline.planning.plan import Options, make_plan
from pipeline.planning.rounds import earlier_run
from pipeline.planning.traffic import Round, request_bytes
from pipeline.run import prepare, run
from tests.fleet.test_same_rows import Silent

REPOSITORY = Path(__file__).parents[2]
SAMPLINGS = {
    "float32": [],
    "bfloat16": ["transport=bfloat16"],
    "top_k": ["decoding.top_k=8"],
    "tokens": ["decoding.temperature=0"],
}


@pytest.mark.parametrize("transport", SAMPLINGS)
@pytest.mark.parametrize("bonus", ["verifier", "target"])
def test_a_round_sends_as_much_as_a_real_one(
    transport: str, bonus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text("drafter: {banks: 1, slots: 8}", encoding="utf-8")
    job = load_job(
        "jobs/g2p.yaml",
        [
            "fleet=local",
            "strategies=[spec_decode]",
            "metrics=[]",
            "dataset.limit=120",
            f"decoding.bonus={bonus}",
            f"cluster={cluster}",
            f"output={tmp_path / 'run'}",
            *SAMPLINGS[transport],
        ],
    )
    plan = make_plan(job, Options())
    assert plan.details is not None
    prepared = prepare(job)
    assert prepared.transport == transport
    run(prepared, Silent())
    found = earlier_run(prepared)
    assert found is not None
    assert plan.details.cost.block_bytes == pytest.approx(found.sent, rel=0.1)


def test_each_transport_has_its_formula() -> None:
    block = Round(lanes=32, columns=5, pairs=70, vocabulary=1000, top_k=50)
    beside = 32 * (5 + 6) * 8 + 2 * 32 + 16 * 70
    drafts = {
        "float32": 32 * 5 * 1000 * 4,
        "bfloat16": 32 * 5 * 1000 * 2,
        "top_k": 32 * 5 * (50 * 8 + 12),
        "tokens": 32 * 5 * 12,
    }
    assert request_bytes("float32", block) == beside + drafts["float32"]
    assert request_bytes("bfloat16", block) == beside + drafts["bfloat16"]
    assert request_bytes("top_k", block) == beside + drafts["top_k"]
    assert request_bytes("tokens", block) == beside + drafts["tokens"]
