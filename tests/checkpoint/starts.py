"""Starts of runs that were edited, damaged or cut short in between, one after another in forked processes. Started by
test_inputs.py.

    starts.py ROOT
"""

import json
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from finetune.checkpoint import folders, manifest
from finetune.checkpoint.manifest import read_state
from finetune.cli import main as finetune
from finetune.export import publish as publishing
from tests.conftest import CHAT_TEMPLATE, make_chat, make_model
from tests.forked_ranks import fork_ranks, import_all, run_main, wait

ROOT = Path(sys.argv[-1])
MODEL, OTHER, CHAT, TEMPLATE = (
    ROOT / "model",
    ROOT / "other",
    ROOT / "chat.jsonl",
    ROOT / "template.jinja",
)
STEPS = 4


def ended(action: Callable[[], Any]) -> tuple[int, str]:
    """The exit code of `action` in a process of its own, and what it wrote."""
    log = ROOT / "log"
    log.unlink(missing_ok=True)
    (code,) = wait(fork_ranks(lambda rank: action(), 1, log, launched=False), seconds=120)
    text = log.read_text()
    assert "Traceback" not in text, text
    return code, text


def start(name: str, before: Callable[[], Any] = lambda: None, **keys: Any) -> tuple[int, str]:
    """Starts the run `name`, or starts it again."""
    recipe = {
        "model_name_or_path": str(MODEL),
        "datasets": [{"path": str(CHAT)}],
        "dataset_cache_dir": str(ROOT / "cache"),
        "chat_template": str(TEMPLATE),
        "max_length": 64,
        "global_batch_size": 4,
        "max_steps": STEPS,
        "save_steps": 2,
        "export_at_end": False,
        "output_dir": str(ROOT / name),
    }
    path = ROOT / f"{name}.yaml"
    path.write_text(yaml.safe_dump(recipe | keys))

    def run() -> None:
        before()
        run_main(["--recipe", str(path), "--config", str(ROOT / "config.yaml")])

    return ended(run)


def resume(name: str, before: Callable[[], Any] = lambda: None, **keys: Any) -> tuple[int, str]:
    """Starts the run `name` as if it had been stopped after its last save."""
    (ROOT / name / "finished.json").unlink()
    return start(name, before, **keys)


def command(*arguments: Any) -> tuple[int, str]:
    """`finetune ARGUMENTS`."""

    def run() -> None:
        code = finetune([str(argument) for argument in arguments])
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    return ended(run)


def export(*arguments: Any) -> tuple[int, str]:
    shutil.rmtree(ROOT / "out", ignore_errors=True)
    return command("export", *arguments, "--output", ROOT / "out", "--no-verify")


@contextmanager
def edited(path: Path, change: Callable[[bytes], bytes]) -> Iterator[None]:
    """`path` with other content; its times, and where `change` keeps it its size, stay."""
    before, times = path.read_bytes(), path.stat()
    after = change(before)
    assert after != before
    for content in (after, before):
        path.write_bytes(content)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        if content == after:
            yield


def is_refused(outcome: tuple[int, str], sentence: str) -> None:
    code, text = outcome
    assert code == 2 and sentence in text, (code, sentence, text)


def succeeds(outcome: tuple[int, str]) -> str:
    code, text = outcome
    assert code == 0, text
    return text


def flipped(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


def swapped_letters(content: bytes) -> bytes:
    tokenizer = json.loads(content)
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    return json.dumps(tokenizer).encode()


def reversed_lines(content: bytes) -> bytes:
    return b"\n".join(reversed(content.rstrip(b"\n").split(b"\n"))) + b"\n"


def a_version_that_selects_other_rows_is_refused() -> None:
    from finetune.data import prepare

    select = prepare.select_examples

    def select_half(*arguments: Any) -> Any:
        examples, report = select(*arguments)
        return examples.take_groups(np.arange(examples.groups // 2)), report

    def with_half_of_the_rows() -> None:
        prepare.select_examples = select_half

    succeeds(start("selected"))
    shutil.rmtree(ROOT / "selected" / "checkpoints" / "step-00000004")
    sentence = "of the rows that this version selects from the same files"
    is_refused(resume("selected", with_half_of_the_rows), sentence)
    succeeds(start("selected", with_half_of_the_rows, allow_changed_recipe=True))


def an_edited_template_tokenizer_or_config_is_refused() -> None:
    succeeds(start("full"))
    recipe = (ROOT / "full" / "recipe.yaml").read_bytes()
    with edited(TEMPLATE, lambda text: text.replace(b"<|end|>", b" <|end|>")):
        is_refused(
            start("full", learning_rate=1.0),
            "chat_template: the same name is given, but its text has changed",
        )
        assert (ROOT / "full" / "recipe.yaml").read_bytes() == recipe, "of the run that is there"
    with edited(MODEL / "tokenizer.json", swapped_letters):
        is_refused(start("full"), "tokenizer: the same name is given, but its vocabulary")
    with edited(
        MODEL / "config.json",
        lambda text: text.replace(b'"rms_norm_eps": 1e-06', b'"rms_norm_eps": 1e-05'),
    ):
        is_refused(
            start("full"),
            "model_name_or_path: the same name is given, but its config.json has changed",
        )
    text = succeeds(resume("full"))
    assert "changed" not in text and f"resumed at step {STEPS}" in text
    with edited(TEMPLATE, lambda text: text.replace(b"<|end|>", b" <|end|>")):
        text = succeeds(start("full", allow_changed_recipe=True))
        assert "resuming with a changed recipe: chat_template: the same name is given" in text


def a_stream_in_another_order_is_refused() -> None:
    succeeds(start("stream", streaming=True))
    with edited(CHAT, reversed_lines):
        is_refused(
            start("stream", streaming=True), "datasets: the same files are named, but their content"
        )
    CHAT.touch()  # a copy is no other stream
    assert "changed" not in succeeds(resume("stream", streaming=True))


def an_edited_held_out_file_is_said_and_refused_where_it_chooses_the_model() -> None:
    held_out, other = (
        make_chat(ROOT / "held-out.jsonl", rows=5),
        make_chat(ROOT / "held-out-2.jsonl", rows=6),
    )
    changed = "eval_datasets: the same files are named, but their content has changed"
    keys: dict[str, Any] = {"eval_datasets": [{"path": str(held_out)}], "eval_steps": 2}
    succeeds(start("measured", **keys))
    succeeds(start("chosen", **keys, keep_best_checkpoint=True))
    with edited(held_out, lambda text: text.replace(b"It is", b"Isn't")):
        assert f"resuming with a changed recipe: {changed}" in succeeds(start("measured", **keys))
        is_refused(start("chosen", **keys, keep_best_checkpoint=True), changed)
        is_refused(start("measured", **keys, early_stopping_patience=3), changed)
    keys["eval_datasets"] = [{"path": str(other)}]
    assert f'eval_datasets[0].path: "{held_out}" -> ' in succeeds(start("measured", **keys))
    is_refused(start("chosen", **keys, keep_best_checkpoint=True), "eval_datasets[0].path: ")


def adapters_are_neither_resumed_nor_exported_on_another_base() -> None:
    succeeds(start("lora", use_peft=True))
    checkpoint = folders.step_folder(ROOT / "lora", STEPS)
    assert set(read_state(checkpoint)["inputs"]) == {"base", "chat_template", "config", "tokenizer"}
    weights = MODEL / "model.safetensors"
    with edited(weights, lambda _: (OTHER / "model.safetensors").read_bytes()):
        is_refused(
            start("lora", use_peft=True),
            "but its weights, from which the training started, have changed",
        )
        is_refused(
            export(checkpoint), f"{MODEL}: not the weights that the adapter of {checkpoint} was"
        )
        is_refused(export(ROOT / "lora"), "restore them, or name a folder with --base-model")
        text = succeeds(export(checkpoint, "--base-model", OTHER))
        assert "used all the same, since --base-model names them" in text
    shutil.copytree(MODEL, ROOT / "moved")
    assert "all the same" not in succeeds(export(checkpoint, "--base-model", ROOT / "moved"))
    succeeds(export(checkpoint / manifest.MODEL))


def a_damaged_checkpoint_is_no_model_and_no_export() -> None:
    model = folders.step_folder(ROOT / "full", STEPS) / manifest.MODEL
    with edited(next(model.glob("*.safetensors")), flipped):
        is_refused(
            start("next", model_name_or_path=str(model)),
            "does not match its checksum; name another checkpoint",
        )
        is_refused(
            export(model), "does not match its checksum; export another checkpoint of the run"
        )
    succeeds(
        start("next", model_name_or_path=str(model.parent))
    )  # a checkpoint stands for its model/
    succeeds(export(model))


def metrics_that_cannot_be_written_are_a_sentence() -> None:
    metrics = ROOT / "full" / "metrics.jsonl"
    lines = "".join(
        json.dumps({"step": 1, "epoch": 0.5, "exact_match": i / 2000}) + "\n" for i in range(2000)
    ).encode()
    later = b'{"step": 99}\n'  # which a resume drops
    with edited(metrics, lambda text: text + lines + later):
        limit = (50_000, resource.RLIM_INFINITY)  # a longer file fails, as on a full disk
        outcome = resume("full", before=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit))
        is_refused(outcome, f"{metrics}: File too large")


def an_export_hidden_by_a_kill_comes_back_at_the_next_start() -> None:
    exported = ROOT / "full" / "export"
    exported.mkdir()
    (exported / "config.json").write_text("{}")

    def killed_between_the_renames() -> None:
        rename = Path.rename

        def until_killed(source: Path, target: Path) -> Path:
            if target == exported and source.name.endswith(".exporting"):
                os.kill(os.getpid(), signal.SIGKILL)
            return rename(source, target)

        Path.rename = until_killed  # type: ignore[assignment,method-assign]
        with publishing.publish(exported, overwrite=True) as staging:
            (staging / "config.json").write_text('{"new": true}')

    starts: list[Callable[[], Any]] = [
        lambda: is_refused(start("full", seed=7), "seed: "),
        lambda: succeeds(command("checkpoints", ROOT / "full")),
        lambda: succeeds(command("report", ROOT / "full")),
        lambda: succeeds(export(ROOT / "full")),
        lambda: is_refused(
            command("export", ROOT / "full", "--output", exported),
            "exists; choose another --output",
        ),
    ]
    for next_start in starts:
        assert ended(killed_between_the_renames)[0] == -signal.SIGKILL
        assert not exported.exists()
        next_start()
        assert (exported / "config.json").read_text() == "{}"
        assert not (exported.parent / ".export.replaced").exists()


def main() -> None:
    make_model(MODEL, num_hidden_layers=1)
    make_model(OTHER, num_hidden_layers=1, seed=1)
    make_chat(CHAT, rows=24)
    TEMPLATE.write_text(CHAT_TEMPLATE)
    (ROOT / "config.yaml").write_text(
        'distributed_type: "NO"\nmixed_precision: "no"\nuse_cpu: true\n'
    )
    import_all()
    for scenario in (
        a_version_that_selects_other_rows_is_refused,
        an_edited_template_tokenizer_or_config_is_refused,
        a_stream_in_another_order_is_refused,
        an_edited_held_out_file_is_said_and_refused_where_it_chooses_the_model,
        adapters_are_neither_resumed_nor_exported_on_another_base,
        a_damaged_checkpoint_is_no_model_and_no_export,
        metrics_that_cannot_be_written_are_a_sentence,
        an_export_hidden_by_a_kill_comes_back_at_the_next_start,
    ):
        begun = time.monotonic()
        try:
            scenario()
            print(f"passed {scenario.__name__} in {time.monotonic() - begun:.1f} s", flush=True)
        except AssertionError as error:
            print(f"FAILED {scenario.__name__}: {error}", flush=True)


if __name__ == "__main__":
    main()
