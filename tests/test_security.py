"""What a job, a model, a data set or a folder of results must not be able to do."""

from __future__ import annotations

import json
import logging
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForSeq2SeqLM

from pipeline.config import JobError, ModelConfig, load_cluster, load_job
from pipeline.data.shards import load_rows
from pipeline.models.loading import load_model
from pipeline.protocol.custom_code import import_from
from pipeline.protocol.strategies import StrategyError, sweep
from pipeline.quality.metrics import load_metrics
from pipeline.records import RowError, WorkerStats
from pipeline.redaction import redact, redact_logs, redacted
from pipeline.report.report import write_report
from pipeline.results.containment import file_part
from pipeline.results.rows import _ending
from pipeline.results.writer import read_rows
from pipeline.run import expand_strategies, prepare, run

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _in_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """A file that code of others writes if it is run."""
    return tmp_path / "marker"


class Bomb:
    """Writes the marker when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> Any:
        return (os.system, (f"touch {self._marker}",))


class Silent:
    """A watcher of a run that nobody watches."""

    def started(self, rows_done: int, rows_total: int | None) -> None:
        pass

    def ready(self) -> None:
        pass

    def progressed(self, rows_done: int, workers: Sequence[WorkerStats]) -> None:
        pass


def refusal(*overrides: str) -> str:
    with pytest.raises(JobError) as caught:
        prepare(load_job("jobs/g2p.yaml", ["fleet=local", *overrides]))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def speccascade(*arguments: str, folder: Path, **environment: str) -> subprocess.CompletedProcess:
    """The program in a process of its own, which has no terminal and reads nothing."""
    return subprocess.run(
        [sys.executable, "-c", "from jobs.cli import main; main()", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def working(tmp_path: Path) -> Path:
    """A folder to run jobs in, with a job in it."""
    folder = tmp_path / "working"
    folder.mkdir()
    for name in ("jobs", "cluster"):
        (folder / name).symlink_to(REPOSITORY / name)
    return folder


class TestModels:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        """A model that works, to be tampered with."""
        shutil.copytree("jobs/g2p/drafter", tmp_path / "model")
        return tmp_path / "model"

    def test_pickles_beside_safetensors_are_not_read(self, folder: Path, marker: Path) -> None:
        for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt", "adapter_model.bin"):
            (folder / name).write_bytes(pickle.dumps(Bomb(marker)))
        prepare(load_job("jobs/g2p.yaml", [f"models.drafter.path={folder}"]))
        assert load_model(ModelConfig(path=str(folder)), 90).vocabulary == 90
        assert not marker.exists()

    def test_pickles_alone_are_refused(self, folder: Path, marker: Path) -> None:
        model = AutoModelForSeq2SeqLM.from_pretrained(folder)
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
        assert "safetensors" in refusal(f"models.drafter.path={folder}")
        with pytest.raises(OSError, match="safetensors"):
            load_model(ModelConfig(path=str(folder)), 90)

    @pytest.mark.parametrize(
        "name", ["part.bin", "../other/model.safetensors", "/model.safetensors"]
    )
    def test_an_index_names_safetensors_beside_it_only(self, folder: Path, name: str) -> None:
        shutil.copytree(folder, folder.parent / "other")
        (folder / "model.safetensors").rename(folder / "part.bin")
        index = {"metadata": {}, "weight_map": {"shared.weight": name}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        sentence = refusal(f"models.drafter.path={folder}")
        assert "models.drafter.path" in sentence
        assert f"'{name}'" in sentence

    @pytest.mark.parametrize("name", ["adapter_model.bin", "elsewhere.safetensors"])
    def test_a_config_names_no_weights_of_its_own(self, folder: Path, name: str) -> None:
        change_json(folder / "config.json", transformers_weights=name)
        assert name in refusal(f"models.drafter.path={folder}")

    def test_an_adapter_is_refused(self, folder: Path) -> None:
        (folder / "adapter_config.json").write_text("{}")
        assert "adapter" in refusal(f"models.verifier.path={folder}")

    def test_hub_models_too_are_asked_for_safetensors(
        self, monkeypatch: pytest.MonkeyPatch, folder: Path
    ) -> None:
        asked: dict[str, Any] = {}

        def from_pretrained(path: str, **options: Any) -> Any:
            asked.update(options, path=path)
            return AutoModelForSeq2SeqLM.from_config(config), {"missing_keys": set()}

        config = AutoModelForSeq2SeqLM.from_pretrained(folder).config
        monkeypatch.setattr("pipeline.models.loading.load_config", lambda _: config)
        monkeypatch.setattr(
            "pipeline.models.loading.AutoModelForSeq2SeqLM.from_pretrained", from_pretrained
        )
        load_model(ModelConfig(path="somebody/something"), 90)
        assert asked["path"] == "somebody/something"
        assert asked["use_safetensors"] is True
        assert asked["trust_remote_code"] is False

    @pytest.mark.parametrize("role", ["drafter", "verifier"])
    def test_a_models_own_code_is_not_run_unless_the_job_says_so(
        self, folder: Path, marker: Path, role: str
    ) -> None:
        own = {"AutoConfig": "own.OwnConfig", "AutoModelForSeq2SeqLM": "own.OwnModel"}
        change_json(folder / "config.json", model_type="own", auto_map=own)
        (folder / "own.py").write_text(writes(marker))
        sentence = refusal(f"models.{role}.path={folder}")
        assert f"models.{role}.trust_remote_code is false" in sentence
        assert not marker.exists()
        refusal(f"models.{role}.path={folder}", f"models.{role}.trust_remote_code=true")
        assert marker.exists(), "the code would not have been run anyway"

    def test_nor_is_a_tokenizers(self, folder: Path, marker: Path) -> None:
        change_json(
            folder / "tokenizer_config.json",
            tokenizer_class="OwnTokenizer",
            auto_map={"AutoTokenizer": ["own.OwnTokenizer", None]},
        )
        (folder / "own.py").write_text(writes(marker))
        assert "models.verifier.trust_remote_code" in refusal(f"models.verifier.path={folder}")
        assert not marker.exists()
        refusal(f"models.verifier.path={folder}", "models.verifier.trust_remote_code=true")
        assert marker.exists(), "the code would not have been run anyway"

    def test_nobody_is_asked(self, folder: Path, marker: Path, working: Path) -> None:
        change_json(
            folder / "config.json", model_type="own", auto_map={"AutoConfig": "own.OwnConfig"}
        )
        (folder / "own.py").write_text(writes(marker))
        done = speccascade(
            "run", "jobs/g2p.yaml", "--set", f"models.drafter.path={folder}", folder=working
        )
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1
        assert "[y/N]" not in done.stdout + done.stderr
        assert not marker.exists()

    def test_a_manifest_cannot_permit_it(self, folder: Path, marker: Path, g2p_run: Path) -> None:
        change_json(
            folder / "tokenizer_config.json",
            tokenizer_class="OwnTokenizer",
            auto_map={"AutoTokenizer": ["own.OwnTokenizer", None]},
        )
        (folder / "own.py").write_text(writes(marker))
        manifest = json.loads((g2p_run / "manifest.json").read_text())
        manifest["job"]["models"]["verifier"] |= {"path": str(folder), "trust_remote_code": True}
        (g2p_run / "manifest.json").write_text(json.dumps(manifest))
        example = read_rows(g2p_run).column("example_id")[0].as_py()
        asked = ["trace", str(g2p_run), "--example", example, "--strategy", "verifier"]
        assert speccascade(*asked, folder=REPOSITORY).returncode == 0
        assert not marker.exists()
        speccascade(*asked, "--trust-remote-code", folder=REPOSITORY)
        assert marker.exists(), "the code would not have been run anyway"


class TestDataSets:
    @pytest.mark.filterwarnings("ignore:The Pandas builder is deprecated")
    def test_a_pickle_is_refused(self, marker: Path, tmp_path: Path) -> None:
        (tmp_path / "rows.pkl").write_bytes(pickle.dumps(Bomb(marker)))
        for path in ("pandas", "pickle"):
            sentence = refusal(
                f"dataset.path={path}", f"dataset.data_files={tmp_path / 'rows.pkl'}"
            )
            assert "dataset" in sentence
        refusal(f"dataset.path={tmp_path}", "dataset.data_files=rows.pkl")
        assert not marker.exists()

    @pytest.mark.parametrize("path", ["own", "own/own.py"])
    def test_a_script_is_refused(self, marker: Path, tmp_path: Path, path: str) -> None:
        (tmp_path / "own").mkdir()
        (tmp_path / "own" / "own.py").write_text(writes(marker))
        sentence = refusal(f"dataset.path={tmp_path / path}", "dataset.data_files=null")
        assert "dataset.path" in sentence
        assert not marker.exists()

    def test_relative_scripts_are_refused_too(
        self, marker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "own").mkdir()
        (tmp_path / "own" / "own.py").write_text(writes(marker))
        config = load_job("jobs/g2p.yaml", ["dataset.data_files=null"]).dataset
        monkeypatch.chdir(tmp_path)
        for path in ("own", "own/own.py", "./own/own.py"):
            with pytest.raises(JobError, match=r"dataset\.path"):
                load_rows(config.model_copy(update={"path": path}))
        assert not marker.exists()


class TestCustomCode:
    def test_it_is_off_by_default(self) -> None:
        assert load_job("jobs/g2p.yaml").allow_custom_code is False

    def test_a_target_is_not_imported(self, marker: Path, working: Path) -> None:
        (working / "target_by_default.py").write_text(writes(marker))
        for given, said in [("", "allow_custom_code: true"), ("allow_custom_code=true", "target")]:
            done = speccascade(
                *["run", "jobs/g2p.yaml", "--set", "fleet=local"],
                *["--set", "strategies=[verifier, {use: custom, target: 'target_by_default:no'}]"],
                *(["--set", given] if given else []),
                folder=working,
            )
            assert done.returncode == 2
            assert said in done.stderr
            assert "strategies.1" in done.stderr
            assert marker.exists() == bool(given)

    def test_a_metric_is_not_loaded(self, marker: Path, tmp_path: Path) -> None:
        script = tmp_path / "own_metric" / "own_metric.py"
        script.parent.mkdir()
        script.write_text(writes(marker))
        for name in (str(script), str(script.parent)):
            assert "allow_custom_code: true" in refusal(f"metrics=['{name}']")
        assert not marker.exists()
        refusal(f"metrics=['{script}']", "allow_custom_code=true")
        assert marker.exists(), "the code would not have been run anyway"

    def test_the_hub_is_not_asked_for_a_metric(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("evaluate.load", lambda *_, **__: pytest.fail("it was loaded"))
        with pytest.raises(JobError, match="allow_custom_code"):
            load_metrics(["somebody/something"])

    def test_nor_by_a_report_on_rows_of_others(
        self, marker: Path, g2p_run: Path, tmp_path: Path
    ) -> None:
        script = tmp_path / "own_metric.py"
        script.write_text(writes(marker))
        for file in (g2p_run / "rows").glob("*.parquet"):
            table = pq.read_table(file)
            place = table.column_names.index("exact_match")
            renamed = table.schema.field(place).with_name(str(script))
            pq.write_table(
                pa.Table.from_arrays(table.columns, schema=table.schema.set(place, renamed)), file
            )
        with pytest.raises(JobError, match="--allow-custom-code"):
            write_report(g2p_run)
        assert not marker.exists()

    @pytest.mark.parametrize("target", ["os:system", "torch:load", "posix:system", "sys:exit"])
    def test_a_target_is_a_function_of_the_working_directory(self, target: str) -> None:
        with pytest.raises(StrategyError, match="not in the folder that the job is run in"):
            sweep("custom", {"target": target})

    def test_a_link_does_not_lead_out_of_the_working_directory(
        self, marker: Path, tmp_path: Path
    ) -> None:
        inside, outside = tmp_path / "inside", tmp_path / "outside"
        inside.mkdir()
        (outside / "package").mkdir(parents=True)
        for file in (outside / "linked_file.py", outside / "package" / "__init__.py"):
            file.write_text(writes(marker))
        (inside / "linked_file.py").symlink_to(outside / "linked_file.py")
        (inside / "linked_package").symlink_to(outside / "package")
        import_from(str(inside))
        for module in ("linked_file", "linked_package", "linked_package.part"):
            with pytest.raises(StrategyError, match="not in the folder"):
                sweep("custom", {"target": f"{module}:f"})
        assert not marker.exists()

    def test_what_a_target_raises_when_it_is_imported_is_told(self, tmp_path: Path) -> None:
        (tmp_path / "broken_target.py").write_text("1 / 0")
        import_from(str(tmp_path))
        with pytest.raises(StrategyError, match="ZeroDivisionError"):
            sweep("custom", {"target": "broken_target:f"})

    def test_the_working_directory_hides_no_module_of_python(
        self, marker: Path, working: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sys, "path", list(sys.path))
        monkeypatch.chdir(working)
        before = list(sys.path)
        expand_strategies(load_job("jobs/g2p.yaml"))
        assert sys.path == before
        import_from(str(working))
        assert sys.path == [*before, str(working)]
        for name in ("colorsys", "sacrebleu", "uuid", "json"):
            (working / f"{name}.py").write_text(writes(marker))
        run_script = (
            f"import sys; sys.path[0] = {str(REPOSITORY)!r}\n"
            "from pipeline.config import load_job\n"
            "from pipeline.run import prepare\n"
            "set_to = ['fleet=local', 'allow_custom_code=true', "
            "'strategies=[{use: custom, target: \"jobs.custom_target:geometric_mean\"}]']\n"
            "prepare(load_job('jobs/g2p.yaml', set_to))\n"
            "import colorsys\n"
        )
        # The target is that of the repository, which the link `jobs` leads out to.
        done = subprocess.run(
            [sys.executable, "-P", "-c", run_script],
            cwd=working,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert "not in the folder that the job is run in" in done.stderr
        assert not marker.exists()


class TestYaml:
    TAG = "!!python/object/apply:os.system ['touch {}']"

    def test_no_tag_makes_an_object(self, marker: Path, tmp_path: Path) -> None:
        file = tmp_path / "file.yaml"
        file.write_text("name: " + self.TAG.format(marker))
        for load in (load_job, load_cluster):
            with pytest.raises(JobError, match="could not determine a constructor") as caught:
                load(file)
            assert "\n" not in str(caught.value)
        with pytest.raises(JobError, match="--set name="):
            load_job("jobs/g2p.yaml", ["name=" + self.TAG.format(marker)])
        assert not marker.exists()

    @pytest.mark.parametrize("reference", ["[{}]", "{{<<: [{}]}}"])
    def test_a_few_lines_do_not_fill_the_memory(self, tmp_path: Path, reference: str) -> None:
        first = "a0: &a0 {k: v}"
        lines = [
            f"a{n}: &a{n} " + reference.format(", ".join([f"*a{n - 1}"] * 9)) for n in range(1, 30)
        ]
        file = tmp_path / "file.yaml"
        file.write_text("\n".join([first, *lines]))
        for load in (load_job, load_cluster):
            with pytest.raises(JobError, match="too large once its aliases are spelled out"):
                load(file)

    def test_an_alias_of_what_is_around_it_is_refused_like_any_mistake(self) -> None:
        with pytest.raises(JobError, match="metrics"):
            load_job("jobs/g2p.yaml", ["metrics=&a [*a]"])

    def test_ordinary_aliases_work(self, tmp_path: Path) -> None:
        text = Path("jobs/g2p.yaml").read_text()
        text = text.replace("drafter:  {", "drafter:  &pair {", 1)
        file = tmp_path / "job.yaml"
        file.write_text(text.replace("verifier: {path: jobs/g2p/verifier", "verifier: {<<: *pair"))
        models = load_job(file).models
        assert models.verifier == models.drafter


SECRETS = {
    "HF_TOKEN": "hf_thisIsNotATokenReally",
    "AWS_SECRET_ACCESS_KEY": "notReallyASecretAccessKey/123",
    "AWS_SESSION_TOKEN": "notReallyASessionToken==",
    "RAY_AUTH_TOKEN": "0123456789notReallyAToken",
    "MY_DATABASE_PASSWORD": "correct-horse-battery",
}
PASSWORD, QUERY = "pa55word-in-a-url", "t0ken-in-a-query"
HIDDEN = [*SECRETS.values(), PASSWORD, QUERY]
SECRET_URL = f"https://user:{PASSWORD}@host.invalid/rows.jsonl?X-Amz-Signature={QUERY}&a=b"


class TestSecrets:
    @pytest.fixture(autouse=True)
    def _secrets(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in SECRETS.items():
            monkeypatch.setenv(name, value)

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("s3://key:word@bucket/x", "s3://***@bucket/x"),
            ("open https://h/x?token=abc&b=1 now", "open https://h/x?token=***&b=1 now"),
            ("hf://d/x?Access_Token=abc", "hf://d/x?Access_Token=***"),
            ("https://h/x?sv=1&sig=abc%3D", "https://h/x?sv=1&sig=***"),
            ("'https://h/x?AWSAccessKeyId=abc'", "'https://h/x?AWSAccessKeyId=***'"),
            (f"the token {SECRETS['HF_TOKEN']} is wrong", "the token *** is wrong"),
            (f"password {SECRETS['MY_DATABASE_PASSWORD']!r}", "password '***'"),
            ("Bearer hf_abcdefghijklmnopqrstuvwx", "Bearer ***"),
            ("jobs/demo@2/x.jsonl", "jobs/demo@2/x.jsonl"),
            ("a@b.example: https://h/x?page=2", "a@b.example: https://h/x?page=2"),
        ],
    )
    def test_they_are_taken_out_of_texts(self, text: str, expected: str) -> None:
        assert redact(text) == expected
        assert redacted({"a": [text, (1, text)]}) == {"a": [expected, [1, expected]]}

    def test_a_short_value_is_no_secret(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SOME_KEY", "the")
        assert redact("the theory") == "the theory"

    @pytest.mark.parametrize(
        "override",
        [
            f"dataset.data_files={SECRET_URL}",
            f"dataset.path={SECRET_URL}",
            f"dataset.split={SECRET_URL}",
            f"models.drafter.path={SECRET_URL}",
            f"output={SECRET_URL}",
            f"metrics=['{SECRET_URL}']",
            f"cluster={SECRET_URL}",
            f"fleet={SECRET_URL}",
            f"name={SECRET_URL}",
            f"strategies=['{SECRET_URL}']",
            f"strategies=[{{use: custom, target: '{SECRET_URL}'}}]",
            f"strategis={SECRET_URL}",
            f"dataset.id={SECRETS['HF_TOKEN']}",
        ],
    )
    def test_no_refusal_repeats_them(self, override: str) -> None:
        sentence = refusal(override)
        assert not [secret for secret in HIDDEN if secret in sentence]

    def test_no_log_and_no_traceback_repeats_them(self, tmp_path: Path) -> None:
        script = (
            "import logging\n"
            "from jobs import cli\n"
            "def app():\n"
            f"    logging.getLogger('datasets').warning('cannot get %s', {SECRET_URL!r})\n"
            f"    raise OSError({SECRET_URL!r} + ' ' + {SECRETS['HF_TOKEN']!r})\n"
            "cli.app = app\n"
            "cli.main()\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", script],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 1
        assert "cannot get https://***@host.invalid" in done.stderr
        assert "OSError: https://***@host.invalid" in done.stderr
        said = done.stderr.split("OSError:")[1] + done.stderr.split("Traceback")[0]
        assert not [secret for secret in HIDDEN if secret in said]

    def test_a_run_writes_and_says_none_of_them(self, tmp_path: Path, working: Path) -> None:
        output, timeline = tmp_path / "run", tmp_path / "timeline.json"
        done = speccascade(
            *["run", "jobs/g2p.yaml", "--timeline", str(timeline)],
            *["--set", "fleet=local", "--set", "dataset.limit=6", "--set", f"output={output}"],
            *["--set", "strategies=[verifier]", "--set", "step_seconds={drafter: 1, verifier: 2}"],
            *["--set", f"dataset.data_files={{train: jobs/g2p/test.jsonl, test: '{SECRET_URL}'}}"],
            *["--set", f"decoding.stop=['{SECRETS['HF_TOKEN']}']"],
            folder=working,
        )
        assert done.returncode == 0, done.stderr
        said = done.stdout + done.stderr
        files = [path for path in output.rglob("*") if path.is_file()] + [timeline]
        names = {path.name for path in files}
        assert {"manifest.json", "workers.json", "summary.csv", "shard-00000.parquet"} <= names
        texts = {path.name: path.read_bytes().decode("utf-8", "replace") for path in files}
        texts |= {f"values of {p.name}": values(p) for p in files if p.suffix == ".parquet"}
        assert "host.invalid" in texts["manifest.json"]
        for where, text in {"the terminal": said, **texts}.items():
            assert not [secret for secret in HIDDEN if secret in text], where

    def test_nor_does_a_row_with_an_error(self) -> None:
        ending = _ending("error", RowError("worker_failed", f"cannot reach {SECRET_URL}"))
        assert not [secret for secret in HIDDEN if secret in str(ending)]
        assert "host.invalid" in str(ending)


class TestOutput:
    def test_ids_are_no_paths(self, tmp_path: Path) -> None:
        ids = ["../../etc/passwd", "/etc/passwd", "..", "a/b", "~", "C:\\x", "%2e%2e%2f"]
        data = tmp_path / "data" / "rows.jsonl"
        data.parent.mkdir()
        data.write_text(
            "\n".join(json.dumps({"id": name, "word": "abc", "phonemes": "x"}) for name in ids)
        )
        before = set(tmp_path.rglob("*"))
        output = tmp_path / "deep" / "er" / "run"
        run_g2p(output, f"dataset.data_files={data}")
        write_report(output)
        assert set(read_rows(output).column("example_id").to_pylist()) == set(ids)
        new = set(tmp_path.rglob("*")) - before - {output.parent, output.parent.parent}
        assert all(path.is_relative_to(output) for path in new)
        assert {path.name for path in (output / "rows").iterdir()} == {"shard-00000.parquet"}

    @pytest.mark.parametrize("name", ["../x", "a/b", "/x", "..", ".x", "x\n", "~"])
    def test_a_jobs_name_is_no_path(self, name: str) -> None:
        with pytest.raises(JobError, match="name"):
            load_job("jobs/g2p.yaml", [f"name={json.dumps(name)}"])

    @pytest.mark.parametrize("name", ["../../x", "/etc/x", "a/b/c.py", "somebody/something"])
    def test_a_metrics_name_is_no_path(self, name: str) -> None:
        assert Path(f"frontier-{file_part(name)}.png").name == f"frontier-{file_part(name)}.png"

    @pytest.mark.parametrize(
        "link",
        ["rows", "manifest.json", "workers.json", ".holder.json", ".lock", "summary.csv"],
    )
    def test_a_link_out_of_the_folder_is_refused(self, tmp_path: Path, link: str) -> None:
        output, outside = tmp_path / "run", tmp_path / "outside"
        output.mkdir()
        (outside / "folder").mkdir(parents=True)
        (outside / "file").write_text("{}")
        target = outside / ("folder" if link == "rows" else "file")
        (output / link).symlink_to(target)
        with pytest.raises(
            JobError, match=f"output: .*{link} is a symbolic link out of the folder"
        ):
            run_g2p(output)
        with pytest.raises(JobError, match="symbolic link"):
            write_report(output)
        assert list((outside / "folder").iterdir()) == []
        assert (outside / "file").read_text() == "{}"

    def test_so_is_a_link_that_leads_nowhere_yet(self, tmp_path: Path) -> None:
        output = tmp_path / "run"
        (output / "rows").mkdir(parents=True)
        (output / "rows" / "shard-00000.parquet").symlink_to(tmp_path / "new")
        with pytest.raises(JobError, match="symbolic link"):
            run_g2p(output)
        assert not (tmp_path / "new").exists()

    def test_the_folder_itself_may_be_a_link(self, tmp_path: Path) -> None:
        (tmp_path / "real").mkdir()
        (tmp_path / "run").symlink_to(tmp_path / "real")
        run_g2p(tmp_path / "run")
        assert (tmp_path / "real" / "manifest.json").is_file()


@pytest.fixture
def g2p_run(tmp_path: Path) -> Path:
    """A finished run of a few examples."""
    return run_g2p(tmp_path / "run", "trace=true")


def run_g2p(output: Path, *overrides: str) -> Path:
    fixed = ["fleet=local", f"output={output}", "dataset.limit=7", "decoding.temperature=0"]
    given = ["strategies=[verifier]", "step_seconds={drafter: 1, verifier: 2}", *overrides]
    run(prepare(load_job("jobs/g2p.yaml", [*fixed, *given])), Silent())
    return output


def writes(marker: Path) -> str:
    """Python code that leaves the marker."""
    return f"with open({str(marker)!r}, 'w') as file: file.write('it was run')\n"


def change_json(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def values(file: Path) -> str:
    """All that a Parquet file holds, its schema's metadata too."""
    table: pa.Table = pq.read_table(file)
    return f"{table.to_pylist()} {table.schema.to_string(show_schema_metadata=True)}"


@pytest.fixture
def _own_record_factory() -> Iterator[None]:
    factory = logging.getLogRecordFactory()
    yield
    logging.setLogRecordFactory(factory)


@pytest.mark.usefixtures("_own_record_factory")
def test_logged_arguments_are_redacted(caplog: pytest.LogCaptureFixture) -> None:
    redact_logs()
    logging.getLogger("somebody's").warning("%s and %d", SECRET_URL, 3)
    assert caplog.messages == ["https://***@host.invalid/rows.jsonl?X-Amz-Signature=***&a=b and 3"]
