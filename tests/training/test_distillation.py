"""Distillation through the whole command: the losses, divergences and gradients of a plain loop in every layout, packed or not;
resumed exactly; and teachers that cannot teach are refused in a sentence."""

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import finetune
from finetune.checkpoint.resume import find_changed_inputs, fingerprint_inputs
from finetune.config.compatibility import find_problems, refuse_problems
from finetune.config.layout import Sharding
from finetune.config.reader import read_recipe
from finetune.config.schema import Recipe
from finetune.data.prepare import prepare_data
from finetune.data.tokenizer import load_tokenizer
from finetune.distributed.world import World
from finetune.errors import UserError
from finetune.models.load import Teacher
from finetune.plan import run_spec
from finetune.plan.plan import make_plan
from finetune.training.lifecycle import make_objectives
from finetune.training.objectives import distill
from finetune.training.objectives.distill import read_teacher_facts, teacher_flop_per_token
from finetune.training.objectives.policy import PolicyObjective
from finetune.training.screens import describe_teacher, last_screen
from finetune.training.watch import SignalListener
from tests.conftest import make_chat, make_model, slow_but
from tests.plan.traced import allocated_peak
from tests.ranks import run_python
from tests.training import reference
from tests.training.layouts import steps_of, train_all, write_config

ROWS, STEPS = 26, 3
# Teachers: of another family and size, with more rows than tokens; tied. In 4 bits bitsandbytes itself computes wrongly on a CPU
# where the length of a row is no multiple of 64 (models/quantized_weights.py).
TEACHERS: dict[str, dict[str, Any]] = {
    "wide": {"model_type": "qwen3", "hidden_size": 128, "num_hidden_layers": 3, "vocab_size": 320},
    "tied": {"hidden_size": 48, "tie_word_embeddings": True},
}
# The recipe's keys by mode. Every step trains on all rows, so that packing changes nothing.
MODES: dict[str, dict[str, Any]] = {
    "jsd": {"teacher": "wide", "distill_beta": 0.4, "temperature": 1.5, "distill_alpha": 0.6},
    "reverse": {
        "teacher": "tied",
        "distill_beta": 1.0,
        "label_smoothing": 0.1,
        "distill_alpha": 0.5,
    },
    "top": {
        "teacher": "wide",
        "distill_beta": 0.4,
        "temperature": 1.5,
        "distill_alpha": 0.6,
        "distill_top_k": 5,
    },
    "every": {
        "teacher": "wide",
        "distill_beta": 0.4,
        "temperature": 1.5,
        "distill_alpha": 0.6,
        "distill_top_k": 999,
    },
    "forward": {
        "teacher": "wide",
        "distill_beta": 0.0,
        "teacher_load_in_4bit": True,
        "use_peft": True,
        "lora_r": 4,
    },
}
PADDED: dict[str, Any] = {"packing": False, "global_batch_size": ROWS}
EVERY: list[tuple[int, str, str, str]] = [
    (1, "single", "jsd", "packed"),
    (2, "full_shard", "jsd", "padded"),
    (2, "offload", "jsd", "padded"),
    (2, "ddp", "reverse", "packed"),
    (2, "full_shard", "forward", "packed"),
    (1, "single", "top", "packed"),
    (2, "full_shard", "top", "padded"),
    (1, "single", "every", "packed"),
    (1, "single", "reverse", "packed"),
    (3, "ddp", "top", "packed"),
    (3, "full_shard", "jsd", "packed"),
    (3, "ddp", "reverse", "padded"),
    (4, "hybrid", "reverse", "padded"),
]
QUICK = [(1, "single", mode, "packed") for mode in ("jsd", "top", "every")]
QUICK += [(2, "full_shard", "top", "padded")]
HELD_OUT = [(1, "single", "jsd", "packed"), (2, "full_shard", "jsd", "padded")]
HELD_OUT += [(3, "full_shard", "jsd", "packed")]
FSDP2 = Sharding(layout="fsdp2")
Expected = dict[str, list[dict[str, float]]]


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A recipe for each mode, whose packed rows hold everything in one step."""
    folder = tmp_path_factory.mktemp("distillation")
    data = make_chat(folder / "chat.jsonl", rows=ROWS)
    student = make_model(
        folder / "student", hidden_size=72, num_hidden_layers=2, initializer_range=0.1
    )
    for seed, (name, config) in enumerate(TEACHERS.items(), 1):
        make_model(folder / name, seed=seed, initializer_range=0.2, **config)
    common = {
        "method": "distill",
        "model_name_or_path": str(student),
        "datasets": [{"path": str(data)}],
        "eval_datasets": [{"path": str(data)}],
        "dataset_cache_dir": str(folder / "cache"),
        "max_length": 512,
        "global_batch_size": 3,
        "max_steps": STEPS,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "export_at_end": False,
    }
    paths = {}
    for mode, keys in MODES.items():
        paths[mode] = folder / f"{mode}.yaml"
        teacher = {"teacher_model_name_or_path": str(folder / keys["teacher"])}
        own = {key: value for key, value in keys.items() if key != "teacher"}
        paths[mode].write_text(yaml.safe_dump(common | teacher | own))
    return paths


@pytest.fixture(scope="module")
def runs(recipes: dict[str, Path], slow_too: bool) -> Callable[..., Path]:
    """(ranks, layout, mode, rows) -> the run's folder. One process forks the ranks of all of them."""
    folder = next(iter(recipes.values())).parent
    configs = {
        layout: write_config(folder, layout) for _, layout, _, _ in EVERY if layout != "hybrid"
    }
    hybrid = write_config(folder / "student", "full_shard", mesh=(2, 2))
    wanted: dict[int, list[Any]] = {}
    for ranks, layout, mode, rows in EVERY if slow_too else QUICK:
        own = {"output_dir": f"{folder}/{ranks}-{layout}-{mode}-{rows}"}
        own |= PADDED | {"per_device_train_batch_size": 9} if rows == "padded" else {}
        own |= {"save_steps": 1, "save_total_limit": 9} if ranks == 1 else {}
        given = [f"{key}={value}" for key, value in own.items()]
        wanted.setdefault(ranks, []).append(
            [str(recipes[mode]), str(configs.get(layout, hybrid)), given]
        )
    first = folder / "1-single-jsd-packed" / "checkpoints" / "step-00000001"
    again = [f"output_dir={folder}/resumed", f"resume_from_checkpoint={first}"]
    wanted[1].append([str(recipes["jsd"]), str(configs["single"]), again])
    (folder / "runs.json").write_text(json.dumps(wanted))
    script = Path(__file__).with_name("distilled_on_ranks.py")
    done = run_python([str(script), str(folder / "runs.json")], timeout=400)
    logs = "\n".join(log.read_text()[-3000:] for log in sorted(folder.glob("*.log")))
    assert done.returncode == 0, done.stderr[-3000:] + logs
    return lambda *which: folder / "-".join(map(str, which))


def plain_losses(recipe_path: Path) -> list[dict[str, float]]:
    """Loss, gradient norm, divergence and cross entropy of every step: whole logits, F.kl_div, one document at a time."""
    recipe = read_recipe(str(recipe_path))
    method = recipe.method
    in_4_bits = replace(recipe.quantization, load_in_4bit=True, bnb_4bit_use_double_quant=True)
    teacher = AutoModelForCausalLM.from_pretrained(
        method.teacher_model_name_or_path,
        dtype=torch.float32,
        attn_implementation="eager",
        quantization_config=reference.by_bitsandbytes(
            in_4_bits if method.teacher_load_in_4bit else recipe.quantization
        ),
    ).train()  # there is no dropout
    lines: list[dict[str, float]] = []

    def loss_of(documents: reference.Documents) -> Tensor:
        trained = torch.cat([labels for _, labels, _ in documents]) != -100
        logits, targets = (
            torch.cat(part)[trained] for part in list(zip(*documents, strict=True))[:2]
        )
        theirs = torch.cat([each for _, _, each in documents if each is not None])[
            trained, : logits.shape[1]
        ]
        student, theirs = ((each / method.temperature).log_softmax(-1) for each in (logits, theirs))
        if method.distill_top_k is not None:  # of its likeliest tokens, and of all others together
            likeliest = theirs.topk(min(method.distill_top_k, theirs.shape[1])).indices
            others = torch.ones_like(theirs, dtype=torch.bool).scatter(1, likeliest, False)
            parts = [
                (each.gather(1, likeliest), each.masked_fill(~others, -torch.inf))
                for each in (student, theirs)
            ]
            is_whole = likeliest.shape[1] == theirs.shape[1]
            student, theirs = (
                top if is_whole else torch.cat((top, rest.logsumexp(1, keepdim=True)), 1)
                for top, rest in parts
            )
        beta = method.distill_beta
        if beta in (0, 1):
            to, of = (student, theirs) if beta == 0 else (theirs, student)
            divergence = F.kl_div(to, of, reduction="batchmean", log_target=True)
        else:
            mixed = ((1 - beta) * student.exp() + beta * theirs.exp()).log()
            of_teacher = F.kl_div(mixed, theirs, reduction="batchmean", log_target=True)
            of_student = F.kl_div(mixed, student, reduction="batchmean", log_target=True)
            divergence = beta * of_teacher + (1 - beta) * of_student
        cross_entropy = F.cross_entropy(
            logits, targets, label_smoothing=recipe.optimization.label_smoothing
        )
        lines.append({"kl": divergence.item(), "cross_entropy": cross_entropy.item()})
        return method.distill_alpha * divergence + (1 - method.distill_alpha) * cross_entropy

    steps = reference.train(recipe_path, other=teacher, loss_of=loss_of)
    return [
        {"loss": loss, "grad_norm": norm} | line
        for (loss, norm), line in zip(steps, lines, strict=True)
    ]


@pytest.fixture(scope="module")
def expected(recipes: dict[str, Path], slow_too: bool) -> Expected:
    modes = {mode for _, _, mode, _ in (EVERY if slow_too else QUICK)}
    return {mode: plain_losses(recipes[mode]) for mode in modes}


@pytest.mark.slow
def test_the_plain_loop_learns(expected: Expected) -> None:
    for mode, lines in expected.items():
        assert lines[-1]["loss"] < 0.97 * lines[0]["loss"], mode
    assert expected["forward"][-1]["kl"] < expected["forward"][0]["kl"]


@pytest.mark.parametrize(("ranks", "layout", "mode", "rows"), slow_but(QUICK, EVERY))
def test_every_layout_and_packing_gives_the_numbers_of_a_plain_loop(
    ranks: int, layout: str, mode: str, rows: str, runs: Callable[..., Path], expected: Expected
) -> None:
    lines = steps_of(runs(ranks, layout, mode, rows))
    assert len(lines) == STEPS
    for line, truth in zip(lines, expected[mode], strict=True):
        assert {key: line[key] for key in truth} == pytest.approx(truth, rel=1e-5), line["step"]


@pytest.mark.parametrize(("ranks", "layout", "mode", "rows"), slow_but(QUICK, HELD_OUT))
def test_held_out_rows_have_a_divergence_and_a_cross_entropy_too(
    ranks: int, layout: str, mode: str, rows: str, runs: Callable[..., Path], expected: Expected
) -> None:
    """What is held out here is what is trained on, so that before the first step it has the first step's numbers."""
    log = (runs(ranks, layout, mode, rows) / "metrics.jsonl").read_text().splitlines()
    first, last = (line for line in map(json.loads, log) if "eval_loss" in line)
    for key in ("loss", "kl", "cross_entropy"):
        assert first[f"eval_{key}"] == pytest.approx(expected[mode][0][key], rel=1e-5)
    assert last["eval_loss"] < first["eval_loss"]


def test_a_stored_teacher_is_a_bound_from_below_and_checksummed(
    recipes: dict[str, Path], runs: Callable[..., Path], expected: Expected
) -> None:
    for top, every, whole in zip(
        *(expected[mode] for mode in ("top", "every", "jsd")), strict=True
    ):
        assert 0.2 * whole["kl"] < top["kl"] < 0.99 * whole["kl"] and every["kl"] == pytest.approx(
            whole["kl"], rel=1e-5
        )
    assert "teacher asked before training: its 5 likeliest of each of " in runs_log(
        runs(1, "single", "top", "packed")
    )
    recipe = read_recipe(str(recipes["top"]))
    found = prepare_data(recipe, load_tokenizer(recipe.model, recipe.data), reference.Alone())
    folder = next(
        path.parent
        for path in (recipes["top"].parent / "cache").glob(
            "teacher-*/training/*-of-00001-*-ids.npy"
        )
        if np.load(path, allow_pickle=False).shape[1] == 5
    )
    known = distill._open_stored(folder, found.train, recipe)  # type: ignore[arg-type]
    assert known.rows == 262
    assert distill._find_missing_steps(known, found.train) == []  # type: ignore[arg-type]
    scores = known.pieces[0][1]
    assert scores.dtype == np.float32 and np.exp(scores).sum(1) == pytest.approx(1, abs=1e-5)
    damaged = next(folder.glob("*-scores.npy"))
    content = bytearray(damaged.read_bytes())
    content[-9] ^= 1
    damaged.write_bytes(content)
    known = distill._open_stored(folder, found.train, recipe)  # type: ignore[arg-type]
    assert distill._find_missing_steps(known, found.train) == [*range(found.train.steps_per_epoch)]  # type: ignore[arg-type]


def test_a_teacher_holds_a_piece_of_what_it_finds_and_not_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What torch's allocator holds, against the plan's bound; and the files have all, in order."""
    steps, tokens, k, piece = 64, 1000, 5, 1 << 18
    monkeypatch.setattr(distill, "STORED_PIECE_BYTES", piece)
    monkeypatch.setattr(run_spec, "STORED_PIECE_BYTES", piece)
    recipe: Any = SimpleNamespace(method=SimpleNamespace(distill_top_k=k))
    world: Any = SimpleNamespace(
        rank=0, size=1, local_rank=0, is_main=True, device=torch.device("cpu"),
        sum=lambda values: values, gather=lambda value, group: [value], broadcast=lambda value, group: value,
    )  # fmt: skip

    class Micro(SimpleNamespace):
        def to(self, device: torch.device) -> "Micro":
            return self

    def make_batch(step: int) -> Any:
        micro = Micro(
            inputs=step, labels=torch.ones(1, tokens), trained_positions=torch.arange(tokens),
            example_ids=[step],
        )  # fmt: skip
        return SimpleNamespace(micro_batches=[micro])

    trained = np.full(steps, tokens)
    batches: Any = SimpleNamespace(
        step_batch=make_batch, rows_of=lambda step: [np.array([step])],
        examples=SimpleNamespace(trained=trained),
    )  # fmt: skip
    model = nn.Linear(1, 262)
    model.get_output_embeddings = lambda: model  # type: ignore[assignment]
    teacher: Any = SimpleNamespace(
        model=model,
        find_top=lambda step, rows, k: (torch.full((tokens, k), step), torch.ones(tokens, k + 1)),
    )
    folder = tmp_path / "teacher"
    held = allocated_peak(
        lambda: distill._store(
            teacher, folder, batches, range(steps), model, recipe, SignalListener(), world
        )
    )
    spec: Any = SimpleNamespace(recipe=recipe, accumulation=1, tokens=tokens)
    of_a_forward = 2 * 8 * tokens * k  # its ids are int64 until they are kept
    assert held <= run_spec._count_unwritten(spec) + of_a_forward
    written = [np.load(path) for path in sorted(folder.glob("*-ids.npy"))]
    assert len(written) > 1
    assert (np.concatenate(written)[:, 0] == np.repeat(np.arange(steps), tokens)).all()


def test_a_stored_teacher_that_a_signal_stops_computes_only_the_rest(
    tiny_recipe: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped in the training data and then in the held-out data, a run has the losses of one that was never stopped."""
    make_model(tmp_path / "wide", seed=3, hidden_size=48)
    asked = list[int]()  # for each start, how many micro-batches the teacher was asked of
    stop_at = list[int]()  # for each start, at which of them it gets SIGTERM
    find_top = Teacher.find_top

    def find_and_signal(*arguments: Any) -> Any:
        asked[-1] += 1
        if asked[-1] == stop_at[-1]:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)  # the listener is another thread
        return find_top(*arguments)

    monkeypatch.setattr(Teacher, "find_top", find_and_signal)
    losses = []
    for name, stops in (("whole", ()), ("stopped", (2, 14))):
        recipe = tiny_recipe(
            method="distill",
            teacher_model_name_or_path=str(tmp_path / "wide"),
            distill_top_k=5,
            eval_split_size=8,
            packing=False,
            max_steps=4,
            output_dir=str(tmp_path / name),
            dataset_cache_dir=str(tmp_path / f"{name}-cache"),
            export_at_end=False,
        )
        for stop in stops:
            asked.append(0)
            stop_at.append(stop)
            with pytest.raises(finetune.Preempted, match=r"the same command computes the rest$"):
                finetune.train(recipe)
        asked.append(0)
        stop_at.append(0)
        lines = finetune.train(recipe).metrics
        losses.append([(e.get("loss"), e.get("eval_loss")) for e in lines if "phase" not in e])
    # a step is finished: of four in training, of two held out
    assert asked == [24, 4, 14, 6]
    assert losses[0] == losses[1]


def test_a_disk_without_room_for_a_stored_teacher_is_refused_before_the_teacher_runs(
    tiny_recipe: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One byte less than the files' ids and scores take is too little."""
    make_model(tmp_path / "wide", seed=3, hidden_size=48)

    def write_recipe(name: str) -> Path:
        return tiny_recipe(
            method="distill",
            teacher_model_name_or_path=str(tmp_path / "wide"),
            distill_top_k=5,
            eval_split_size=8,
            max_steps=1,
            output_dir=str(tmp_path / name),
            dataset_cache_dir=str(tmp_path / f"{name}-cache"),
            export_at_end=False,
        )

    recipe = read_recipe(str(write_recipe("whole")))
    plan = make_plan(recipe, Sharding(layout="single", mixed_precision="no"), ranks=1)
    assert any("take 44 bytes of disk a trained token" in remark for remark in plan.remarks)
    finetune.train(write_recipe("whole"))
    written = (tmp_path / "whole-cache").glob("teacher-*/*/*.npy")
    needed = sum(np.load(path).nbytes for path in written if not path.stem.endswith("examples"))
    disk = SimpleNamespace(disk_usage=lambda _: SimpleNamespace(free=needed - 1))
    monkeypatch.setattr(distill, "shutil", disk)
    with pytest.raises(
        UserError, match=r"5 likeliest of each of [\d,]+ trained tokens take .*cache"
    ):
        finetune.train(write_recipe("refused"))
    assert not [*(tmp_path / "refused-cache").glob("teacher-*")]
    disk.disk_usage = lambda _: SimpleNamespace(free=needed)
    finetune.train(write_recipe("fits"))


def runs_log(run: Path) -> str:
    """What the ranks of its number have printed."""
    return (run.parent / f"{run.name.partition('-')[0]}.log").read_text()


def test_a_resumed_run_has_the_same_numbers_and_a_checkpoint_holds_no_teacher(
    runs: Callable[..., Path],
) -> None:
    folders = runs(1, "single", "jsd", "packed"), runs("resumed")
    whole, resumed = map(steps_of, folders)
    numbers = ("step", "loss", "grad_norm", "kl", "cross_entropy")
    assert [{key: line[key] for key in numbers} for line in resumed] == [
        {key: line[key] for key in numbers} for line in whole[1:]
    ]
    of_last = [run / "checkpoints" / f"step-{STEPS:08d}" for run in folders]
    ours, again = (
        {
            name: value
            for file in sorted((checkpoint / "model").glob("*.safetensors"))
            for name, value in load_file(file).items()
        }
        for checkpoint in of_last
    )
    student = load_file(runs("student") / "model.safetensors")
    assert ours.keys() == student.keys()
    assert all(torch.equal(ours[name], again[name]) for name in ours)
    recorded = json.loads((of_last[0] / "state.json").read_text())["inputs"]
    assert recorded["teacher"]


def test_the_content_of_a_teacher_is_compared_when_a_run_resumes(
    recipes: dict[str, Path], tmp_path: Path
) -> None:
    teacher = shutil.copytree(recipes["jsd"].parent / "tied", tmp_path / "teacher")
    recipe = read_recipe(str(recipes["jsd"]), [f"teacher_model_name_or_path={teacher}"])
    tokenizer = load_tokenizer(recipe.model, recipe.data)
    data = prepare_data(recipe, tokenizer, reference.Alone())

    class Alone(reference.Alone):
        is_main = True

        def gather(self, value: Any, group: Any = None) -> list[Any]:
            return [value]

        def broadcast(self, value: Any, group: Any = None) -> Any:
            return value

    before = fingerprint_inputs(recipe, tokenizer, data, Alone())  # type: ignore[arg-type]
    make_model(teacher, seed=9, **TEACHERS["tied"])
    after = fingerprint_inputs(recipe, tokenizer, data, Alone())  # type: ignore[arg-type]
    (sentence,) = find_changed_inputs(before, after, [])
    assert (
        sentence
        == "teacher_model_name_or_path: the same name is given, but its config.json or weights have changed"
    )
    assert not find_changed_inputs(before, after, ["teacher_model_name_or_path: a -> b"])


def test_a_teacher_that_cannot_teach_is_refused_in_a_sentence(
    recipes: dict[str, Path], tmp_path: Path
) -> None:
    recipe = read_recipe(str(recipes["jsd"]))
    tokenizer = load_tokenizer(recipe.model, recipe.data)

    def judge(own: Recipe, sharding: Sharding) -> None:
        refuse_problems(
            find_problems(own, sharding, None, 2, teacher=read_teacher_facts(own, tokenizer))
        )

    judge(recipe, FSDP2)

    def refusal(teacher: Path, sharding: Sharding = FSDP2, in_4_bits: bool = False) -> str:
        with pytest.raises(UserError) as error:
            keys = [
                f"teacher_model_name_or_path={teacher}",
                f"teacher_load_in_4bit={str(in_4_bits).lower()}",
            ]
            own = read_recipe(str(recipes["jsd"]), keys)
            judge(own, sharding)
        assert "\n" not in str(error.value)
        return str(error.value)

    good = recipes["jsd"].parent / "wide"
    small = make_model(
        tmp_path / "small", vocab_size=250, bos_token_id=None, eos_token_id=None, pad_token_id=None
    )
    assert "FSDP1 gathers no single unit" in refusal(
        good, Sharding(layout="fsdp1", source="my.yaml")
    )
    assert "its embedding has 250 rows, but the tokenizer has 262 tokens" in refusal(small)

    def with_tokenizer(name: str, change: Callable[[dict[str, Any]], None]) -> Path:
        folder = shutil.copytree(good, tmp_path / name)
        content = json.loads((folder / "tokenizer.json").read_text())
        change(content)
        (folder / "tokenizer.json").write_text(json.dumps(content))
        return folder

    def swap(content: dict[str, Any]) -> None:
        vocabulary = content["model"]["vocab"]
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]

    swapped = refusal(with_tokenizer("swapped", swap))
    assert (
        "its tokenizer is not that of the model that is trained: 'a' is token 64 only of the model's"
        in swapped
    )
    lowered = refusal(
        with_tokenizer("lowered", lambda content: content.update(normalizer={"type": "Lowercase"}))
    )
    assert (
        "the tokens are the same, but a text is cut into others (normalizer in tokenizer.json)"
        in lowered
    )
    file = refusal(good / "config.json")
    assert (
        file.startswith("teacher_model_name_or_path: ")
        and "is a file; give a folder with config.json" in file
    )
    empty = with_tokenizer("empty", lambda content: None)
    (empty / "model.safetensors").unlink()
    without = f"teacher_model_name_or_path: {empty}: no *.safetensors file is here; give a folder that holds the weights"
    assert refusal(empty).startswith(without)
    assert "runs/none has not been trained here, or not to its end; do that first" in refusal(
        Path("runs/none/export")
    )


def test_a_teacher_is_named_by_its_key_and_its_positions_are_compared(
    recipes: dict[str, Path], tmp_path: Path
) -> None:
    world = World(0, 1, 0, 1, torch.device("cpu"), Sharding(layout="single"), None)  # type: ignore[arg-type]
    objectives = make_objectives(
        nn.Module(), read_recipe(str(recipes["jsd"])), None, {}, SignalListener(), world
    )  # type: ignore[arg-type]
    positions = objectives.training.teacher.model.config.max_position_embeddings  # type: ignore[attr-defined]
    assert len(describe_teacher(objectives.training, positions)) == 1
    warning = describe_teacher(objectives.training, positions + 1)[1]
    assert (
        f"but the teacher was made for {positions:,} positions (max_position_embeddings of its config)"
        in warning
    )
    rollouts: Any = None
    sampled = PolicyObjective(
        read_recipe(str(recipes["jsd"])), rollouts, teacher=objectives.training.teacher
    )  # type: ignore[attr-defined]
    assert describe_teacher(sampled, positions + 1) == describe_teacher(
        objectives.training, positions + 1
    )
    assert (
        teacher_flop_per_token(sampled, 64) == teacher_flop_per_token(objectives.training, 64) > 0
    )

    def refusal(teacher: Path) -> str:
        with pytest.raises(UserError) as error:
            recipe = read_recipe(str(recipes["jsd"]), [f"teacher_model_name_or_path={teacher}"])
            make_objectives(nn.Module(), recipe, None, {}, SignalListener(), world)  # type: ignore[arg-type]
        return str(error.value)

    spoiled = make_model(tmp_path / "spoiled")
    weights = load_file(spoiled / "model.safetensors")
    save_file(
        {name: tensor * torch.nan for name, tensor in weights.items()},
        spoiled / "model.safetensors",
        {"format": "pt"},
    )
    message = refusal(spoiled)
    assert (
        message.startswith("teacher_model_name_or_path: ")
        and "its outputs are not finite" in message
    )


def test_a_runs_folder_is_no_model(recipes: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    recipe = read_recipe(
        str(recipes["jsd"]),
        [f"model_name_or_path={tmp_path / 'run'}", "tokenizer_name_or_path=null"],
    )
    with pytest.raises(
        UserError, match="is a run's folder; name its export/, or one of its checkpoints/"
    ):
        load_tokenizer(recipe.model, recipe.data)


def test_a_distillation_from_its_own_model_says_at_its_end_that_nothing_was_learned(
    tiny_recipe: Callable[..., Path], tiny_llama: Callable[..., Path], tmp_path: Path
) -> None:
    """Copied to another folder, since the same one is refused; under another teacher nothing is said."""
    model = tiny_llama()
    shutil.copytree(model, tmp_path / "copy")
    make_model(tmp_path / "wide", seed=3, hidden_size=48)
    runs = []
    for teacher in ("copy", "wide"):
        keys = {
            "method": "distill",
            "teacher_model_name_or_path": str(tmp_path / teacher),
            "export_at_end": False,
        }
        recipe = tiny_recipe(
            teacher, **keys, output_dir=str(tmp_path / f"run-{teacher}"), max_steps=2
        )
        runs.append((recipe, write_config(tmp_path, "single"), []))
    train_all(tmp_path, runs, ranks=1)
    copy, wide = (
        last_screen(tmp_path / f"run-{teacher}", 2, has_teacher=True)
        for teacher in ("copy", "wide")
    )
    assert copy[0].startswith(
        "warning the teacher gave the model's own probabilities from the first step on"
    )
    assert not any(line.startswith("warning") for line in wide)


LEARNS = (
    "distill_alpha=0.5",
    "use_peft=true load_in_4bit=true",
    "teacher_load_in_4bit=true",
    "quantization_aware_training=int8-int4",
)


@pytest.mark.parametrize("more", LEARNS)
@pytest.mark.parametrize("teacher", ["name", "folder"])
def test_a_teacher_that_is_the_student_is_refused_unless_there_is_something_to_learn(
    teacher: str,
    more: str,
    tiny_recipe: Callable[..., Path],
    tiny_llama: Callable[..., Path],
    tmp_path: Path,
) -> None:
    """By its name on the hub, or by another way to its folder. A student that is rounded learns what that costs."""
    model = "some/model" if teacher == "name" else str(tiny_llama())
    (tmp_path / "inside").mkdir()
    named = model if teacher == "name" else f"{tmp_path}/inside/../{Path(model).name}"
    keys = [f"model_name_or_path={model}", "method=distill", f"teacher_model_name_or_path={named}"]
    sentence = f"teacher_model_name_or_path: {re.escape(named)} is the model that is trained, so that there is nothing to"
    with pytest.raises(UserError, match=sentence):
        read_recipe(str(tiny_recipe()), keys)
    read_recipe(str(tiny_recipe()), [*keys, *more.split()])
    read_recipe(str(tiny_recipe()), [*keys[:2], f"teacher_model_name_or_path={tmp_path}/inside"])
