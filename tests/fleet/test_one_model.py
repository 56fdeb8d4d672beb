"""Jobs whose strategies need one model: the rows are those of jobs that need both.

Planted faults these tests catch: a verifier that writes behind a stop string inside its block; stop
strings looked for in the new tokens alone; a trace without the other model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import Job, parse_job
from pipeline.results.writer import read_rows
from pipeline.run import prepare, run
from tests.fleet.test_decoder_only import pair
from tests.fleet.test_same_rows import Silent, rows_of
from tests.models.test_slots import bitwise

TOGETHER = (
    "drafter, verifier, spec_decode, {use: token_cascade.chow, alpha: 0.4}, "
    "{use: spec_cascade.opt, alpha: 0.3}, {use: sequence_cascade.chow, alpha: 0.5}"
)
LINES = {
    "drafter": "drafter",
    "verifier": "verifier",
    "both": "drafter, verifier",
    "sequence": "{use: sequence_cascade.chow, alpha: 0.5}",
}
SETTINGS = (
    "decoding.temperature=[0,1]",
    "decoding.block_size=[1,4]",
    "decoding.repeats=2",
    "dataset.limit=8",
)


def rows(job: Job) -> dict[str, list[dict[str, Any]]]:
    """By strategy."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows_of(job).to_pylist():
        found.setdefault(row["strategy"], []).append(row)
    return found


@bitwise
@pytest.mark.parametrize("stopped", [False, True], ids=["free", "stopped"])
def test_rows_of_one_model_are_those_in_company(
    g2p_job: Any, tmp_path: Path, stopped: bool
) -> None:
    overrides = [*SETTINGS]
    if stopped:
        # Two phonemes are two tokens, so the string is split over tokens, and over blocks.
        first = rows_of(g2p_job(*SETTINGS, f"output={tmp_path / 'free'}"))["prediction"]
        stops = [" ".join(text.as_py().split()[1:3]) for text in first[:2]]
        overrides.append(f"decoding.stop={json.dumps(stops)}")
    company = rows(g2p_job(f"strategies=[{TOGETHER}]", *overrides))
    ends = {row["finish_reason"] for row in company["verifier"]}
    assert ends == {"stop"}
    for name, lines in LINES.items():
        job = g2p_job(f"strategies=[{lines}]", *overrides, f"output={tmp_path / name}")
        for strategy, alone in rows(job).items():
            assert len(alone) == 8 * 2 * 2 * 2
            assert alone == company[strategy], (name, strategy)


def causal_job(folder: Path, lines: list[Any], name: str, **decoding: Any) -> Job:
    """The job of a tiny decoder-only pair; see `test_decoder_only`."""
    texts = ["w1", "w2 w3 w4", " ".join(f"w{i}" for i in range(20)), "w9 w8"]
    data = folder / "data.jsonl"
    data.write_text("\n".join(json.dumps({"text": text}) for text in texts), encoding="utf-8")
    return parse_job(
        {
            "name": "causal",
            "output": str(folder / name),
            "dataset": {"path": "json", "data_files": str(data), "prompt": "{text}"},
            "models": pair(folder, "llama"),
            "decoding": {"max_new_tokens": 13, "temperature": [0, 1], **decoding},
            "strategies": lines,
            "fleet": "local",
        }
    )


@bitwise
@pytest.mark.parametrize("stop", [[], ["w7"], [" w4 w", "w55"]], ids=str)
def test_rows_of_one_decoder_only_model_are_those_in_company(
    tmp_path: Path, stop: list[str]
) -> None:
    lines = [
        "verifier",
        "drafter",
        "spec_decode",
        {"use": "token_cascade.entropy", "alpha": 0.7},
        {"use": "spec_cascade.token_v1", "alpha": 0.2},
    ]
    given = {"block_size": [1, 3, 8], "repeats": 2, "stop": stop}
    company = rows(causal_job(tmp_path, lines, "together", **given))
    for strategy in ("verifier", "drafter"):
        alone = rows(causal_job(tmp_path, [strategy], strategy, **given))
        assert alone == {strategy: company[strategy]}
        assert len(alone[strategy]) == 4 * 2 * 2 * 3


@bitwise
def test_a_trace_tells_of_both_models_whichever_wrote(g2p_job: Any, tmp_path: Path) -> None:
    traced = ("trace=true", "dataset.limit=6")
    company = rows(g2p_job(f"strategies=[{TOGETHER}]", *traced))
    for strategy in ("drafter", "verifier"):
        job = g2p_job(f"strategies=[{strategy}]", *traced, f"output={tmp_path / strategy}")
        assert rows(job) == {strategy: company[strategy]}
        run(prepare(job), Silent())
        for row in read_rows(Path(job.output)).to_pylist():
            other = "verifier" if strategy == "drafter" else "drafter"
            assert any(token[f"{other}_confidence"] is not None for token in row["trace"])
