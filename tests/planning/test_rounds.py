"""What is known of rounds: from workers' accounts, from the folder of an earlier run, measured here."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.compute as pc
import pytest

from pipeline.config import Job, load_job
from pipeline.planning.balance import Steps
from pipeline.planning.plan import Options, Plan, make_plan
from pipeline.planning.rounds import earlier_run, measured, rounds_of, texts_of
from pipeline.records import WorkerStats
from pipeline.results.writer import read_rows
from pipeline.run import prepare, run
from tests.fleet.test_same_rows import Silent

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _in_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)


def small_job(folder: Path, *overrides: str) -> Job:
    fixed = [f"output={folder / 'run'}", "fleet=local", "dataset.limit=24"]
    return load_job("jobs/g2p.yaml", [*fixed, *overrides])


def throughput_of(plan: Plan) -> tuple[str, Steps, float]:
    assert plan.details is not None
    assert plan.details.throughput is not None
    rounds = plan.details.throughput.rounds
    return rounds.source, rounds.steps, rounds.lanes


WORKERS = [
    WorkerStats("drafter-0", rounds=30, lane_rounds=300, pair_rounds=600, outcomes=60,
                busy_seconds=3.0, transfer_seconds=0.9, bytes_sent=3000),
    WorkerStats("drafter-1", rounds=10, lane_rounds=100, pair_rounds=200, outcomes=20,
                busy_seconds=1.0, transfer_seconds=0.3, bytes_sent=1000),
    WorkerStats("verifier-0", rounds=40, lane_rounds=400, busy_seconds=8.0),
]  # fmt: skip


def test_rounds_are_means_over_all_workers() -> None:
    found = rounds_of(WORKERS, draft_length=4, source="here")
    assert found is not None
    assert found.steps == Steps(pytest.approx(4.0 / 40 / 4), 0.2, pytest.approx(0.03))
    assert (found.lanes, found.sharing, found.rounds_per_text) == (10, 2, 10)
    assert (found.count, found.sent) == (40, 100)


def test_in_one_process_waiting_is_no_transfer() -> None:
    found = rounds_of(WORKERS, draft_length=4, source="here", is_local=True)
    assert found is not None
    assert found.steps.transfer == 0


def test_workers_that_did_nothing_tell_nothing() -> None:
    assert rounds_of([WorkerStats("drafter-0"), WorkerStats("verifier-0")], 4, "here") is None


def test_an_earlier_run_of_the_job_is_found_in_its_folder(tmp_path: Path) -> None:
    job = small_job(tmp_path)
    prepared = prepare(job)
    assert (earlier_run(prepared), texts_of(prepared.output)) == (None, None)
    finished = run(prepared, Silent())
    drafter, verifier = finished.workers
    found = earlier_run(prepared)
    assert found is not None
    assert found.steps.drafter * 5 * drafter.rounds == pytest.approx(drafter.busy_seconds)
    assert found.steps.verifier * drafter.rounds == pytest.approx(verifier.busy_seconds)
    assert found.rounds_per_text == drafter.pair_rounds / (24 * 10)

    rows = read_rows(prepared.output, ["strategy", "accepted", "rejected", "output_tokens"])
    judged = rows.filter(pc.starts_with(rows["strategy"], "spec"))
    accepted, rejected = (pc.sum(judged[name]).as_py() for name in ("accepted", "rejected"))
    texts = texts_of(prepared.output)
    assert texts is not None
    assert texts.acceptance == pytest.approx(accepted / (accepted + rejected))
    assert texts.tokens == pytest.approx(pc.mean(rows["output_tokens"]).as_py())

    plan = make_plan(job, Options())
    assert throughput_of(plan)[:2] == (f"the run in {prepared.output}", found.steps)
    assert plan.details is not None
    assert plan.details.cost.is_found
    assert plan.details.throughput is not None
    # Whatever a text needs, the same run takes as many rounds as it took.
    assert plan.details.throughput.forecast.rounds == drafter.rounds

    other = make_plan(small_job(tmp_path, "decoding.seed=7"), Options())
    assert [p.sentence for p in other.problems if "different run" in p.sentence]


def test_rows_of_an_unfinished_run_do_not_stand_in_for_its_workers(tmp_path: Path) -> None:
    job = small_job(tmp_path)
    prepared = prepare(job)
    run(prepared, Silent())
    (prepared.output / "workers.json").write_text(json.dumps({"workers": []}), encoding="utf-8")
    assert earlier_run(prepared) is None


def test_options_go_before_the_job_and_both_before_a_run(tmp_path: Path) -> None:
    given = small_job(tmp_path, "step_seconds={drafter: 0.25, verifier: 0.5}")
    assert throughput_of(make_plan(given, Options()))[:2] == (
        "step_seconds of the job, which are of one lane",
        Steps(0.25, 0.5),
    )
    options = Options(steps=Steps(0.1, 0.2))
    assert throughput_of(make_plan(given, options)) == ("the options", Steps(0.1, 0.2), 32)
    run(prepare(small_job(tmp_path)), Silent())
    lanes = throughput_of(make_plan(small_job(tmp_path), options))[2]
    assert lanes != 32


def test_measuring_decodes_some_examples(tmp_path: Path) -> None:
    job = small_job(tmp_path)
    found = measured(prepare(job))
    assert found is not None
    assert found.steps.drafter > 0
    assert found.steps.verifier > found.steps.drafter
    assert throughput_of(make_plan(job, Options(measure=True)))[0] == "measured here"
    assert not (tmp_path / "run").exists()


def test_a_job_of_one_model_has_no_verifier_time(tmp_path: Path) -> None:
    job = small_job(tmp_path, "strategies=[drafter]")
    run(prepare(job), Silent())
    found = earlier_run(prepare(job))
    assert found is not None
    assert (found.steps.verifier, found.sent) == (0, 0)
    plan = make_plan(job, Options())
    assert plan.details is not None
    assert plan.details.throughput is not None
    assert plan.details.throughput.forecast.verifier_share == 0
    assert plan.details.throughput.advice is None
    assert plan.details.cost.block_bytes == 0
    verifier = next(group for group in plan.details.groups if group.role == "verifier")
    assert verifier.memory.caches == 0


@pytest.mark.parametrize("model", ["drafter", "verifier"])
def test_steps_of_two_models_do_not_tell_how_fast_one_is_alone(model: str, tmp_path: Path) -> None:
    job = small_job(
        tmp_path, f"strategies=[{model}]", "step_seconds={drafter: 0.25, verifier: 0.5}"
    )
    plan = make_plan(job, Options(steps=Steps(0.1, 0.2)))
    assert plan.details is not None
    assert plan.details.throughput is None
    has_caches = {group.role: group.memory.caches > 0 for group in plan.details.groups}
    assert has_caches == {role: role == model for role in ("drafter", "verifier")}
