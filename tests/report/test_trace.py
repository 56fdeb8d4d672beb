"""Traces: the right rows are found, mistakes are named, and every token is shown as who wrote it.

Each of these faults in `report/trace.py` fails a test here: tokens decoded one by one; a prefix taken
as it is decoded; `zip` not strict; the settings numbered among the chosen ones.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from pipeline.config import JobError
from pipeline.records import Outcome, Shard, ShardResult, Source, Strategy, TokenTrace
from pipeline.report.trace import (
    coloured_text,
    find_traces,
    print_traces,
    token_pieces,
)
from pipeline.results.rows import FinishedShard, RowLayout, shard_table
from pipeline.results.writer import write_shard
from tests.results.runs import COUNTS, LAYOUT, OPT, VERIFIER, bad, good

WIDER = replace(OPT, alpha=0.4)
NARROW, WIDE = LAYOUT.settings[0], replace(LAYOUT.settings[0], block_size=5, repeats=2)
RUN = RowLayout("demo", (NARROW, WIDE), (VERIFIER, OPT, WIDER), trace=True)
WORDS = {1: "Das", 2: " ist", 3: " gut", 0: "</s>"}


def decode(ids: list[int]) -> str:
    return "".join(WORDS[token] for token in ids)


def token(source: Source, deferred: bool = False, drafter: float | None = 0.25) -> TokenTrace:
    return TokenTrace(source, deferred, source == "draft", drafter, 0.5, drafter, 0.75, drafter)


WRITTEN = {
    VERIFIER: tuple(token("verifier", deferred=True) for _ in range(4)),
    OPT: (
        token("draft"),
        token("draft", deferred=True),
        token("residual", deferred=True),
        token("bonus", drafter=None),
    ),
    WIDER: (token("draft"), token("draft"), token("residual"), token("bonus")),
}


def write(output: Path, layout: RowLayout = RUN) -> Path:
    shard = Shard(0, (good("one"), bad("broken"), good("two")))
    outcomes = tuple(
        Outcome(name, repeat, strategy, (1, 2, 3, 0), "stop", COUNTS.get(strategy, COUNTS[OPT]))
        for name in ("one", "two")
        for repeat in range(2)
        for strategy in layout.strategies
    )
    found = [
        replace(outcome, setting=number, trace=WRITTEN[outcome.strategy])
        for outcome in outcomes
        for number, setting in enumerate(layout.settings)
        if outcome.repeat < setting.repeats
    ]
    result = ShardResult(0, tuple(found), "drafter-0", "verifier-0", "node")
    finished = FinishedShard(shard, result, [decode([1, 2, 3])] * len(found))
    write_shard(output, 0, shard_table(layout, finished))
    return output


def found(run: Path, strategy: str, settings: Sequence[int] = (), repeat: int = 0) -> list[str]:
    traces = find_traces(run, "one", strategy, settings, repeat)
    assert all(traced.row["example_id"] == "one" for traced in traces)
    assert all(traced.row["repeat"] == repeat for traced in traces)
    return [f"{traced.setting} {traced.setting_text} {traced.label}" for traced in traces]


def test_a_name_stands_for_all_its_alphas_and_a_label_for_one(tmp_path: Path) -> None:
    run = write(tmp_path)
    narrow, wide = "0 block size 3 spec_cascade.opt", "1 block size 5 spec_cascade.opt"
    labels = [f"{setting}(alpha={alpha})" for setting in (narrow, wide) for alpha in ("0.2", "0.4")]
    assert found(run, "spec_cascade.opt") == labels
    assert found(run, "spec_cascade.opt(alpha=0.4)") == labels[1::2]
    assert found(run, "spec_cascade.opt", [1]) == labels[2:]
    assert found(run, "spec_cascade.opt", repeat=1) == labels[2:]


@pytest.mark.parametrize(
    ("example", "strategy", "settings", "repeat", "said"),
    [
        ("onne", "verifier", [], 0, "--example is 'onne'.*did you mean 'one'"),
        ("one", "spec_cascade.op", [], 0, "--strategy is 'spec_cascade.op'.*'spec_cascade.opt'"),
        ("one", "spec_cascade.opt(alpha=0.3)", [], 0, r"did you mean 'spec_cascade.opt\(alpha="),
        ("one", "verifier", [2], 0, r"--setting is 2; .* 0 \(block size 3\), 1 \(block size 5\)"),
        ("one", "verifier", [-1], 0, "--setting is -1"),
        ("one", "verifier", [], 2, "--repeat is 2; the run's repeats are 0 to 1"),
    ],
)
def test_a_mistake_is_named_with_its_remedy(
    tmp_path: Path, example: str, strategy: str, settings: list[int], repeat: int, said: str
) -> None:
    run = write(tmp_path)
    with pytest.raises(JobError, match=said):
        find_traces(run, example, strategy, settings, repeat)


def test_a_run_without_traces_or_rows_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="no finished shard"):
        find_traces(tmp_path, "one", "verifier")
    run = write(tmp_path, replace(RUN, trace=False))
    with pytest.raises(JobError, match="set `trace: true`"):
        find_traces(run, "one", "verifier")


def test_pieces_are_what_each_token_adds() -> None:
    assert token_pieces((1, 2, 3, 0), decode) == ["Das", " ist", " gut", "</s>"]
    assert token_pieces((), decode) == []

    def spaced(ids: list[int]) -> str:
        """A first token has no space before it, as with SentencePiece."""
        return decode(ids).strip()

    assert token_pieces((2, 2), spaced) == ["ist", " ist"]


def test_pieces_of_bytes_are_whole_characters_and_the_whole_text() -> None:
    text = "Äpfel für 5 €, 🙂 und \ufffd!"
    ids = tuple(text.encode())

    def of_bytes(ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")

    pieces = token_pieces(ids, of_bytes)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == text
    assert pieces[:3] == ["", "Ä", "p"]
    assert [piece for piece in pieces if piece] == list(text)
    cut = token_pieces(ids[:1], of_bytes)
    assert cut == ["\ufffd"]


def printed(run: Path, strategy: str, console: Console, example: str = "one") -> str:
    print_traces(find_traces(run, example, strategy, [0]), decode, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_without_colours_brackets_say_who_wrote_it(tmp_path: Path) -> None:
    text = printed(write(tmp_path), OPT.label, Console(file=io.StringIO()))
    assert "\x1b" not in text
    lines = text.splitlines()
    assert lines[:4] == [
        "example   one",
        "prompt    prompt one",
        "reference one",
        "reference two",
    ]
    assert "spec_cascade.opt(alpha=0.2) · block size 3" in lines
    assert "Das ist' [gut]'{</s>}" in lines
    assert "draft 2   [residual] 1   {bonus} 1   <verifier> 0   deferred' 2" in text


def test_the_table_has_a_line_for_each_token(tmp_path: Path) -> None:
    text = printed(write(tmp_path), OPT.label, Console(file=io.StringIO()))
    rows = [
        [cell.strip() for cell in line.strip("│").split("│")]
        for line in text.splitlines()
        if line.startswith("│")
    ]
    assert rows == [
        ["'Das'", "draft", "", "yes", "0.250", "0.500", "0.250", "0.750", "0.250"],
        ["' ist'", "draft", "yes", "yes", "0.250", "0.500", "0.250", "0.750", "0.250"],
        ["' gut'", "residual", "yes", "", "0.250", "0.500", "0.250", "0.750", "0.250"],
        ["'</s>'", "bonus", "", "", "-", "0.500", "-", "0.750", "-"],
    ]


def test_in_a_terminal_a_source_is_a_colour_and_a_deferral_a_line(tmp_path: Path) -> None:
    console = Console(
        file=io.StringIO(), force_terminal=True, color_system="standard", width=120, _environ={}
    )
    text = printed(write(tmp_path), OPT.label, console)
    assert (
        "\x1b[32mDas\x1b[0m\x1b[4;32m ist\x1b[0m\x1b[1;4;31m gut\x1b[0m\x1b[1;36m</s>\x1b[0m"
        in text
    )
    assert "[residual]" not in text


def test_a_text_is_never_read_as_markup() -> None:
    trace = [{"source": "draft", "deferred": False}]
    assert coloured_text(["[red]a[/red]"], trace, colours=True).plain == "[red]a[/red]"
    with pytest.raises(ValueError, match="argument 2 is longer"):
        coloured_text(["a"], [*trace, *trace], colours=True)


def test_a_bad_example_has_its_error_and_no_tokens(tmp_path: Path) -> None:
    text = printed(write(tmp_path), "verifier", Console(file=io.StringIO()), "broken")
    assert "error: column 'en' is null" in text
    assert "│" not in text


def test_one_setting_needs_no_number(tmp_path: Path) -> None:
    run = write(tmp_path, replace(RUN, settings=(WIDE,)))
    assert found(run, "verifier") == ["0  verifier"]
    with pytest.raises(JobError, match="--setting is 1; the run's settings are only 0"):
        find_traces(run, "one", "verifier", [1])


def test_labels_come_back_from_rows_as_they_went_in(tmp_path: Path) -> None:
    strategies = (
        Strategy("lossy_spec_decode", 0.1, 1.0),
        Strategy("lossy_spec_decode", 0.1, "tuned"),
        Strategy("bild", fallback=0.6, rollback=2.0),
        Strategy("custom", 0.5, target="jobs.custom_target:geometric_mean"),
        Strategy("sequence_cascade.chow", 0.5, normalize="mean"),
    )
    WRITTEN.update(dict.fromkeys(strategies, WRITTEN[WIDER]))
    run = write(tmp_path, replace(RUN, settings=(WIDE,), strategies=strategies))
    for strategy in strategies:
        assert found(run, strategy.label) == [f"0  {strategy.label}"]
