"""The report, from row files alone: rates, corpus quality, table and picture."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import sacrebleu
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import imread
from rich.console import Console

from pipeline.config import JobError
from pipeline.quality.metrics import load_metrics, score
from pipeline.records import Counts, Outcome, Sampling, Setting, Shard, ShardResult, Strategy
from pipeline.report import write_report
from pipeline.report.plots import Look, plot_frontier
from pipeline.report.settings import by_setting, shared_setting
from pipeline.report.summary import RATES, summarise
from pipeline.report.table import print_summary
from pipeline.results.rows import FinishedShard, RowLayout, shard_table
from pipeline.results.writer import rows_folder, write_shard
from tests.results.runs import COUNTS, DRAFTER, LAYOUT, LOSSY, OPT, VERIFIER, bad, failed, good

ONE_ROUND = Counts(3, 1, 4, 3, 3, 0, 0, 1, 1, (0, 0, 0, 1))
WIDER = Strategy("spec_cascade.opt", 0.4)
TEXTS = {"0a": "the cat sat on the mat today", "0b": "one", "1a": "a dog barks at a cat there"}
METRICS = load_metrics(["bleu", "token_f1", "edit_error_rate"])
RUN = RowLayout("demo", LAYOUT.settings, (VERIFIER, WIDER, OPT, LOSSY, DRAFTER), METRICS)


WARMER = Setting(5, 8, Sampling(1.0, top_k=4), drafter_sampling=Sampling(0.0), seed=7)
BILDS = tuple(
    Strategy("bild", fallback=fallback, rollback=rollback)
    for fallback in (0.3, 0.6)
    for rollback in (2.0, 1.0)
)
SEQUENCES = tuple(Strategy("sequence_cascade.chow", 0.5, normalize=n) for n in ("none", "mean"))


def outcome(example_id: str, strategy: Strategy) -> Outcome:
    counts = (
        ONE_ROUND if (example_id, strategy) == ("1a", OPT) else COUNTS.get(strategy, COUNTS[OPT])
    )
    found = Outcome(example_id, 0, strategy, (1, 2, 3, 0), "stop", counts)
    return failed(found) if (example_id, strategy) == ("0b", OPT) else found


def prediction(found: Outcome) -> str | None:
    """The drafter's text lacks its last word; a failed outcome has none."""
    text = TEXTS[found.example_id]
    if found.error:
        return None
    return text.rpartition(" ")[0] if found.strategy == DRAFTER else text


def write_shard_of(output: Path, index: int, ids: list[str], layout: RowLayout = RUN) -> None:
    examples = [replace(good(i), references=(TEXTS[i], "another reference")) for i in ids]
    outcomes = [
        replace(outcome(i, strategy), setting=number)
        for i in ids
        for number in range(len(layout.settings))
        for strategy in layout.strategies
    ]
    texts = [prediction(found) for found in outcomes]
    references = {example.example_id: example.references for example in examples}
    scores = score(layout.metrics, texts, [references[found.example_id] for found in outcomes])
    shard = Shard(index, (*examples, bad(f"bad {index}")))
    result = ShardResult(index, tuple(outcomes), "drafter-0", "verifier-0", "node")
    rows = shard_table(layout, FinishedShard(shard, result, texts, scores))
    write_shard(output, index, rows)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_shard_of(tmp_path, 0, ["0a", "0b"])
    write_shard_of(tmp_path, 1, ["1a"])
    return tmp_path


def lines(run: Path) -> dict[str, dict[str, Any]]:
    return {line["label"]: line for line in summarise(run).to_pylist()}


def test_a_line_for_each_strategy_in_job_order(run: Path) -> None:
    found = lines(run)
    assert list(found) == [strategy.label for strategy in RUN.strategies[:3]] + [
        "lossy_spec_decode(alpha=0.1, beta=tuned)",
        "drafter",
    ]
    assert {line["rows"] for line in found.values()} == {5}
    assert [line["errors"] for line in found.values()] == [2, 2, 3, 2, 2]


def test_rates_are_ratios_of_sums_over_rows_without_errors(run: Path) -> None:
    opt = lines(run)["spec_cascade.opt(alpha=0.2)"]
    assert opt["output_tokens"] == 8
    expected = {
        "verifier_calls_per_token": 3 / 8,
        "verifier_tokens_per_token": 11 / 8,
        "drafter_calls_per_token": 9 / 8,
        "acceptance": 5 / 9,
        "acceptance_per_example": (2 / 6 + 3 / 3) / 2,
        "accepted_per_round": 5 / 3,
    }
    assert {name: opt[name] for name in RATES} == pytest.approx(expected)
    assert opt["deferral_rate"] == pytest.approx(2 / (8 - 2))


def test_a_rate_without_a_denominator_is_null(run: Path) -> None:
    for name in ("drafter", "verifier"):
        line = lines(run)[name]
        rates = (line["acceptance"], line["acceptance_per_example"], line["accepted_per_round"])
        assert rates == (None, None, None)
    assert lines(run)["drafter"]["deferral_rate"] == 0
    assert lines(run)["verifier"]["deferral_rate"] == 1


def test_corpus_quality_is_pooled_for_bleu_and_a_mean_for_the_others(run: Path) -> None:
    drafter = lines(run)["drafter"]
    texts = [TEXTS[i].rpartition(" ")[0] for i in TEXTS]
    streams = [list(TEXTS.values()), ["another reference"] * 3]
    assert drafter["bleu"] == pytest.approx(sacrebleu.corpus_bleu(texts, streams).score)
    rows = duckdb.sql(
        f"select avg(bleu), avg(token_f1) from '{rows_folder(run)}/*.parquet' where strategy = 'drafter'"
    ).fetchall()
    assert drafter["token_f1"] == pytest.approx(rows[0][1])
    assert abs(drafter["bleu"] - rows[0][0]) > 0.1
    assert lines(run)["verifier"]["edit_error_rate"] == 0


def test_the_summary_agrees_with_a_query_over_the_rows(run: Path) -> None:
    query = f"""
        select strategy, alpha, sum(verifier_calls) / sum(output_tokens) as calls
        from '{rows_folder(run)}/*.parquet' where error is null group by all
    """
    expected = {(use, alpha): calls for use, alpha, calls in duckdb.sql(query).fetchall()}
    found = summarise(run).to_pylist()
    assert {
        (line["strategy"], line["alpha"]): line["verifier_calls_per_token"] for line in found
    } == pytest.approx(expected)


def test_the_written_summaries_are_the_summary(run: Path) -> None:
    report = write_report(run)
    assert pq.read_table(report.parquet).to_pylist() == report.summary.to_pylist()
    csv = pd.read_csv(report.csv)
    assert list(csv["label"]) == report.summary.column("label").to_pylist()
    assert csv["bleu"].tolist() == pytest.approx(report.summary.column("bleu").to_pylist())
    assert pa.types.is_string(report.summary.schema.field("normalize").type)
    assert [path.name for path in report.plots] == [
        "frontier-bleu.png",
        "frontier-token_f1.png",
        "frontier-edit_error_rate.png",
    ]
    assert imread(report.plots[0]).std() > 0.05


Drawn = dict[str, list[tuple[list[float], list[float]]]]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Drawn:
    """What is drawn, by label; one entry for each panel."""
    remembered: Drawn = {}
    plot = Axes.plot

    def remember(self: Axes, *args: Any, **given: Any) -> Any:
        remembered.setdefault(given["label"], []).append((args[0], args[1]))
        return plot(self, *args, **given)

    monkeypatch.setattr(Axes, "plot", remember)
    return remembered


def test_the_picture_has_a_curve_a_rule_and_the_reference_points(
    run: Path, tmp_path: Path, drawn: Drawn
) -> None:
    plot_frontier(summarise(run), "bleu", tmp_path / "x.png")
    assert set(drawn) == {
        "spec_cascade.opt",
        "lossy_spec_decode(beta=tuned)",
        "drafter",
        "verifier",
    }
    assert drawn["spec_cascade.opt"][0][0] == [3 / 8, 0.5]
    assert drawn["verifier"] == [([1.0], [pytest.approx(100.0)])]


def test_curves_run_along_rollback_and_apart_for_what_else_differs(
    tmp_path: Path, drawn: Drawn
) -> None:
    write_shard_of(tmp_path, 0, ["0a"], replace(RUN, strategies=(*BILDS, *SEQUENCES)))
    summary = summarise(tmp_path)
    rollback = summary.column("rollback").to_pylist()
    cost = pa.array([0.0 if value is None else value for value in rollback])
    place = summary.schema.get_field_index("verifier_calls_per_token")
    plot_frontier(summary.set_column(place, summary.field(place), cost), "bleu", tmp_path / "x.png")
    assert {label: panels[0][0] for label, panels in drawn.items()} == {
        "bild(fallback=0.3)": [1.0, 2.0],
        "bild(fallback=0.6)": [1.0, 2.0],
        "sequence_cascade.chow": [0.0],
        "sequence_cascade.chow(normalize=mean)": [0.0],
    }


def test_no_two_of_64_curves_look_alike() -> None:
    looks = [Look.of(number) for number in range(64)]
    assert len({(look.colour, look.marker) for look in looks}) == 64
    assert len({(look.colour, look.line) for look in looks[:32]}) == 32


@pytest.fixture
def two_settings(tmp_path: Path) -> Path:
    layout = replace(RUN, settings=(*LAYOUT.settings, WARMER))
    write_shard_of(tmp_path, 0, ["0a", "0b"], layout)
    write_shard_of(tmp_path, 1, ["1a"], layout)
    return tmp_path


def test_settings_are_summed_apart_in_job_order(two_settings: Path) -> None:
    found = summarise(two_settings).to_pylist()
    assert [line["block_size"] for line in found] == [3] * 5 + [5] * 5
    assert [line["drafter_temperature"] for line in found] == [None] * 5 + [0.0] * 5
    assert [line["label"] for line in found[:5]] == [line["label"] for line in found[5:]]
    assert {line["rows"] for line in found} == {5}


def test_settings_that_differ_for_the_drafter_alone_are_told_apart(tmp_path: Path) -> None:
    same = replace(WARMER, drafter_sampling=None)
    cooler = replace(WARMER, drafter_sampling=Sampling(0.5, top_k=4))
    write_shard_of(tmp_path, 0, ["0a"], replace(RUN, settings=(same, cooler)))
    groups = by_setting(summarise(tmp_path).to_pylist())
    assert [group.text for group in groups] == [
        "drafter temperature as the verifier's · drafter top k as the verifier's",
        "drafter temperature 0.5 · drafter top k 4",
    ]
    assert [len(group.lines) for group in groups] == [5, 5]


def test_the_table_heads_each_setting_with_what_sets_it_apart(two_settings: Path) -> None:
    stream = io.StringIO()
    print_summary(summarise(two_settings), Console(file=stream))
    text = stream.getvalue()
    first = "block size 3 · temperature 0.5 · drafter temperature as the verifier's"
    second = "block size 5 · temperature 1 · drafter temperature 0"
    assert text.startswith("demo · top k 4")
    summary, deferral = text.split("Deferral and its risk")
    for table in (summary, deferral):
        assert table.index(first) < table.index(second)
    assert "│ drafter " in summary
    assert "│ drafter " not in deferral


def test_each_setting_has_a_panel_with_the_same_axes(
    two_settings: Path, tmp_path: Path, drawn: Drawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, dpi: shown.append(self))
    summary = summarise(two_settings)
    place = summary.schema.get_field_index("bleu")
    apart = pa.array([float(number) for number in range(summary.num_rows)])
    summary = summary.set_column(place, summary.field(place), apart)
    plot_frontier(summary, "bleu", tmp_path / "x.png")
    first, second = shown[0].axes
    assert (first.get_xlim(), first.get_ylim()) == (second.get_xlim(), second.get_ylim())
    assert first.get_title(loc="left").startswith("block size 3 · temperature 0.5")
    assert second.get_title(loc="left").startswith("block size 5 · temperature 1")
    assert {label: len(panels) for label, panels in drawn.items()} == dict.fromkeys(drawn, 2)
    legend = [text.get_text() for text in shown[0].legends[0].get_texts()]
    assert sorted(legend) == sorted([*drawn, "verifier's quality"])


def test_the_table_is_plain_and_whole_without_a_terminal(run: Path) -> None:
    stream = io.StringIO()
    print_summary(summarise(run), Console(file=stream, width=40))
    text = stream.getvalue()
    assert "\x1b" not in text
    assert text.startswith("demo · block size 3 · temperature 0.5 · top k 4")
    row = next(line for line in text.splitlines() if "spec_cascade.opt(alpha=0.2)" in line)
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells[2:] == ["1.000", "0.000", "0.375", "1.375", "1.125", "0.556", "0.333", "5", "3"]


def test_a_title_leaves_out_what_is_not_shared(run: Path) -> None:
    summary = summarise(run)
    other = summary.set_column(
        summary.schema.get_field_index("temperature"),
        "temperature",
        pa.array([0.0, 1.0, 1.0, 1.0, 1.0]),
    )
    assert shared_setting(other.to_pylist()) == "demo · block size 3 · top k 4"


def test_a_run_with_nothing_but_errors_still_has_a_report(tmp_path: Path) -> None:
    write_shard_of(tmp_path, 0, [])
    report = write_report(tmp_path)
    assert report.summary.column("bleu").null_count == 5
    assert report.summary.column("errors").to_pylist() == [1] * 5
    assert all(path.exists() for path in report.plots)


def test_a_run_without_a_row_has_an_empty_report(tmp_path: Path) -> None:
    write_shard(tmp_path, 0, RUN.schema.empty_table())
    report = write_report(tmp_path)
    assert report.summary.num_rows == 0
    print_summary(report.summary, Console(file=io.StringIO()))


def test_a_run_without_metrics_has_a_table_and_no_picture(tmp_path: Path) -> None:
    write_shard_of(tmp_path, 0, ["0a"], replace(RUN, metrics=()))
    report = write_report(tmp_path)
    assert report.plots == ()
    assert report.summary.num_rows == 5


def test_a_folder_without_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="no finished shard"):
        write_report(tmp_path)
