"""Several settings in one job, the bonus token, stop strings, and contexts that end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.config import JobError
from pipeline.models.stopping import StopStrings
from pipeline.results.writer import read_rows
from pipeline.run import prepare, run
from tests.fleet.test_same_rows import Silent, rows_of

SOME = (
    "strategies=[drafter, verifier, spec_decode, {use: token_cascade.chow, alpha: 0.3}, "
    "{use: oracle_cascade.diff, alpha: 0.1}, {use: lossy_spec_decode, alpha: 0.4, beta: tuned}, "
    "{use: bild_star, alpha: 1}, {use: spec_cascade.opt, alpha: 0.3}, "
    "{use: spec_cascade.token_v1, alpha: 0.3}, {use: sequence_cascade.chow, alpha: 0.6}]"
)


def test_settings_together_have_the_rows_they_have_in_jobs_of_their_own(
    g2p_job: Any, tmp_path: Path
) -> None:
    together = rows_of(
        g2p_job(
            SOME,
            "decoding.block_size=[2,5]",
            "decoding.temperature=[0,0.7]",
            "decoding.top_p=0.9",
            "decoding.repeats=2",
            "dataset.limit=8",
        )
    ).to_pylist()
    assert len(together) == 8 * 2 * 2 * 2 * 10
    for block_size, temperature in ((2, 0.7), (5, 0.0)):
        alone = rows_of(
            g2p_job(
                SOME,
                f"decoding.block_size={block_size}",
                "decoding.top_p=0.9",
                f"decoding.temperature={temperature}",
                "decoding.repeats=2",
                "dataset.limit=8",
                f"output={tmp_path / str(block_size)}",
            )
        ).to_pylist()
        same = [
            row
            for row in together
            if (row["block_size"], row["temperature"]) == (block_size, temperature)
        ]
        assert alone == same


@pytest.mark.parametrize("bonus", ["target", "verifier"])
def test_a_judged_bonus_makes_the_text_independent_of_the_block_size(
    g2p_job: Any, bonus: str
) -> None:
    rows = rows_of(
        g2p_job(
            SOME, "decoding.block_size=[1,2,3,5,8]", f"decoding.bonus={bonus}", "dataset.limit=24"
        )
    ).to_pylist()
    texts: dict[tuple[Any, ...], set[tuple[int, ...]]] = {}
    for row in rows:
        key = (row["example_id"], row["strategy"], row["alpha"])
        texts.setdefault(key, set()).add(tuple(row["output_ids"]))
    differing = {key[1] for key, found in texts.items() if len(found) > 1}
    if bonus == "target":
        assert differing == set()
    else:
        # Algorithm 4's bonus token comes from the verifier: cascades then depend on the block size,
        # and so do the draws of plain speculative decoding, though not its law.
        assert "spec_cascade.opt" in differing
        assert not differing & {"drafter", "verifier", "token_cascade.chow", "oracle_cascade.diff"}


def test_the_drafter_may_sample_otherwise_than_the_verifier(g2p_job: Any) -> None:
    job = g2p_job(SOME, "decoding.drafter={temperature: 1.5, top_k: 20}", "dataset.limit=8")
    rows = rows_of(job).to_pylist()
    assert {row["drafter_temperature"] for row in rows} == {1.5}
    plain = rows_of(g2p_job(SOME, "dataset.limit=8", f"output={job.output}-plain")).to_pylist()
    for row, other in zip(rows, plain, strict=True):
        if row["strategy"] == "verifier":
            assert row["output_ids"] == other["output_ids"]
    assert any(
        row["output_ids"] != other["output_ids"]
        for row, other in zip(rows, plain, strict=True)
        if row["strategy"] == "drafter"
    )


def test_a_stop_string_ends_the_text_at_the_token_that_completes_it(
    g2p_job: Any, tmp_path: Path
) -> None:
    free = rows_of(g2p_job(SOME, "decoding.temperature=0", "decoding.block_size=[1,3,8]"))
    # Two phonemes are two tokens, so the string is split over tokens.
    stop = " ".join(free["prediction"][0].as_py().split()[1:3])
    job = g2p_job(
        SOME,
        "decoding.temperature=0",
        "decoding.block_size=[1,3,8]",
        f"decoding.stop=['{stop}']",
        f"output={tmp_path / 'stopped'}",
    )
    stopped = rows_of(job)
    tokenizer = prepare(job).pairing.tokenizer
    ends = StopStrings(tokenizer, [stop])
    hit = 0
    for before, after in zip(free.to_pylist(), stopped.to_pylist(), strict=True):
        if stop not in before["prediction"]:
            assert after["output_ids"] == before["output_ids"]
            continue
        if after["strategy"] == "sequence_cascade.chow":
            continue  # its deferral looks at the text so far, which is another
        hit += 1
        kept = after["output_ids"]
        assert kept == before["output_ids"][: len(kept)]
        assert ends(kept)
        assert not ends(kept[:-1])
        assert after["finish_reason"] == "stop"
        assert stop not in after["prediction"]
    assert hit > 10


def test_bild_is_greedy(g2p_job: Any) -> None:
    line = "strategies=[verifier, drafter, {use: bild, fallback: [0.0, 0.6, 1.0], rollback: [0.0, 3.0]}]"
    with pytest.raises(JobError, match="bild is greedy"):
        prepare(g2p_job(line))
    rows = rows_of(g2p_job(line, "decoding.temperature=0")).to_pylist()
    texts = {
        (row["example_id"], row["strategy"], row["fallback"], row["rollback"]): row for row in rows
    }
    for (example, use, fallback, rollback), row in texts.items():
        if use == "bild" and (fallback == 1.0 or rollback == 0.0):
            assert row["output_ids"] == texts[example, "verifier", None, None]["output_ids"]
        if use == "bild" and fallback == 1.0:
            assert row["drafted"] == 0
            assert row["verifier_calls"] == row["output_tokens"] == row["drafter_calls"]
        if use == "bild":
            assert row["accepted"] + row["rejected"] + row["bonus_tokens"] == row["output_tokens"]


def test_a_trace_says_who_wrote_each_token(g2p_job: Any) -> None:
    job = g2p_job(SOME, "trace=true", "dataset.limit=12")
    run(prepare(job), Silent())
    for row in read_rows(Path(job.output)).to_pylist():
        trace = row["trace"]
        assert len(trace) == row["output_tokens"]
        sources = [token["source"] for token in trace]
        assert sum(token["accepted"] for token in trace) == sources.count("draft")
        if row["strategy"] in {"verifier", "drafter"}:
            assert set(sources) == {"draft" if row["strategy"] == "drafter" else "verifier"}
        if row["strategy"] in {"token_cascade.chow", "oracle_cascade.diff"}:
            assert sources.count("verifier") == row["deferred"]
        if row["rounds"]:
            assert sources.count("draft") == row["accepted"]
            assert sources.count("residual") == row["rejected"]
            assert sources.count("bonus") == row["bonus_tokens"]
        for token in trace:
            if token["verifier_confidence"] is not None:
                assert 0 <= token["verifier_confidence"] <= token["verifier_max"] <= 1
            assert (
                token["source"] == "bonus"
                or token["drafter_confidence"] is not None
                or (row["strategy"] in {"verifier", "sequence_cascade.chow"})
            )


def test_a_custom_target_is_found_in_the_working_directory(
    g2p_job: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    job = g2p_job(
        "strategies=[spec_decode, {use: custom, target: 'own_target:verifier'}]",
        "allow_custom_code=true",
        "decoding.temperature=1",
    )
    repository = Path.cwd()
    for name in ("jobs", "cluster"):
        (tmp_path / name).symlink_to(repository / name)
    (tmp_path / "own_target.py").write_text(
        "def verifier(drafter_probs, verifier_probs, alpha):\n    return verifier_probs\n",
        encoding="utf-8",
    )
    monkeypatch.chdir(tmp_path)
    rows = rows_of(job).to_pylist()
    texts = {(row["example_id"], row["strategy"]): row["output_ids"] for row in rows}
    for (example, strategy), text in texts.items():
        if strategy == "custom":
            assert text == texts[example, "spec_decode"]


def test_a_custom_target_that_is_no_distribution_ends_the_text_with_an_error(
    g2p_job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "tests.fleet.test_settings.half",
        lambda drafter_probs, verifier_probs, alpha: verifier_probs / 2,
    )
    rows = rows_of(
        g2p_job(
            "strategies=[verifier, {use: custom, target: 'tests.fleet.test_settings:half'}]",
            "allow_custom_code=true",
        )
    ).to_pylist()
    for row in rows:
        failed = row["strategy"] == "custom"
        assert (row["error_code"] == "target_invalid") == failed
        assert (row["prediction"] is None) == failed


def half(drafter_probs: Any, verifier_probs: Any, alpha: Any) -> Any:
    """A custom target that loses half of the mass."""
    return verifier_probs / 2
