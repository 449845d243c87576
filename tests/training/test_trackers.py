"""Runs with a tracker, broken off and taken up again, read back by what reads each tracker's own files."""

import json
import os
import resource
import shutil
import struct
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from finetune.config.compatibility import TRACKERS
from finetune.errors import UserError
from finetune.training import callbacks
from finetune.training.callbacks import Tracker
from finetune.training.metrics import MetricsLog
from tests.ranks import ROOT, launch_ranks

Series = list[tuple[int, float]]  # (step, value)
HERE = Path(__file__).parent
LOGGED = ("loss", "eval_loss", "learning_rate", "grad_norm", "tokens_per_second", "tokens", "epoch")


@pytest.fixture
def runs(
    tiny_recipe: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[str], Path, list[str]]:
    """The trackers that are installed, the folder of their runs (each called by its tracker's name), and what was said."""
    names = [name for name in TRACKERS if find_spec(name)]
    if not names:
        pytest.skip("no tracker is installed; pip install tensorboard")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio-home"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    recipe = tiny_recipe(
        "watched", eval_split_size=4, eval_steps=2, save_steps=2, export_at_end=False
    )
    listed, said = tmp_path / "runs.json", []
    overrides = [[f"report_to={name}", f"output_dir={tmp_path}/runs/{name}"] for name in names]
    listed.write_text(json.dumps([[str(recipe), "fsdp_full_shard", given] for given in overrides]))
    for _ in ("broken off after step 4, which was not saved", "taken up again"):
        ended = launch_ranks(
            HERE / "runs_on_ranks.py", [str(listed)], timeout=120 + 60 * len(names)
        ).check()
        assert ended.outputs[1] == "", "the other rank says nothing, and has no tracker"
        said += ended.outputs[0].splitlines()
        for checkpoint in (tmp_path / "runs").glob("*/checkpoints/step-00000004"):
            shutil.rmtree(checkpoint)
    return names, tmp_path / "runs", said


def test_what_arrives_is_what_stands_in_metrics_jsonl(
    runs: tuple[list[str], Path, list[str]],
) -> None:
    names, folder, said = runs
    assert not [
        line for line in said if line.startswith(("wandb:", "* ", "WARNING")) or "Traceback" in line
    ], said
    assert len([line for line in said if line.startswith("watch   ")]) == 2 * len(names)
    readers = {"tensorboard": _tensorboard, "mlflow": _mlflow, "trackio": _trackio, "wandb": _wandb}
    for name in names:
        run = folder / name
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        run_name, settings, series = readers[name](run)
        assert run_name == "watched", name
        assert float(settings["learning_rate"]) == 1e-3, name
        assert json.loads(settings["datasets"])[0]["path"].endswith("chat.jsonl"), name
        for key in LOGGED:
            logged = {
                line["step"]: pytest.approx(line[key], rel=1e-5) for line in lines if key in line
            }
            assert dict(series[key]) == logged, (
                name,
                key,
            )  # of both parts of the run, in the one place
        if name == "tensorboard":  # the others keep what was logged before it was done again
            assert [step for step, _ in series["loss"]] == [1, 2, 3, 4]


def test_a_tracker_that_does_not_start_is_one_sentence_on_every_rank(
    tiny_recipe: Callable[..., Path], tmp_path: Path
) -> None:
    if find_spec("tensorboard") is None:
        pytest.skip("tensorboard is not installed")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "tensorboard").write_text("a file where a folder is to be made")
    ended = launch_ranks(
        ROOT / "finetune" / "run.py",
        ["--recipe", str(tiny_recipe(report_to="tensorboard"))],
        ranks=1,
        timeout=120,
    )
    assert ended.returncodes == (2,)
    (line,) = ended.outputs[0].splitlines()
    assert line.startswith("report_to: tensorboard: it does not start (")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_full_disk_leaves_the_ids_under_which_trackers_continue_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next start would begin another run in the tracker, with the latter half of the curves."""
    identities = tmp_path / "tracker.json"
    identities.write_text('{"tensorboard": "its id"}')
    inner = SimpleNamespace(start=lambda: None, tracker=None, logging_dir="its id")
    monkeypatch.setattr(callbacks, "_make_tracker", lambda *_: inner)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # no file can grow
    try:
        with pytest.raises(UserError, match="it does not start"):
            callbacks.open_tracker("tensorboard", "run", tmp_path, {}, start_step=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert json.loads(identities.read_text()) == {"tensorboard": "its id"}


def test_a_tracker_that_fails_is_reported_once_and_the_run_continues(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class UnreachableServer:
        """A tracker with an unreachable server."""

        def log(self, numbers: dict[str, float], step: int) -> None:
            raise ConnectionError(f"no answer at step {step}\nsee the log")

    class Server:
        def __init__(self) -> None:
            self.steps: list[int] = []

        def log(self, numbers: dict[str, float], step: int) -> None:
            self.steps.append(step)

        def finish(self) -> None:
            pass

    server = Server()
    trackers = [
        Tracker("mlflow", UnreachableServer(), "mlflow ui"),
        Tracker("wandb", server, "its page"),
    ]
    log = MetricsLog(tmp_path / "metrics.jsonl", 3, 0, trackers)
    for step in (1, 2):
        log.write({"step": step, "eval_loss": 1.0})
    log.close()
    assert server.steps == [1, 2], "another tracker is still called"
    reported = "report_to: mlflow: it failed (no answer at step 1); the run continues without it, metrics.jsonl has every line\n"
    assert capsys.readouterr().err == reported
    assert [
        json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
    ] == [1, 2]


def _tensorboard(run: Path) -> tuple[str, dict[str, Any], dict[str, Series]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    (folder,) = {path.parent for path in (run / "tensorboard").rglob("events.out.tfevents.*")}
    events = EventAccumulator(str(folder)).Reload()
    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    hparams = HParamsPluginData.FromString(content).session_start_info.hparams
    settings = {key: getattr(value, value.WhichOneof("kind")) for key, value in hparams.items()}
    return (
        folder.name,
        settings,
        {key: [(e.step, e.value) for e in events.Scalars(key)] for key in LOGGED},
    )


def _mlflow(run: Path) -> tuple[str, dict[str, Any], dict[str, Series]]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(os.environ["MLFLOW_TRACKING_URI"])
    (found,) = client.search_runs([client.get_experiment_by_name("finetune").experiment_id])
    assert found.info.status == "FINISHED"
    histories = {key: client.get_metric_history(found.info.run_id, key) for key in LOGGED}
    series = {key: [(one.step, one.value) for one in history] for key, history in histories.items()}
    return found.info.run_name, found.data.params, series


def _trackio(run: Path) -> tuple[str, dict[str, Any], dict[str, Series]]:
    from trackio.sqlite_storage import SQLiteStorage

    (name,) = SQLiteStorage.get_runs("finetune")
    lines = SQLiteStorage.get_logs("finetune", name)
    settings = SQLiteStorage.get_run_config("finetune", name)
    return (
        name,
        settings,
        {key: [(n["step"], n[key]) for n in lines if n.get(key) is not None] for key in LOGGED},
    )


def _wandb(run: Path) -> tuple[str, dict[str, Any], dict[str, Series]]:
    """Each start leaves a file of its own, which `wandb sync` lays together by the run's id."""
    series: dict[str, Series] = {key: [] for key in LOGGED}
    settings: dict[str, Any] = {}
    names, ids = set(), set()
    for file in sorted(run.glob("wandb/offline-run-*/*.wandb")):
        for record in _wandb_records(file):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                names.add(record.run.display_name)
                ids.add(record.run.run_id)
            for item in record.run.config.update if kind == "run" else record.config.update:
                settings[item.key] = json.loads(item.value_json)
            line = {
                ".".join(item.nested_key) or item.key: json.loads(item.value_json)
                for item in record.history.item
            }
            for key in LOGGED:
                series[key] += [(line["_step"], line[key])] if key in line else []
    (name,), (_,) = names, ids
    return name, settings, series


def _wandb_records(file: Path) -> Iterator[Any]:
    """The records of a .wandb file: LevelDB's log format (blocks of 32 KiB; checksum, length, type, bytes) after 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, at, whole = file.read_bytes(), 7, b""
    while at + 7 <= len(content):
        _, length, kind = struct.unpack_from("<IHB", content, at)
        if kind:
            whole += content[at + 7 : at + 7 + length]
            at += 7 + length
        if kind in (1, 4):  # a whole record, or the last piece of one
            yield Record.FromString(whole)
            whole = b""
        if kind == 0 or 32768 - at % 32768 < 7:  # what is left of the block is padding
            at += 32768 - at % 32768
