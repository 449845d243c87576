"""`finetune evaluate` on a local task: the numbers are those that can be counted by hand, and run, report and card have them."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from finetune.cli import main
from finetune.errors import UserError
from finetune.export.card import add_evaluation
from finetune.files.run_files import (
    BenchmarkResult,
    benchmark_table,
    merge_results,
    read_benchmarks,
    write_benchmarks,
)
from finetune.inference.cli import keep_results
from finetune.inference.inputs import ModelLocation, find_model
from tests.ranks import ROOT, environment

PROMPTS = ["What is 3 plus 3?", "What is 4 plus 4?", "And 5?", "One more"]


def make_task(folder: Path, answers: list[str]) -> None:
    """A task `copied`: whether the model's greedy answer to each of PROMPTS is the one of `answers`."""
    folder.mkdir()
    rows = [{"question": q, "answer": a} for q, a in zip(PROMPTS, answers, strict=True)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": "copied",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}},
        "output_type": "generate_until",
        "test_split": "test",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["<never>"], "do_sample": False, "max_gen_toks": 6},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        "metadata": {"version": 1.0},
    }
    (folder / "copied.yaml").write_text(yaml.safe_dump(task))


@pytest.mark.slow
def test_base_beside_trained_in_run_report_and_card(
    lora_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install -e '.[evaluate]'")
    run = Path(shutil.copytree(lora_run, tmp_path / "run"))
    base = lora_run.parent / "tiny-llama"

    def answer(model: Path) -> list[str]:
        capsys.readouterr()
        asked = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
        options = ("--json", "--temperature", "0", "--max-new-tokens", "6")
        assert main(["chat", str(model), *asked, *options]) == 0
        return [
            json.loads(line)["answers"][0]["answer"]
            for line in capsys.readouterr().out.splitlines()
        ]

    trained, untrained = answer(run), answer(base)
    expected = [trained[0], trained[1], untrained[2], "something else"]
    make_task(tmp_path / "tasks", expected)
    shares = [
        sum(a.strip() == e.strip() for a, e in zip(of, expected, strict=True)) / 4
        for of in (trained, untrained)
    ]
    assert shares[0] != shares[1]

    options = [
        "--tasks",
        "copied",
        "--include-path",
        str(tmp_path / "tasks"),
        "--apply-chat-template",
        "--batch-size",
        "2",
    ]
    assert main(["evaluate", str(run), *options]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[0].split() == [
        "Task",
        "Metric",
        "Base",
        "Trained",
        "Change",
        "Asked",
    ]
    (result,) = read_benchmarks(run)
    assert (result.trained, result.base) == (shares[0], shares[1])
    assert (result.task, result.metric, result.samples, result.chat_template) == (
        "copied",
        "exact_match",
        4,
        True,
    )
    assert (result.model, result.base_model, result.is_limited) == (
        str(run / "adapter"),
        str(base),
        False,
    )
    for folder in ("export", "adapter"):
        card = (run / folder / "README.md").read_text()
        assert card.count("## Evaluation") == 1
        assert f"the base is {base.name}." in card and str(base.parent) not in card
    assert main(["report", str(run)]) == 0
    page = (run / "report.html").read_text()
    assert "Benchmarks" in page and f"{shares[0]:.3f} ± " in page

    capsys.readouterr()
    assert (
        main(
            [
                "evaluate",
                str(run),
                *options,
                "--no-compare",
                "--limit",
                "2",
                "--output",
                str(tmp_path / "r.json"),
            ]
        )
        == 0
    )
    (result,) = read_benchmarks(run)
    assert (result.base, result.samples, result.is_limited) == (None, 2, True), (
        "it replaces what measured the same"
    )
    assert json.loads((tmp_path / "r.json").read_text())["results"][0]["trained"] == result.trained
    assert (run / "export" / "README.md").read_text().count("## Evaluation") == 1

    assert main(["evaluate", str(run), "--tasks", "copied,nosuch", *options[2:]]) == 2
    assert (
        capsys.readouterr()
        .err.splitlines()[-1]
        .startswith("--tasks: nosuch: no such task of lm-eval ")
    )
    (tmp_path / "tasks" / "rows.jsonl").unlink()
    assert main(["evaluate", str(run), *options, "--no-compare"]) == 2
    assert (
        capsys.readouterr().err.splitlines()[-1].startswith("copied: lm-eval cannot measure it: ")
    )


@pytest.mark.slow
def test_a_row_is_measured_as_if_it_were_alone_under_longrope(
    tiny_llama: Callable[..., Path], tmp_path: Path
) -> None:
    """transformers chooses the frequencies of a batch by its longest row: with two in a batch the short one's score would move."""
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install -e '.[evaluate]'")
    from finetune.inference.harness import BenchmarkOptions, make_task_manager, measure
    from finetune.inference.inference_model import LoadOptions, load_inference_model

    rope = {
        "rope_type": "longrope",
        "short_factor": [1.0] * 8,
        "long_factor": [3.0] * 8,
        "rope_theta": 1e4,
    }
    rope |= {"original_max_position_embeddings": 64}
    folder = tiny_llama(
        "phi", model_type="phi3", original_max_position_embeddings=64, rope_parameters=rope
    )
    model = load_inference_model(find_model(str(folder)), LoadOptions(), print)
    make_task(tmp_path / "tasks", ["word " * count for count in (3, 5, 40, 60)])
    path = tmp_path / "tasks" / "copied.yaml"
    task = yaml.safe_load(path.read_text())
    for name in ("generation_kwargs", "metric_list"):
        del task[name]
    metric = {"metric": "bits_per_byte", "aggregation": "bits_per_byte", "higher_is_better": False}
    path.write_text(
        yaml.safe_dump(task | {"output_type": "loglikelihood_rolling", "metric_list": [metric]})
    )

    def bits_per_byte(batch_size: str) -> float:
        options = BenchmarkOptions(
            tasks=("copied",), include_path=str(tmp_path / "tasks"), batch_size=batch_size
        )
        found = measure(model, options, make_task_manager(options))["results"]["copied"][
            "bits_per_byte,none"
        ]
        return float(found)

    assert bits_per_byte("4") == bits_per_byte("1")


def test_a_mistyped_task_is_answered_without_starting_lm_eval(
    tiny_llama: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "own.yaml").write_text("task: my_own\n")
    command = [
        "evaluate",
        str(tiny_llama()),
        "--tasks",
        "my_own,hellaswag,hellaswga",
        "--include-path",
    ]
    command += [str(tmp_path), "--no-compare"]
    code = f"import sys; from finetune.cli import main; print(main({command!r}), 'torch' in sys.modules)"
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment(), text=True, capture_output=True
    )
    assert ended.stdout.split() == ["2", "False"]
    assert (
        ended.stderr.startswith("--tasks: hellaswga: no such task of lm-eval ")
        and ended.stderr.count("\n") == 1
    )


def test_a_mistake_is_one_sentence(
    tiny_llama: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = str(tiny_llama())
    monkeypatch.setitem(sys.modules, "lm_eval", None)  # as where it is not installed
    for arguments, message in (
        ((model, "--tasks", ","), "--tasks: names of lm-eval's tasks are expected"),
        ((model, "--tasks", "a", "--limit", "0"), "--limit 0.0: a number of documents"),
        ((model, "--tasks", "a", "--include-path", "gone"), "--include-path gone: no such folder"),
        (
            (model, "--tasks", "a", "--output", "/nope/x.json"),
            "--output /nope/x.json: /nope is no folder; make it",
        ),
        (
            (model, "--tasks", "a", "--output", model),
            f"--output {model}: a folder; name a file in it",
        ),
        ((f"{model}/gone", "--tasks", "a"), f"{model}/gone: no such folder"),
        (
            (model, "--tasks", "a", "--no-compare"),
            'finetune evaluate needs lm-eval; pip install -e ".[evaluate]" in a clone of the repository',
        ),
    ):
        assert main(["evaluate", *arguments]) == 2
        assert capsys.readouterr().err.splitlines()[-1].startswith(message)


def test_the_run_keeps_its_results_where_output_cannot_be_written(tmp_path: Path) -> None:
    location = ModelLocation(name=str(tmp_path), kind="model", run=tmp_path)
    result = BenchmarkResult(task="a", metric="acc", trained=0.5)
    gone = tmp_path / "gone" / "x.json"  # removed while the model was measured
    with pytest.raises(
        UserError,
        match=f"{gone}: cannot be written: No such file or directory; the results are above",
    ):
        list(keep_results([result], location, str(gone)))
    assert read_benchmarks(tmp_path) == [result]


def test_results_are_merged_and_shown(tmp_path: Path) -> None:
    first = BenchmarkResult(
        task="a", metric="acc", trained=0.5, base=0.25, higher_is_better=True, samples=10, model="m"
    )
    other = BenchmarkResult(
        task="b", metric="perplexity", trained=9.5, higher_is_better=False, model="m", num_fewshot=5
    )
    again = BenchmarkResult(task="a", metric="acc", trained=0.75, trained_stderr=0.02, model="m")
    assert merge_results([first, other], [again]) == [other, again]
    write_benchmarks(tmp_path / "benchmarks.json", [first, other])
    assert read_benchmarks(tmp_path) == [first, other]
    assert benchmark_table([first, other]) == (
        ("Task", "Metric", "Base", "Trained", "Change", "Asked"),
        [
            ("a", "acc", "0.25", "0.5", "+0.25", "10"),
            ("b", "perplexity (lower is better)", "", "9.5", "", "5-shot"),
        ],
    )
    assert benchmark_table([again])[0] == ("Task", "Metric", "Trained")
    card = add_evaluation("# m\n\n## Recipe\n\nr\n\n## Use\n\nu\n", [first])
    assert card.index("## Recipe") < card.index("## Evaluation") < card.index("## Use")
    assert add_evaluation(card, [first]) == card
    for damaged in ("[]", '{"results": [1, {"task": "a"}]}', "{", '{"results": 3}'):
        (tmp_path / "benchmarks.json").write_text(damaged)
        assert read_benchmarks(tmp_path) == []
