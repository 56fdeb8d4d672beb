"""What workers say they did: physical counts in `workers.json`, and the timeline.

Planted faults these tests catch: texts counted as lanes, or lanes as texts; a drafter's turn without
work counted as a round; spans of one model that overlap; a block's flight on the model's row, or on
that of another bank; work that is remembered twice, or that waited; times of one worker on another's
clock; rows without a name.
"""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import Job
from pipeline.results.timeline import write_timeline
from pipeline.results.writer import read_rows
from pipeline.run import prepare, run
from tests.end_to_end.test_command_line import speccascade
from tests.fleet.test_same_rows import ALL_STRATEGIES, Silent

SPECULATIVE = (
    "strategies=[spec_decode, {use: spec_cascade.chow, alpha: [0.1, 0.2, 0.4]}, "
    "{use: spec_cascade.opt, alpha: [0.2, 0.6]}]"
)
GIVEN_TIMES = "step_seconds={drafter: 0.001, verifier: 0.002}"
Workers = dict[str, dict[str, Any]]


def workers_of(job: Job, timeline: Path | None = None) -> Workers:
    """Run a job; what `workers.json` says of each worker."""
    run(prepare(job), Silent(), timeline)
    said = json.loads((Path(job.output) / "workers.json").read_text(encoding="utf-8"))
    return {worker["name"]: worker for worker in said["workers"]}


def sums(workers: Workers, role: str) -> dict[str, float]:
    """All workers of a role together."""
    chosen = [worker for name, worker in workers.items() if name.startswith(role)]
    names = [key for key, value in chosen[0].items() if not isinstance(value, str)]
    return {name: sum(worker[name] for worker in chosen) for name in names}


# --- counts -----------------------------------------------------------------------------------------


def test_a_sweep_shares_lanes_and_a_single_strategy_has_one_for_itself(
    g2p_job: Any, cluster_file: Any, tmp_path: Path
) -> None:
    cluster = f"cluster={cluster_file('{banks: 2, slots: 6, replicas: 2}', '{replicas: 2}')}"
    shards = "dataset.shard_size=6"
    sweep_job = g2p_job(SPECULATIVE, cluster, shards)
    single_job = g2p_job("strategies=[spec_decode]", cluster, shards, f"output={tmp_path / 'one'}")
    sweep, single = workers_of(sweep_job), workers_of(single_job)
    for workers, job, strategies in ((sweep, sweep_job, 6), (single, single_job, 1)):
        drafters, verifiers = sums(workers, "drafter"), sums(workers, "verifier")
        for name in ("rounds", "lane_rounds", "pair_rounds"):
            assert drafters[name] == verifiers[name] > 0
        rows = read_rows(Path(job.output))
        assert verifiers["pair_rounds"] == sum(rows["rounds"].to_pylist())
        assert drafters["outcomes"] == rows.num_rows == 24 * strategies
        assert verifiers["lane_rounds"] <= 6 * verifiers["rounds"], "more lanes than slots"
        assert verifiers["bytes_sent"] == 0 < drafters["bytes_sent"]
        for role in (drafters, verifiers):
            assert role["positions_stepped"] >= role["lane_rounds"]
            assert role["positions_prefilled"] > 0
            assert role["busy_seconds"] > 0
            assert role["wait_seconds"] >= 0
    for role in ("drafter", "verifier"):
        shared, alone = sums(sweep, role), sums(single, role)
        assert alone["pair_rounds"] == alone["lane_rounds"]
        assert shared["pair_rounds"] > shared["lane_rounds"] > alone["lane_rounds"]
        assert shared["positions_reused"] > alone["positions_reused"]


def test_what_was_measured_before_the_run_is_no_work_of_it(g2p_job: Any, tmp_path: Path) -> None:
    """Modelled latency needs times of single passes, which are no positions of any lane."""
    limit = "dataset.limit=4"
    measured = workers_of(g2p_job(SPECULATIVE, limit))
    given = workers_of(g2p_job(SPECULATIVE, limit, GIVEN_TIMES, f"output={tmp_path / 'given'}"))
    for name, worker in measured.items():
        for count in ("positions_stepped", "positions_prefilled", "positions_reused"):
            assert worker[count] == given[name][count], (name, count)


@pytest.mark.parametrize("use", ["drafter", "verifier"])
def test_the_worker_that_no_strategy_needs_stands_still(g2p_job: Any, use: str) -> None:
    workers = workers_of(g2p_job(f"strategies=[{use}]", GIVEN_TIMES))
    for role in ("drafter", "verifier"):
        positions = workers[f"{role}-0"]["positions_stepped"]
        assert (positions > 0) == (role == use), role
    assert (workers["verifier-0"]["rounds"] > 0) == (use == "verifier")
    assert workers["drafter-0"]["outcomes"] == 24


# --- the timeline -----------------------------------------------------------------------------------


def assert_is_a_timeline(path: Path, workers: Workers) -> None:
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X"}
    names: dict[tuple[str, int, int], str] = {}
    for event in events:
        if event["ph"] == "M":
            names[event["name"], event["pid"], event["tid"]] = event["args"]["name"]
    assert {name for (kind, _, _), name in names.items() if kind == "process_name"} == set(workers)

    acts: dict[str, dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    lanes: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        if event["ph"] != "X":
            continue
        assert event["ts"] >= 0 <= event["dur"]
        worker = names["process_name", event["pid"], 0]
        row = names["thread_name", event["pid"], event["tid"]]
        assert (row == "model") == (event["name"] != "in flight")
        acts[worker][event["name"]].append(event)
        lanes[worker, row].append((event["ts"], event["ts"] + event["dur"]))
    assert min(event["ts"] for event in events if event["ph"] == "X") == 0
    for (worker, row), spans in lanes.items():
        spans.sort()
        for (_, ended), (begun, _) in pairwise(spans):
            assert ended <= begun + 1, (worker, row, "does two things at once")

    for worker, said in workers.items():
        if worker.startswith("verifier"):
            assert set(acts[worker]) == {"verify"}
            assert len(acts[worker]["verify"]) == said["rounds"]
        else:
            assert set(acts[worker]) == {"draft", "apply", "in flight"}
            assert len(acts[worker]["draft"]) == len(acts[worker]["in flight"]) == said["rounds"]
        model = [
            event["dur"] for act, of in acts[worker].items() if act != "in flight" for event in of
        ]
        assert sum(model) / 1e6 == pytest.approx(said["busy_seconds"], rel=1e-3)
    verified = [event for worker in acts.values() for event in worker.get("verify", [])]
    flown = [event for worker in acts.values() for event in worker.get("in flight", [])]
    for event in verified:
        within = [
            other
            for other in flown
            if other["args"] == event["args"]
            and other["ts"] <= event["ts"] + 2000
            and event["ts"] + event["dur"] <= other["ts"] + other["dur"] + 2000
        ]
        assert len(within) == 1, "a block is judged while it is in flight"


def test_the_timeline_of_one_process(g2p_job: Any, cluster_file: Any, tmp_path: Path) -> None:
    cluster = cluster_file("{banks: 2, slots: 4, replicas: 2}")
    job = g2p_job(ALL_STRATEGIES, "dataset.limit=8", "dataset.shard_size=4", f"cluster={cluster}")
    path = tmp_path / "made" / "timeline.json"
    assert_is_a_timeline(path, workers_of(job, path))


@pytest.mark.ray
def test_the_timeline_of_actors(
    g2p_job: Any, cluster_file: Any, tmp_path: Path, ray_cluster: None
) -> None:
    cluster = cluster_file("{banks: 2, slots: 4}", "{replicas: 2}")
    job = g2p_job(ALL_STRATEGIES, "dataset.limit=8", f"cluster={cluster}", "fleet=ray")
    path = tmp_path / "timeline.json"
    assert_is_a_timeline(path, workers_of(job, path))


def test_nothing_is_remembered_that_was_not_asked_for(g2p_job: Any, tmp_path: Path) -> None:
    workers_of(g2p_job("strategies=[spec_decode]", "dataset.limit=2"))
    assert not list(tmp_path.rglob("*timeline*"))
    write_timeline(tmp_path / "empty.json", [])
    assert json.loads((tmp_path / "empty.json").read_text()) == {"traceEvents": []}


def test_the_command_line_writes_a_timeline(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    given = (f"output={tmp_path / 'run'}", "fleet=local", "dataset.limit=3")
    sets = [word for override in given for word in ("--set", override)]
    said = speccascade("run", "jobs/g2p.yaml", *sets, "--timeline", str(path))
    assert f"Timeline: {path}" in said
    assert "perfetto" in speccascade("run", "--help")
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    assert {event["name"] for event in events} >= {"draft", "verify", "in flight", "apply"}
