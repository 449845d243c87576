"""The library: the command's losses bit for bit, and losses and rows that a user brings."""

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, AutoTokenizer

import finetune
from benchmarks.api_page import KEY_TYPES, PAGE, make_key_types, make_page
from finetune.config.layout import Sharding
from finetune.constants import loss_chunk_tokens
from finetune.training.lifecycle import encode_prompt
from finetune.training.objectives.objective import Measured
from finetune.training.watch import uninterrupted
from tests.conftest import make_model
from tests.ranks import ROOT, launch_ranks, run_command
from tests.session_on_ranks import ROWS
from tests.training.layouts import steps_of, write_config

CASES = [pytest.param((1, "full_shard"), marks=pytest.mark.slow), (2, "full_shard")]
CASES += [pytest.param((2, "ddp"), marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[1]}-{case[0]}")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the runs of session_on_ranks.py have left, on one rank and on two."""
    ranks, layout = request.param
    folder = tmp_path_factory.mktemp(f"session-{ranks}-{layout}")
    arguments = [str(folder), str(write_config(folder, layout))]
    launch_ranks(
        Path(__file__).with_name("session_on_ranks.py"), arguments, ranks=ranks, timeout=300
    ).check()
    return folder


@pytest.fixture
def found(folder: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return read


def test_train_and_a_loop_over_a_session_give_the_commands_losses_bit_for_bit(
    folder: Path, found: dict[str, Any]
) -> None:
    """The loop is stopped after two steps and continued by another session. metrics.jsonl has nine digits; the weights below
    are compared in all their bits."""
    command = [(line["loss"], line["grad_norm"]) for line in steps_of(folder / "command")]
    assert len(command) == 5
    assert [(line["loss"], line["grad_norm"]) for line in steps_of(folder / "train")] == command
    by_hand = [
        tuple(float(f"{value:.9g}") for value in step)
        for step in found["begun"] + found["continued"]
    ]
    assert by_hand == command


def test_all_three_export_the_same_weights(folder: Path) -> None:
    exports = [
        (folder / name / "export" / "model.safetensors").read_bytes()
        for name in ("command", "train", "loop")
    ]
    assert exports[0] == exports[1] == exports[2]


def test_a_users_dpo_is_the_methods(found: dict[str, Any]) -> None:
    for own, ours in zip(found["dpo by hand"], found["dpo"], strict=True):
        assert own == pytest.approx(ours, rel=1e-6)
    assert found["dpo"][-1] != found["dpo"][0]


def test_hooks_of_a_recipe_see_all_ranks(folder: Path) -> None:
    """A metric is the mean over all answers, to the last bit but metrics.jsonl's nine digits; a callback gets the line of all ranks."""
    lines = [
        json.loads(line) for line in (folder / "hooks" / "metrics.jsonl").read_text().splitlines()
    ]
    samples = [
        json.loads(line) for line in (folder / "hooks" / "samples.jsonl").read_text().splitlines()
    ]
    for step in (0, 2):
        scores = [
            1 / (1 + abs(len(s["answer"]) - len(s["expected"])))
            for s in samples
            if s["step"] == step
        ]
        assert len(scores) == 5
        logged = next(line for line in lines if line["step"] == step and "exact_match" in line)
        assert logged["metrics/closeness"] == float(f"{math.fsum(scores) / 5:.9g}")
    noted = json.loads((folder / "hooks" / "noted.json").read_text())
    trained = next(line for line in lines if line["step"] == 2 and "loss" in line)
    assert (noted["step"], float(f"{noted['loss']:.9g}")) == (2, trained["loss"])


def test_what_a_callback_raises_on_one_rank_ends_all_after_a_save(
    folder: Path, found: dict[str, Any]
) -> None:
    ranks = json.loads((folder / "refused" / "environment.json").read_text())["ranks"]
    assert found["refused"].endswith(
        f"Refuses.on_step: ValueError: not on rank {ranks - 1} (step 1 is saved)"
    )
    assert [path.name for path in (folder / "refused").glob("checkpoints/step-*")] == [
        "step-00000001"
    ]


class Largest(TorchDispatchMode):
    """Finds the largest tensor that any operation within it makes, in numbers."""

    numbers = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        for each in tree_leaves(made):
            self.numbers = max(self.numbers, each.numel() if isinstance(each, Tensor) else 0)
        return made


def test_a_users_dpo_never_holds_all_logits(tmp_path: Path) -> None:
    """Measured: the largest tensor of the reference, the forward and the backward is a chunk's, not a row's logits."""
    shape = dict.fromkeys(("hidden_size", "intermediate_size"), 16) | {
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    model = shape | {"model_type": "llama", "vocab_size": 65_536, "max_position_embeddings": 2048}
    folder = str(ROOT / "recipes" / "quickstart")
    keys = {
        "model_config": model,
        "tokenizer_name_or_path": folder,
        "method": "dpo",
        "max_length": 2048,
    }
    recipe = finetune.load_recipe(
        **keys, per_device_train_batch_size=1, output_dir=tmp_path / "run"
    )
    rows = [{"question": "Count.", "chosen": "seven " * 600, "rejected": "eight " * 600}]

    def own(found: Tensor, batch: finetune.MicroBatch) -> Tensor:
        chosen, rejected = torch.zeros(2).index_add(0, batch.trained_documents, found - before[0])
        return -torch.nn.functional.logsigmoid(0.1 * (chosen - rejected))

    with (
        finetune.Session(recipe, str(write_config(tmp_path, "full_shard"))) as session,
        Largest() as largest,
    ):
        batch = session.batch(rows)
        before = session.log_probabilities(batch)
        loss = session.forward_backward(batch, own).loss
        weight = session.model.get_input_embeddings().weight.numel()
    assert loss == pytest.approx(math.log(2), rel=1e-5)  # the model still is its own reference
    logits = batch.trained_tokens * model["vocab_size"]
    print(
        f"largest tensor {4 * largest.numbers / 2**20:.0f} MiB, logits {4 * logits / 2**20:.0f} MiB, weight {4 * weight / 2**20:.0f} MiB"
    )
    assert batch.trained_tokens > 1000
    assert largest.numbers < logits / 2
    assert largest.numbers <= max(
        loss_chunk_tokens(model["vocab_size"], "cpu") * model["vocab_size"], weight
    )


SCRIPT = """
from pathlib import Path

from torch import Tensor

import finetune


class Notify(finetune.Callback):
    def on_log(self, event: finetune.Event) -> None:
        print(event.step, event.metrics["loss"])


def focal(log_probabilities: Tensor, batch: finetune.MicroBatch) -> Tensor:
    return -((1 - log_probabilities.detach().exp()) ** 2 * log_probabilities).sum()


def main() -> Path:
    recipe: finetune.Recipe = finetune.load_recipe("quickstart", max_steps=20, output_dir="runs/loop")
    with finetune.Session(recipe) as session:
        session.load()
        for batch in session.batches():
            loss, metrics = session.forward_backward(batch, focal)
            update = session.optim_step(learning_rate=1e-3)
            print(update.step, loss + update.grad_norm, metrics.get("kl"), session.sample(["Hello?"])[0].text.upper())
        checkpoint = session.save()
    run: finetune.RunResult = finetune.train(recipe, callbacks=[Notify()])
    print(finetune.chat(run).ask("What is two?"), checkpoint.name, str(finetune.make_plan(recipe)), run.metrics[0])
    return session.export()
"""


@pytest.mark.slow  # where mypy has no cache it reads the whole package first, for half a minute
def test_a_users_typed_script_is_checked_strictly(tmp_path: Path) -> None:
    """The package is typed (py.typed), and what it gives back is not Any: a wrong use is an error."""
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "wrong.py").write_text(
        "import finetune\nwith finetune.Session(finetune.load_recipe()) as session:\n    session.optim_step(rate=1.0).stop\n"
        "    session.sample(['a']) + 1\nfinetune.load_recipe(learning_rte=1.0)\nfinetune.load_recipe(packing='yes')\n"
    )
    options = (
        "--strict",
        f"--config-file={ROOT / 'pyproject.toml'}",
        f"--cache-dir={ROOT / '.mypy_cache'}",
    )
    said, problems, _ = pytest.importorskip("mypy.api").run(
        [*options, f"{tmp_path}/script.py", f"{tmp_path}/wrong.py"]
    )
    assert "script.py" not in said, said + problems
    errors = [
        line.rpartition("[")[2]
        for line in said.splitlines()
        if "wrong.py" in line and ": error:" in line
    ]
    assert errors == ["call-arg]", "attr-defined]", "operator]", "call-arg]", "arg-type]"], said


def test_rows_in_memory_are_trained_on_as_transformers_would(
    folder: Path, found: dict[str, Any]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder / "train" / "export")
    model = AutoModelForCausalLM.from_pretrained(folder / "train" / "export", dtype=torch.float32)
    losses, tokens = [], 0
    for row in ROWS:
        prompt, whole = (
            tokenizer.apply_chat_template(messages, add_generation_prompt=add, return_dict=True)[
                "input_ids"
            ]
            for messages, add in ((row["messages"][:1], True), (row["messages"], False))
        )
        labels = [-100] * len(prompt) + whole[len(prompt) :]
        output = model(input_ids=torch.tensor([whole]), labels=torch.tensor([labels]))
        count = len(whole) - len(prompt)
        losses.append(output.loss * count)
        tokens += count
    loss = torch.stack(losses).sum() / tokens
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    assert found["rows"]["whole"][0] == pytest.approx([loss.item(), norm.item()], rel=1e-5)


def test_columns_of_rows_reach_the_loss_token_by_token(folder: Path, found: dict[str, Any]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder / "train" / "export")
    model = AutoModelForCausalLM.from_pretrained(folder / "train" / "export", dtype=torch.float32)
    total, tokens = 0.0, 0
    for place, row in enumerate(ROWS):
        ids = tokenizer.apply_chat_template(row["messages"], return_dict=True)["input_ids"]
        count = len(tokenizer.encode(row["messages"][1]["content"], add_special_tokens=False)) + 1
        with torch.no_grad():
            scores = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
        for token in range(count):
            position = len(ids) - count + token
            total -= (0.5 + place) * (1 + token) * scores[position - 1, ids[position]].item()
        tokens += count
    assert found["rows"]["weighted"] == pytest.approx(total / tokens, rel=1e-5)


def test_a_loss_that_fails_on_one_rank_fails_on_all_and_the_next_call_is_in_step(
    found: dict[str, Any],
) -> None:
    assert "loss: ZeroDivisionError" in found["rows"]["fault"]


def test_prompts_are_scored_as_transformers_scores_them(
    folder: Path, found: dict[str, Any]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / "train" / "export", dtype=torch.float32)
    assert len(found["rows"]["prompts"]) == len(ROWS)
    for ids, scores in found["rows"]["prompts"]:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        expected = logits.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
        assert scores == pytest.approx(expected, rel=1e-4, abs=1e-5)
    for (ids, _), row in zip(found["rows"]["prompts"], found["rows"]["rows"], strict=True):
        assert row["input_ids"][: len(ids)] == ids
        assert row["labels"] == [-100] * len(ids) + row["input_ids"][len(ids) :]


def test_answers_are_those_of_transformers(folder: Path, found: dict[str, Any]) -> None:
    """A prompt as text and as messages is one prompt."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "train" / "export")
    model = AutoModelForCausalLM.from_pretrained(folder / "train" / "export", dtype=torch.float32)
    options = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
    prompt = tokenizer.apply_chat_template(ROWS[2]["messages"][:1], **options)
    output = model.generate(**prompt, max_new_tokens=4, do_sample=False)
    answer = tokenizer.decode(
        output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True
    ).strip()
    assert found["rows"]["answers"] == [answer, answer]


def test_a_session_that_is_refused_leaves_the_process_free_for_the_next(tmp_path: Path) -> None:
    keys = {"output_dir": str(tmp_path / "run"), "max_steps": 1}
    broken = tmp_path / "broken.jsonl"
    broken.write_text("no row\n")
    for _ in range(2):
        with pytest.raises(finetune.UserError, match=r"broken\.jsonl:1"):
            finetune.Session(
                finetune.load_recipe("quickstart", datasets=[{"path": str(broken)}], **keys),
                "single",
            )
    with finetune.Session(finetune.load_recipe("quickstart", **keys), "single") as session:
        assert next(session.batches()).step == 0
        with pytest.raises(finetune.UserError, match="a session, or an Accelerator, is open"):
            finetune.Session(finetune.load_recipe("quickstart", **keys), "single")


def test_ctrl_c_while_data_are_read_leaves_the_process_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    recipe = finetune.load_recipe("quickstart", output_dir=tmp_path / "run")
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("finetune.training.opening.prepare_data", interrupt)
        finetune.Session(recipe, "single")
    finetune.Session(recipe, "single").close()


def test_another_training_in_the_folder_is_not_exported_in_place_of_this_one(
    tmp_path: Path,
) -> None:
    recipe = finetune.load_recipe(
        "quickstart", datasets=[], output_dir=tmp_path / "run", exact_match_samples=0
    )
    with finetune.Session(recipe, "single") as session:
        for _ in range(2):
            session.forward_backward(ROWS)
            session.optim_step(learning_rate=1e-3)
        session.save()
    with finetune.Session(recipe, "single") as session:
        session.forward_backward(ROWS)
        session.optim_step(learning_rate=1e-3)
        with pytest.raises(
            finetune.UserError, match=r"holds step 2 of another training.*call load\(\) first"
        ):
            session.save()
        with pytest.raises(finetune.UserError, match=r"call session\.save"):
            session.export()
    with finetune.Session(recipe, "single") as session:
        assert session.load().step == 2
        session.forward_backward(ROWS)
        session.optim_step(learning_rate=1e-3)
        assert session.save().name == "step-00000003"


def test_answers_are_drawn_at_a_temperature_and_draw_nothing_of_the_runs_random_numbers(
    tmp_path: Path,
) -> None:
    recipe = finetune.load_recipe(
        "quickstart", datasets=[], output_dir=tmp_path / "run", exact_match_samples=0
    )
    prompts = ["What is two in digits?"] * 8
    with finetune.Session(recipe, "single") as session:
        state = torch.get_rng_state()
        drawn = session.sample(prompts, max_new_tokens=12, temperature=1.0)
        assert len(set(drawn)) == 8, "random weights give about equal probabilities"
        assert session.sample(prompts, max_new_tokens=12, temperature=1.0) == drawn, (
            "by the seed and the step"
        )
        assert len({each.token_ids for each in session.sample(prompts, max_new_tokens=12)}) == 1, (
            "greedily"
        )
        together = session.sample(prompts[:1], max_new_tokens=12, temperature=1.0, num_samples=8)
        assert together == drawn
        other = session.sample(prompts, max_new_tokens=12, temperature=1.0, seed=7)
        assert other != drawn
        assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_log_probabilities_of_answers_are_those_of_a_plain_forward(
    tmp_path: Path, temperature: float
) -> None:
    recipe = finetune.load_recipe(
        "quickstart", datasets=[], output_dir=tmp_path / "run", exact_match_samples=0
    )
    prompts = ["What is two in digits?", "Hello, what is forty-two in digits?"]
    with finetune.Session(
        recipe, Sharding(layout="single", mixed_precision="no", use_cpu=True)
    ) as session:
        answers = session.sample(prompts, max_new_tokens=10, temperature=temperature, num_samples=2)
        for place, each in enumerate(answers):
            prompt = encode_prompt(prompts[place // 2], session.tokenizer)
            ids = torch.tensor([[*prompt, *each.token_ids]])
            with torch.no_grad():
                logits = session.model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
            of_all = (logits / (temperature or 1.0)).log_softmax(-1)
            expected = of_all.gather(-1, torch.tensor(each.token_ids)[:, None])[:, 0]
            torch.testing.assert_close(
                torch.tensor(each.log_probabilities), expected, rtol=0, atol=1e-5
            )
            assert (
                each.text
                == session.tokenizer.decode(each.token_ids, skip_special_tokens=True).strip()
            )


def test_a_prompt_is_text_or_messages(tmp_path: Path) -> None:
    """Parts are joined, as in rows. Without a chat template Python's text of a value was asked."""
    recipe = finetune.load_recipe(
        "quickstart", datasets=[], output_dir=tmp_path / "run", exact_match_samples=0
    )
    text: Any = {"type": "text", "text": "What is two"}
    parts = [{"role": "user", "content": [text, {"type": "text", "text": " in digits?"}]}]
    image = [{"role": "user", "content": [text, {"type": "image", "path": "a.png"}]}]
    wrong: list[tuple[Any, str]] = [
        (given, "a list of messages") for given in (None, 3, ["hi"], {})
    ]
    with finetune.Session(recipe, "single", saves=False) as session:
        whole, joined = session.sample(["What is two in digits?", parts], 2)
        assert whole == joined
        for given, sentence in (*wrong, (image, "which is not read here")):
            with pytest.raises(finetune.UserError, match=sentence):
                session.sample([given])
        session.tokenizer.chat_template = None
        (plain,) = session.sample(["What is two"], 2)
        assert session.tokenizer.decode(plain.prompt_ids, skip_special_tokens=True) == text["text"]
        for given, sentence in (*wrong, (parts, "no chat template for messages")):
            with pytest.raises(finetune.UserError, match=sentence):
                session.sample([given])


def test_an_answer_ends_at_a_text_of_ones_own(tmp_path: Path) -> None:
    recipe = finetune.load_recipe(
        "quickstart", datasets=[], output_dir=tmp_path / "run", exact_match_samples=0
    )
    with finetune.Session(recipe, "single") as session:
        (whole,) = session.sample(["Hello?"], max_new_tokens=24, temperature=1.0)
        stop = next(letter for letter in whole.text[4:] if letter.isalnum())
        (cut,) = session.sample(["Hello?"], max_new_tokens=24, temperature=1.0, stop=[stop])
        assert whole.token_ids[: len(cut.token_ids)] == cut.token_ids
        assert stop in session.tokenizer.decode(cut.token_ids)
        assert stop not in session.tokenizer.decode(cut.token_ids[:-1])
        assert len(cut.log_probabilities) == len(cut.token_ids) < len(whole.token_ids)


@pytest.mark.parametrize("kind", ["rows", "stream", "data"])
def test_what_is_cut_is_printed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], kind: str
) -> None:
    """Of rows of one's own, of a stream and of data: once, as `finetune.prepare` finds it."""
    rows = [{"text": f"{number} {'two in digits ' * 9}"} for number in range(8)]
    keys: dict[str, Any] = {"max_length": 16, "overlength": "truncate", "global_batch_size": 8}
    keys |= {"model_name_or_path": make_model(tmp_path / "model"), "output_dir": tmp_path / "run"}
    keys |= {"datasets": rows, "dataset_cache_dir": tmp_path / "cache", "max_steps": 1}
    report = finetune.prepare(finetune.load_recipe(**keys)).report
    (expected,) = [each for each in report.findings if each.severity == "warning"]
    assert expected.name == "truncated"
    keys |= {"rows": {"datasets": []}, "stream": {"streaming": True}, "data": {}}[kind]
    with finetune.Session(finetune.load_recipe(**keys), "single", saves=False) as session:
        for _ in range(2):
            batches = [session.batch(rows)] if kind == "rows" else list(session.batches())
            assert [batch.tokens for batch in batches] == [8 * 16]
        if kind != "rows":
            assert (expected.name, expected.what) in [
                (each.name, each.what) for each in session.data.report.findings
            ]
    printed = [line for line in capfd.readouterr().err.splitlines() if "warning: " in line]
    assert len(printed) == 1
    assert printed[0].startswith(f"{kind}  warning: truncated: in 8")
    assert expected.what in printed[0]


def test_whoever_joins_batches_of_the_data_in_one_update_is_warned_of_what_repeats(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Once; not for a batch with two losses, nor for rows of one's own."""
    keys: dict[str, Any] = {"datasets": ROWS, "max_length": 64, "output_dir": tmp_path / "run"}
    keys |= {"global_batch_size": 1, "model_name_or_path": make_model(tmp_path / "model")}
    recipe = finetune.load_recipe(**keys)
    with finetune.Session(recipe, "single") as session:
        first, second, third, *_ = session.batches()
        own = session.batch(ROWS)
        printed = []
        for joined in ([first, first], [second, third], [own, own], [second, third]):
            for batch in joined:
                session.forward_backward(batch)
            session.optim_step(1e-3)
            printed.append("load() would repeat data" in capfd.readouterr().err)
            if len(printed) == 2:
                session.save()
        assert printed == [False, True, False, False]
    with finetune.Session(recipe, "single") as session:
        session.load()
        again = next(session.batches()).micro_batches[0].example_ids
        assert again == third.micro_batches[0].example_ids


def test_the_gradient_norm_of_an_update_that_fp16_skips_is_not_finite(tmp_path: Path) -> None:
    """And `is_skipped` is False, as Update says."""
    keys: dict[str, Any] = {"datasets": ROWS, "max_length": 64, "output_dir": tmp_path / "run"}
    recipe = finetune.load_recipe(model_name_or_path=make_model(tmp_path / "model"), **keys)
    with finetune.Session(recipe, "single", saves=False) as session:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
        session.world.accelerator.scaler = scaler
        before = [parameter.clone() for parameter in session.model.parameters()]
        session.forward_backward(next(iter(session.batches())))
        update = session.optim_step(1e-3)
        assert not update.is_skipped and not math.isfinite(update.grad_norm)
        assert scaler.get_scale() == 2.0**126
        for one, other in zip(before, session.model.parameters(), strict=True):
            assert torch.equal(one, other)


def test_an_update_at_a_loss_scale_is_that_without_one(tmp_path: Path) -> None:
    """Also its gradient norm, and where gradients are clipped."""
    keys: dict[str, Any] = {"datasets": ROWS, "max_length": 64, "max_grad_norm": 0.1}
    recipe = finetune.load_recipe(model_name_or_path=make_model(tmp_path / "model"), **keys)
    norms, updated = [], []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=1024.0)):
        with finetune.Session(recipe, "single", saves=False) as session:
            session.world.accelerator.scaler = scaler
            session.forward_backward(next(iter(session.batches())))
            norms.append(session.optim_step(1e-3).grad_norm)
            updated.append([parameter.detach() for parameter in session.model.parameters()])
    assert norms[1] == pytest.approx(norms[0], rel=1e-5) and norms[0] > 0.1
    for one, other in zip(*updated, strict=True):
        torch.testing.assert_close(one, other)


def test_a_loss_that_is_not_finite_leaves_the_loss_scale_as_it_is(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"datasets": ROWS, "max_length": 64, "on_nonfinite": "skip"}
    recipe = finetune.load_recipe(model_name_or_path=make_model(tmp_path / "model"), **keys)
    with finetune.Session(recipe, "single", saves=False) as session:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        session.world.accelerator.scaler = scaler
        batch = session.batch(ROWS)
        session.forward_backward(batch, lambda scores, _: scores.sum() * float("nan"))
        assert session.optim_step(1e-3).is_skipped
        session.forward_backward(batch)
        assert not session.optim_step(1e-3).is_skipped and scaler.get_scale() == 1024.0


def test_a_batch_is_computed_before_its_loss_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU nothing waits for the device until then."""
    keys: dict[str, Any] = {"datasets": ROWS, "max_length": 64, "output_dir": tmp_path / "run"}
    recipe = finetune.load_recipe(model_name_or_path=make_model(tmp_path / "model"), **keys)
    with finetune.Session(recipe, "single") as session:
        batch = session.batch(ROWS)
        expected = session.forward_backward(batch).loss
        with monkeypatch.context() as patched:
            for reader in ("tolist", "item", "__float__", "__bool__", "__int__"):
                patched.setattr(Tensor, reader, refuse_to_read)
            measured = session.forward_backward(batch)
            with pytest.raises(AssertionError, match="is read"):
                measured.loss  # noqa: B018
        loss, metrics = measured
        assert (loss, metrics) == (expected, {})
        session.optim_step(1e-3)


def refuse_to_read(tensor: Tensor) -> None:
    raise AssertionError("a tensor is read")


def test_a_mistake_is_one_sentence(tmp_path: Path) -> None:
    recipe = finetune.load_recipe(
        "quickstart", datasets=[], output_dir=tmp_path / "run", exact_match_samples=0
    )
    losses: dict[str, Any] = {
        "float": lambda found, batch: 1.0,
        r"shape \(\d+,\)": lambda found, batch: -found,
    }
    losses |= {"without a graph": lambda found, batch: found.detach().sum()}
    with finetune.Session(recipe, "single") as session:
        for mistake, sentence in (
            (lambda: session.optim_step(), "call forward_backward first"),
            (lambda: session.forward_backward([]), "a list of mappings is expected"),
            (lambda: session.forward_backward(["text"]), "a list of mappings is expected"),
            (
                lambda: session.forward_backward([{"messages": "no list"}]),
                "row 1: messages: a list",
            ),
            (lambda: session.batches(), "names no data"),
            (lambda: session.sample("What?"), "a list of prompts is expected"),
            (
                lambda: session.sample(["What?"], temperature=-1),
                "sample: temperature: a number of at least 0",
            ),
            (
                lambda: session.sample(["What?"], num_samples=0),
                "sample: num_samples: a whole number of at least 1",
            ),
            (
                lambda: session.sample(["What?"], max_new_tokens=0),
                "sample: max_new_tokens: a whole number of at least 1",
            ),
            (lambda: session.sample(["What?"], stop="."), "sample: stop: a list of texts"),
            (
                lambda: session.forward_backward(ROWS, lambda found, batch: batch.columns["good"]),
                r"the column 'good', .*session.batch\(rows, columns=\['good'\]\)",
            ),
            (
                lambda: session.forward_backward(ROWS, "cross-entropy"),
                "'cross-entropy': a function is expected, or cross_entropy",
            ),
            (
                lambda: session.forward_backward(ROWS, lambda found: found),
                "loss: TypeError: .*takes 1 positional argument",
            ),
            (
                lambda: session.forward_backward(ROWS, lambda found, _: 1 / 0),
                r"test_session.py:\d+: loss: ZeroDivisionError",
            ),
        ):
            with pytest.raises(finetune.UserError, match=sentence):
                mistake()
        for returned, loss in losses.items():
            with pytest.raises(finetune.UserError, match=f"returned .*{returned}"):
                session.forward_backward(ROWS, loss)
        session.forward_backward(ROWS)
        with pytest.raises(finetune.UserError, match="give learning_rate"):
            session.optim_step()
        for move in (session.save, session.load):
            with pytest.raises(finetune.UserError, match="call optim_step first"):
                move()
        for rate in (-1.0, float("nan"), float("inf")):
            with pytest.raises(finetune.UserError, match="a number of at least 0"):
                session.optim_step(learning_rate=rate)
        assert session.optim_step(learning_rate=1e-3).step == 1
        with pytest.raises(
            finetune.UserError, match=r"after step 1 is not saved; call session.save"
        ):
            session.export()
        assert session.load().step == 1  # there is no checkpoint
        with pytest.raises(finetune.UserError, match="after step 1 is not saved"):
            session.export()
    pair = {"prompt": "2+2?", "chosen": "4", "rejected": "5"}
    (tmp_path / "pairs.jsonl").write_text(f"{json.dumps(pair)}\n" * 4)
    keys = {
        "method": "dpo",
        "model_name_or_path": make_model(tmp_path / "model"),
        "max_length": 64,
        "max_steps": 1,
    }
    keys |= {
        "output_dir": tmp_path / "dpo",
        "datasets": [{"path": str(tmp_path / "pairs.jsonl")}],
        "model_config": None,
    }
    keys |= {
        "dataset_cache_dir": tmp_path / "cache",
        "tokenizer_name_or_path": None,
        "eval_datasets": [],
    }
    with finetune.Session(
        finetune.load_recipe("quickstart", exact_match_samples=0, **keys), "single"
    ) as session:
        assert session.forward_backward(next(session.batches())).loss == pytest.approx(math.log(2))
        for own in ([pair], session.batch([pair])):  # whose references are not known
            with pytest.raises(
                finetune.UserError, match="dpo is prepared with the recipe's data; give datasets"
            ):
                session.forward_backward(own)
    keys = {
        "optim_in_backward": True,
        "max_grad_norm": None,
        "output_dir": tmp_path / "in-backward",
    }
    leaves_nothing = pytest.raises(finetune.UserError, match="optim_in_backward leaves nothing")
    with (
        finetune.Session(finetune.load_recipe("quickstart", **keys), "single") as session,
        leaves_nothing,
    ):
        session.forward_backward(ROWS)


def test_a_session_without_a_folder_says_so(tmp_path: Path) -> None:
    keys = {"datasets": [], "exact_match_samples": 0, "output_dir": tmp_path / "run"}
    with finetune.Session(
        finetune.load_recipe("quickstart", **keys), "single", saves=False
    ) as session:
        for act in (session.save, session.load, session.export, lambda: session.folder):
            with pytest.raises(finetune.UserError, match="was opened with saves=False"):
                act()
    assert not (tmp_path / "run").exists()


def test_a_schedule_that_has_ended_is_no_rate_of_0(tmp_path: Path) -> None:
    """A step beyond it would change nothing. A rate that is given, or one that never ends, is one there too."""
    keys: dict[str, Any] = {"datasets": [], "exact_match_samples": 0}
    keys["output_dir"] = tmp_path / "run"
    recipe = finetune.load_recipe("quickstart", max_steps=1, warmup_steps=0, **keys)
    with finetune.Session(recipe, "single", saves=False) as session:
        for step, rate in ((1, None), (2, 0.5)):
            session.forward_backward(ROWS)
            if rate:
                with pytest.raises(finetune.UserError, match="the schedule ends at step 1"):
                    session.optim_step()
            update = session.optim_step(rate)
            assert (update.step, update.learning_rate > 0) == (step, True)
    keys["lr_scheduler_type"] = "constant"
    recipe = finetune.load_recipe("quickstart", max_steps=1, warmup_steps=0, **keys)
    with finetune.Session(recipe, "single", saves=False) as session:
        for _ in range(2):
            session.forward_backward(ROWS)
            assert session.optim_step().learning_rate == recipe.optimization.learning_rate


def test_numbers_of_numpy_and_torch_are_numbers(tmp_path: Path) -> None:
    """In a recipe and in a session: the same keys, answers and rates as by Python's."""
    keys = {"datasets": [], "exact_match_samples": 0, "output_dir": tmp_path / "run"}
    plain: dict[str, Any] = {"max_steps": 5, "learning_rate": 0.5, "packing": False}
    others: dict[str, Any] = {
        "max_steps": np.int64(5), "learning_rate": torch.tensor(0.5), "packing": np.bool_(False)
    }  # fmt: skip
    recipe = finetune.load_recipe("quickstart", **keys, **others)
    assert recipe == finetune.load_recipe("quickstart", **keys, **plain)
    with finetune.Session(recipe, "single") as session:
        expected = session.sample(["Hello?"], 3, 0.5, num_samples=2)
        options: Any = (np.int64(3), np.float32(0.5))
        assert session.sample(["Hello?"], *options, num_samples=np.int32(2)) == expected  # type: ignore[arg-type]
        session.forward_backward(ROWS)
        update = session.optim_step(np.float32(0.25))  # type: ignore[arg-type]
    assert update.learning_rate == 0.25


@pytest.mark.parametrize(
    "keys",
    [
        {"use_peft": True, "lora_dropout": 0.5},
        {"neftune_noise_alpha": 5.0},
        {"method": "masked_diffusion", "mask_token": 3},
        {"method": "early_exit", "layer_dropout": 0.5, "layer_dropout_schedule": "uniform"},
    ],
    ids=lambda keys: [*keys][-1],
)
def test_each_batch_of_a_step_draws_its_own_dropout(tmp_path: Path, keys: dict[str, Any]) -> None:
    """Two of the same rows are no batch that counts twice; one is the same at every try, and another in the next step."""
    recipe = finetune.load_recipe(
        model_name_or_path=make_model(tmp_path / "model"), output_dir=tmp_path / "run",
        max_length=64, **keys,
    )  # fmt: skip
    with finetune.Session(recipe, "single", saves=False) as session:
        batch = session.batch(ROWS)

        def add_up(batches: int) -> Tensor:
            for _ in range(batches):
                session.forward_backward(batch)
            gradients = session.take_gradients().tensors
            return torch.cat([each.flatten() for each in gradients if each is not None])

        first, again, both = add_up(1), add_up(1), add_up(2)
        session.forward_backward(batch)
        session.optim_step(learning_rate=0.0)
        later = add_up(1)
    assert torch.equal(first, again)
    for other in (both - first, later):
        assert (other - first).norm() > 0.1 * first.norm()


PAIR = {"prompt": "2+2?", "chosen": "4", "rejected": "5", "margin": 0.5}
TO_RETRIEVE = {"query": "two?", "positive": "It is 2.", "negative": "It is 3."}
CLASS = {"text": "two", "label": "even"}


@pytest.mark.parametrize(
    ("keys", "row", "what"),
    [
        ({"method": "reward"}, PAIR, "a reward model"),
        ({"method": "embed"}, TO_RETRIEVE, "an embedding model"),
        ({"method": "classify", "labels": ["odd", "even"]}, CLASS, "a classifier"),
    ],
    ids=lambda value: value.get("method") if isinstance(value, dict) else None,
)
def test_what_predicts_no_tokens_has_no_probabilities_of_them(
    tmp_path: Path, keys: dict[str, Any], row: dict[str, Any], what: str
) -> None:
    """The numbers in the labels of scores were read as tokens. A class is one of a head's outputs, as a token is."""
    recipe = finetune.load_recipe(
        model_name_or_path=make_model(tmp_path / "model"), output_dir=tmp_path / "run",
        max_length=64, datasets=[row] * 4, dataset_cache_dir=tmp_path / "cache", **keys,
    )  # fmt: skip

    def sums(log_probabilities: Tensor, batch: finetune.MicroBatch) -> Tensor:
        return -log_probabilities.sum()

    with finetune.Session(recipe, "single", saves=False) as session:
        batch = session.batch([row] * 2)
        makes = pytest.raises(finetune.UserError, match=f"predicted tokens, and .* makes {what}")
        with makes:
            session.sample(["two?"])
        if what == "a classifier":
            expected = session.forward_backward(batch).loss
            assert session.forward_backward(batch, sums).loss == pytest.approx(expected)
            (found,) = session.log_probabilities(batch)
            assert -found.sum().item() / 2 == pytest.approx(expected)
            return
        with makes:
            session.log_probabilities(batch)
        with makes:
            session.forward_backward(batch, sums)


@pytest.mark.parametrize(
    ("keys", "row"),
    [
        ({"method": "orpo"}, PAIR),
        ({"method": "reward"}, PAIR),
        ({"method": "embed"}, TO_RETRIEVE),
        ({"method": "distill"}, ROWS[2]),
    ],
    ids=lambda value: value.get("method"),
)
def test_a_method_that_needs_only_rows_trains_without_datasets(
    tmp_path: Path, keys: dict[str, Any], row: dict[str, Any]
) -> None:
    """With the loss of a session that has data, whose objective is made with it."""
    keys = {
        "model_name_or_path": make_model(tmp_path / "model"), "output_dir": tmp_path / "run",
        "max_length": 64, "dataset_cache_dir": tmp_path / "cache", **keys,
    }  # fmt: skip
    if keys["method"] == "distill":
        keys["teacher_model_name_or_path"] = make_model(tmp_path / "teacher", seed=1)
    losses = []
    for data in ({"datasets": [row] * 4}, {}):
        recipe = finetune.load_recipe(**keys, **data)
        with finetune.Session(recipe, "single", saves=False) as session:
            losses.append(tuple(session.forward_backward([row] * 2)))
    assert losses[0] == losses[1]


def test_what_fails_leaves_no_gradient_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss that raises in its second micro-batch, one that is nan, and Ctrl-C in the forward: the next step is a step without them."""
    keys = {
        "per_device_train_batch_size": 4,
        "output_dir": tmp_path / "run",
        "exact_match_samples": 0,
    }
    found: list[tuple[float, float]] = []
    calls: list[int] = []

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    def fails(log_probabilities: Tensor, batch: finetune.MicroBatch) -> Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return -log_probabilities.sum() * (float("nan") if len(calls) > 2 else 1.0)

    with finetune.Session(
        finetune.load_recipe("quickstart", **keys), str(write_config(tmp_path, "full_shard"))
    ) as session:
        batch = next(session.batches())
        with pytest.raises(KeyboardInterrupt):
            session.forward_backward(batch, fails)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Measured, "add_up", interrupted)
            session.forward_backward(batch)
        with pytest.raises(finetune.UserError, match="call forward_backward first"):
            session.optim_step()
        with pytest.raises(finetune.UserError, match="the loss or gradient is not finite"):
            session.forward_backward(batch, fails)
            session.optim_step()
        with pytest.raises(
            finetune.UserError, match="learning_rate: a number of at least 0 is expected"
        ):
            session.forward_backward(batch)
            session.optim_step("1e-3")  # type: ignore[arg-type]
        found.append((session.optim_step(learning_rate=0.0).grad_norm, session.progress.step))
        session.forward_backward(batch, "cross_entropy")
        found.append((session.optim_step(learning_rate=0.0).grad_norm, session.progress.step))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    assert [step for _, step in found] == [1, 2]
    for closed in (
        lambda: session.forward_backward(batch),
        session.optim_step,
        session.save,
        session.load,
    ):
        with pytest.raises(finetune.UserError, match="the session is closed"):
            closed()


def test_a_step_on_rows_of_the_scripts_own_leaves_the_epoch_of_the_data(tmp_path: Path) -> None:
    keys = {"output_dir": tmp_path / "run", "exact_match_samples": 0}
    with finetune.Session(finetune.load_recipe("quickstart", **keys), "single") as session:
        session.forward_backward(next(session.batches()))
        session.optim_step()
        epoch = session.progress.epoch
        session.forward_backward(session.batch(ROWS))
        session.optim_step()
        assert session.progress.step == 2 and session.progress.epoch == epoch > 0


@pytest.mark.parametrize("name", ["optim_step", "save", "load"])
def test_out_of_memory_is_explained_wherever_the_model_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The first update makes the optimizer's state, and a save of fresh parameters makes it too."""

    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    keys = {"output_dir": tmp_path / "run", "exact_match_samples": 0, "async_save": False}
    with finetune.Session(finetune.load_recipe("quickstart", **keys), "single") as session:
        session.forward_backward(next(session.batches()))
        if name == "optim_step":
            monkeypatch.setattr(session.optimizer, "step", fail)
        else:
            session.optim_step()
            session.save()
            monkeypatch.setattr("finetune.checkpoint.save.get_optimizer_state", fail)
            monkeypatch.setattr("finetune.checkpoint.resume.get_optimizer_state", fail)
        with pytest.raises(finetune.UserError, match=r"^rank 0: out of memory: CUDA"):
            getattr(session, name)()


def test_a_recipe_is_given_by_its_name() -> None:
    assert str(finetune.make_plan("quickstart")) == str(
        finetune.make_plan(finetune.load_recipe("quickstart"))
    )
    assert {"Session", "load_recipe", "train"} <= {*dir(finetune)}


def test_a_script_that_gives_something_else_is_told_what(tmp_path: Path) -> None:
    given: Any = 7
    for act in (finetune.train, finetune.Session, finetune.prepare, finetune.make_plan):
        with pytest.raises(finetune.UserError, match="7 is no recipe; give load_recipe"):
            act(given)
    one: Any = finetune.Callback()
    with pytest.raises(finetune.UserError, match=r"a list is expected, such as \[Notify\(\)\]"):
        finetune.train(
            finetune.load_recipe("quickstart", output_dir=tmp_path / "run"), callbacks=one
        )


def test_an_interrupt_waits_for_the_update() -> None:
    done = []
    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell's background process ignores it
    try:
        with pytest.raises(KeyboardInterrupt), uninterrupted():
            os.kill(os.getpid(), signal.SIGINT)
            done.append("the rest of it")
    finally:
        signal.signal(signal.SIGINT, before)
    assert done


def test_a_run_is_trained_in_a_thread(tmp_path: Path, tiny_recipe: Callable[..., Path]) -> None:
    """As a server or a worker of a queue calls it: only the main thread gets signals."""
    recipe = str(tiny_recipe(max_steps=2))
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(finetune.train, recipe, "single").result()
    assert [line["step"] for line in run.metrics if "loss" in line] == [1, 2]
    assert run.export is not None


@pytest.mark.slow
def test_the_pages_examples_run(tmp_path: Path) -> None:
    page = (
        (ROOT / "docs" / "api.md")
        .read_text()
        .replace("max_steps=20", "max_steps=2, exact_match_samples=2")
    )
    script = "\n".join(block.partition("```")[0] for block in page.split("```python\n")[1:])
    (tmp_path / "script.py").write_text(script)
    command = ("python", str(tmp_path / "script.py"))
    cache = {"HF_HOME": str(tmp_path / "cache")}
    finished = run_command(command, cwd=tmp_path, env=cache, timeout=240)
    assert finished.returncode == 0, finished.stderr
    log = (tmp_path / "runs" / "short" / "metrics.jsonl").read_text()
    assert "rewards/short" in log, "the function of the script has paid"
    assert (tmp_path / "runs" / "loop" / "export" / "model.safetensors").is_file()


def test_the_page_lists_what_is_public() -> None:
    """After a change of a public docstring or a key: python benchmarks/api_page.py"""
    assert PAGE.read_text() == make_page()
    assert KEY_TYPES.read_text() == make_key_types()


def test_importing_it_loads_no_torch() -> None:
    script = (
        "import sys, finetune; finetune.load_recipe('quickstart'); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)


def test_every_public_name_is_there_and_is_typed() -> None:
    stub = (ROOT / "finetune" / "__init__.pyi").read_text()
    for name in finetune.__all__:
        assert getattr(finetune, name).__doc__, name
        assert f"import {name} as {name}\n" in stub
