"""Tokens that are added: a model grown by transformers itself and a plain loop give the same losses in every layout, a killed
run resumes, and plain transformers opens the export, which answers with the new tokens and stops at them.
"""

import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune.cli import main
from finetune.config.pretrained import Vocabulary
from finetune.config.reader import read_recipe
from finetune.data.tokenizer import load_tokenizer, refuse_unnamed_tokens
from finetune.errors import UserError
from finetune.models.embedding import refuse_frozen_tokens
from tests.conftest import make_model, make_tokenizer, slow_but
from tests.ranks import start_ranks
from tests.training import reference
from tests.training.layouts import assert_bit_equal, steps_of, train_all, write_config, write_recipe

STEPS, KNOWN, TOKENS, ROWS = 30, 262, 266, 272
ANSWERS = dict.fromkeys(("one?", "two?", "three?"), "<call>x")
MODES: dict[str, dict[str, Any]] = {
    "tied": {"tied": True},
    "untied": {"tied": False},
    "lora": {"tied": False, "use_peft": True, "lora_r": 4},
    "lora-tied": {"tied": True, "use_peft": True, "lora_r": 4},
}
RUNS = (
    ("full_shard", "tied"),
    ("ddp", "tied"),
    ("FULL_SHARD", "untied"),
    ("full_shard", "lora"),
    ("ddp", "lora-tied"),
)
QUICK = (("full_shard", "lora"),)


def slow_runs(runs: Iterable[tuple[str, str]]) -> list[Any]:
    """Parameters: those of `runs` that are not in QUICK are slow."""
    return [pytest.param(*run, marks=[] if run in QUICK else pytest.mark.slow) for run in runs]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, slow_too: bool) -> Path:
    """Models, recipes, and the runs of two ranks: `folder / f"{layout}-{mode}"`, and `resumed` from the middle of one."""
    folder = tmp_path_factory.mktemp("tokens")
    rows = [{"messages": [_turn("user", q), _turn("assistant", a)]} for q, a in ANSWERS.items()]
    (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for tied in (True, False):
        make_model(folder / f"model-{tied}", tie_word_embeddings=tied)
    runs = []
    for mode, given in MODES.items():
        keys = {
            "chat_template": "chatml",
            "added_tokens": ["<|im_start|>", "<|im_end|>", "<call>"],
            "special_tokens": {"pad_token": "<fill>"},
            "eot_tokens": ["<|im_end|>"],
            "pad_vocab_to_multiple_of": 16,
            "global_batch_size": 3,
            "max_steps": STEPS,
            "save_steps": 10,
            "save_total_limit": None,
            "learning_rate": 1e-2,
        }
        keys |= {key: value for key, value in given.items() if key != "tied"}
        if keys.get("use_peft"):  # whose new special tokens must be named
            keys["added_tokens"] = [*keys["added_tokens"], "<fill>"]
        write_recipe(
            folder / f"{mode}.yaml",
            folder / f"model-{given['tied']}",
            folder / "chat.jsonl",
            **keys,
        )
    wanted = RUNS if slow_too else QUICK
    runs = [_run(folder, layout, mode, f"{layout}-{mode}") for layout, mode in wanted]
    start = folder / "full_shard-lora" / "checkpoints" / "step-00000020"
    runs.append(_run(folder, "full_shard", "lora", "resumed", f"resume_from_checkpoint={start}"))
    (folder / "printed.txt").write_text(train_all(folder, runs, ranks=2, timeout=400))
    return folder


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _run(
    folder: Path, layout: str, mode: str, name: str, *keys: str
) -> tuple[Path, Path, list[str]]:
    return (
        folder / f"{mode}.yaml",
        write_config(folder, layout),
        [f"output_dir={folder / name}", *keys],
    )


@pytest.fixture(scope="module")
def expected(folder: Path) -> Callable[[str], list[tuple[float, float]]]:
    """(loss, gradient norm) of a plain loop on the model as transformers grows it, its new rows set to the mean."""
    found: dict[str, list[tuple[float, float]]] = {}

    def train(mode: str) -> list[tuple[float, float]]:
        if mode not in found:
            keys = yaml.safe_load((folder / f"{mode}.yaml").read_text())
            grown = folder / f"grown-{mode}"
            _grow(Path(keys["model_name_or_path"])).save_pretrained(grown)
            make_tokenizer().save_pretrained(grown)
            whole = ["embed_tokens", "lm_head"] if keys.get("use_peft") else []
            recipe = folder / f"grown-{mode}.yaml"
            recipe.write_text(
                yaml.safe_dump(keys | {"model_name_or_path": str(grown), "modules_to_save": whole})
            )
            found[mode] = reference.train(recipe)
        return found[mode]

    return train


def _grow(folder: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(TOKENS, pad_to_multiple_of=16, mean_resizing=False)
    with torch.no_grad():
        for part in {model.get_input_embeddings(), model.get_output_embeddings()}:
            part.weight[KNOWN:] = (
                AutoModelForCausalLM.from_pretrained(folder)
                .get_submodule(
                    "lm_head" if part is model.get_output_embeddings() else "model.embed_tokens"
                )
                .weight.mean(0)
            )
    assert model.config.vocab_size == ROWS
    return model


@pytest.mark.parametrize(
    ("layout", "mode"), slow_runs(run for run in RUNS if run[1] != "lora-tied")
)
def test_every_layout_trains_as_a_plain_loop_on_a_model_that_transformers_has_grown(
    layout: str, mode: str, folder: Path, expected: Callable[[str], list[tuple[float, float]]]
) -> None:
    lines = steps_of(folder / f"{layout}-{mode}")
    for line, (loss, norm) in list(zip(lines, expected(mode), strict=True))[:12]:
        assert line["loss"] == pytest.approx(loss, rel=1e-4), f"step {line['step']}"
        assert line["grad_norm"] == pytest.approx(norm, rel=1e-3), f"step {line['step']}"
    assert lines[-1]["loss"] < 0.1 * lines[0]["loss"]


def test_a_run_resumes_exactly(folder: Path) -> None:
    assert_bit_equal(folder / "full_shard-lora", folder / "resumed", STEPS, from_step=20)


@pytest.mark.slow
def test_a_killed_run_resumes_on_another_number_of_ranks(folder: Path) -> None:
    mode, name = "lora", "killed"
    listing = folder / f"{name}.json"
    listing.write_text(json.dumps([[str(part) if isinstance(part, Path) else part for part in _run(folder, "full_shard", mode, name)]]))  # fmt: skip
    ranks = start_ranks(Path(__file__).with_name("runs_on_ranks.py"), [str(listing)], ranks=2)
    deadline = time.monotonic() + 120
    while not (folder / name / "checkpoints" / "step-00000010" / "manifest.json").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    ranks.kill()
    train_all(folder, [_run(folder, "full_shard", mode, name)], ranks=1)
    whole = {line["step"]: line["loss"] for line in steps_of(folder / f"full_shard-{mode}")}
    resumed = {line["step"]: line["loss"] for line in steps_of(folder / name)}
    assert resumed.keys() == whole.keys()
    assert [resumed[step] for step in (11, 12, 15)] == pytest.approx(
        [whole[step] for step in (11, 12, 15)], rel=1e-4
    )
    assert resumed[STEPS] < 0.1 * resumed[1]


@pytest.mark.parametrize(("layout", "mode"), slow_runs([RUNS[0], RUNS[3], RUNS[4]]))
def test_plain_transformers_opens_the_export_and_it_answers_with_the_tokens(
    layout: str, mode: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = folder / f"{layout}-{mode}", folder / f"export-{mode}-{layout}"
    assert (
        main(["export", str(run), "--output", str(out)]) == 0
    )  # verified: its logits are the checkpoint's
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    known = tokenizer.get_vocab()
    assert (len(tokenizer), model.config.vocab_size) == (TOKENS, ROWS)
    assert (
        model.get_input_embeddings().weight.shape[0]
        == model.get_output_embeddings().weight.shape[0]
        == ROWS
    )
    assert tokenizer.pad_token == "<fill>"
    assert model.config.pad_token_id == model.generation_config.pad_token_id == known["<fill>"]
    assert model.generation_config.eos_token_id == [known["<|im_end|>"], tokenizer.eos_token_id]
    for question in ANSWERS:
        inputs = tokenizer.apply_chat_template(
            [_turn("user", question)],
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
        )
        said = model.generate(**inputs, max_new_tokens=8, do_sample=False)[
            0, inputs["input_ids"].shape[1] :
        ]
        assert (said[0], said[-1]) == (known["<call>"], known["<|im_end|>"]), tokenizer.decode(said)
    capsys.readouterr()
    assert (
        main(
            [
                "chat",
                str(run),
                "--prompt",
                "two?",
                "--temperature",
                "0",
                "--max-new-tokens",
                "8",
                "--json",
            ]
        )
        == 0
    )
    answered = capsys.readouterr().out
    assert "<call>x" in answered and "<|im_end|>" not in answered
    if "lora" in mode:  # peft opens the adapter on a base of that size
        base = _grow(
            Path(yaml.safe_load((folder / f"{mode}.yaml").read_text())["model_name_or_path"])
        )
        adapted = PeftModel.from_pretrained(base, out / "adapter")
        with torch.no_grad():
            ids = torch.arange(200, TOKENS)[None]
            # In fp64: fp32's own rounding in either forward is ten times what merging rounds.
            torch.testing.assert_close(
                adapted.double()(ids).logits, model.double()(ids).logits, atol=1e-4, rtol=0
            )


@pytest.mark.parametrize("mode", slow_but({"lora"}, ["untied", "lora", "lora-tied"]))
def test_the_plan_counts_the_grown_embedding_and_that_lora_trains_it(
    mode: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [
        "plan",
        "--recipe",
        str(folder / f"{mode}.yaml"),
        "--config",
        str(write_config(folder, "ddp")),
        "--json",
    ]
    assert main(command) == 0
    planned = json.loads(capsys.readouterr().out)
    assert f", {planned['trained_parameters']:,} trained" in (folder / "printed.txt").read_text()


def test_tokens_that_a_frozen_embedding_would_never_learn_are_refused(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / "model-False")
    model.lm_head.requires_grad_(False)
    with pytest.raises(
        UserError, match=r"added_tokens: lm_head is frozen \(trainable_modules, frozen_modules\)"
    ):
        refuse_frozen_tokens(model, Vocabulary(KNOWN, TOKENS, ROWS))
    refuse_frozen_tokens(model, None)


def test_tokens_that_do_not_fit_are_refused(folder: Path, tmp_path: Path) -> None:
    recipe = folder / "tied.yaml"

    def load(*keys: str) -> Any:
        read = read_recipe(str(recipe), list(keys))
        return load_tokenizer(read.model, read.data)

    with pytest.raises(
        Exception,
        match="eot_tokens: <done>: not a token of this tokenizer; name it in added_tokens too",
    ):
        load('eot_tokens=["<done>"]')
    with pytest.raises(UserError, match=r"added_tokens: an empty token; write its text"):
        load('added_tokens=[" "]', "eot_tokens=[]")
    with pytest.raises(UserError, match=r"special_tokens: .*bos_token"):
        load('special_tokens={"end_token": "x"}')
    named = load('special_tokens={"eos_token": "<|im_end|>", "unk_token": "<call>"}')
    assert (named.eos_token, named.unk_token, len(named)) == ("<|im_end|>", "<call>", TOKENS - 1)


def test_a_new_special_token_for_which_adapters_would_train_both_ends_is_named_in_added_tokens(
    folder: Path,
) -> None:
    """The plan, and the choice of a reference, read added_tokens; a tokenizer is not at hand."""

    def refuse(*keys: str) -> None:
        base = ("use_peft=true", "added_tokens=[]", "eot_tokens=[]")
        refuse_unnamed_tokens(read_recipe(str(folder / "tied.yaml"), [*base, *keys]))

    message = "special_tokens: pad_token: <fill>: the tokenizer lacks it"
    with pytest.raises(UserError, match=message):
        refuse()
    grpo = ("use_peft=false", "method=grpo", "rewards=[length]", "max_completion_length=8")
    with pytest.raises(UserError, match=f"{message}, and so does the reference of beta"):
        refuse(*grpo, "beta=0.1")
    for keys in (
        grpo,
        ("added_tokens=[<fill>]",),
        ("use_peft=false",),
        ('special_tokens={"pad_token": "<|end|>"}',),
    ):
        refuse(*keys)
