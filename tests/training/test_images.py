"""Images: token ids and pixels are the processor's own, and losses and gradients those of transformers' whole class over one document
at a time, packed and padded, in every layout."""

import importlib.util
import inspect
import itertools
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from finetune.checkpoint.folders import step_folder
from finetune.cli import main
from finetune.config.pretrained import load_config, trained_config
from finetune.config.reader import read_recipe
from finetune.config.schema import Data, Model
from finetune.constants import ANSWERS_AT_ONCE, IGNORE_INDEX
from finetune.data.examples import Prompt
from finetune.data.images import EncodedImage
from finetune.data.prepare import prepare_data
from finetune.data.tokenizer import load_tokenizer
from finetune.distributed.model_parts import text_names
from finetune.errors import UserError
from finetune.files.tensors import read_folder
from finetune.models.load import build_on_meta
from finetune.models.reach import freeze_unreached
from finetune.plan.plan import make_plan
from finetune.report.run_data import plan_run, read_run
from finetune.session import Session
from finetune.training import evaluate
from finetune.training.evaluate import Sample, answer
from finetune.units import gib
from tests.checkpoint.test_resume import RUN, kill_after
from tests.conftest import make_chat, make_model, slow_but
from tests.data.world import Rank
from tests.ranks import launch_ranks
from tests.training import reference
from tests.training.layouts import (
    assert_bit_equal,
    steps_of,
    train_all,
    train_families,
    write_config,
    write_recipe,
)
from tests.training.test_vision_language import open_whole
from tests.vision import (
    add_processor,
    draw_image,
    make_image_chat,
    make_vision_model,
    open_processor,
    process_row,
)

STEPS = 3
PACKED = (
    *("qwen2_5_vl", "gemma3", "internvl", "qwen3_vl", "qwen3_vl_moe", "glm4v", "glm46v"),
    *(
        "llava",
        "llava_next",
        "pixtral",
        "mistral3",
        "smolvlm",
        "qwen3_5",
        "qwen3_5_moe",
        "gemma4",
        "gemma4_large",
        "gemma3n",
        "idefics3",
        "llama4",
        "mllama",
    ),
    "mistral4",  # the class of mistral3
)
# (family, layout, ranks); "-few": most rows have no image
WANTED = [
    *((family, "single", 1) for family in PACKED),
    *(
        (f"{family}-padded", "single", 1)
        for family in ("qwen2_5_vl", "gemma3", "gemma4_large", "qwen3_5", "qwen3_5_moe", "mllama")
    ),
    ("qwen2_vl", "single", 1),
    ("gemma3n-padded", "single", 1),
    ("gemma3n-lora", "single", 1),
    *((f"{family}-lora", "single", 1) for family in ("gemma3", "qwen2_5_vl", "mllama")),
    *((family, "full_shard", 2) for family in ("qwen2_5_vl", "gemma3", "llava")),
    ("gemma3-tower", "ddp", 2),
    ("mllama-tower", "ddp", 2),
    ("qwen2_5_vl-tower", "full_shard", 2),
    ("gemma3-tower", "single", 1),
    *(
        ("llava-tower", layout, ranks)
        for layout, ranks in (("single", 1), ("full_shard", 2), ("FULL_SHARD", 2), ("ddp", 2))
    ),
    ("qwen2_5_vl-few", "full_shard", 2),
    ("gemma3-few", "ddp", 2),
    ("mllama-few", "single", 1),
    ("mllama-few", "full_shard", 2),
    *((family, "full_shard", 2) for family in ("llama4", "gemma3n", "gemma4_large")),
]
# What a commit trains: of each kind the family with the most code.
QUICK = [
    ("gemma3-tower", "single", 1),
    ("qwen2_5_vl-lora", "single", 1),
    ("llava-tower", "full_shard", 2),
]
# that a family's processor or tower imports
PACKAGES = {"smolvlm": "num2words", "llama4": "torchvision", "gemma3n": "timm"}
TRAINED = [
    each
    for each in WANTED
    if importlib.util.find_spec(PACKAGES.get(each[0].partition("-")[0], "torch"))
]
LORA: dict[str, Any] = {
    "use_peft": True,
    "lora_r": 4,
    "lora_target_modules": ["q_proj", "v_proj"],
    "eval_split_size": 3,
    "exact_match_samples": 3,
}


TOWER = {
    "gemma3": ["language_model", "lm_head", "vision_tower", "multi_modal_projector"],
    "qwen2_5_vl": ["visual", "language_model.layers.1"],
    "llava": ["language_model", "lm_head", "vision_tower", "multi_modal_projector"],
    "mllama": ["language_model", "lm_head", "vision_model", "multi_modal_projector"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("images")


@pytest.fixture(scope="module")
def chosen(slow_too: bool) -> list[tuple[str, str, int]]:
    return TRAINED if slow_too else QUICK


@pytest.fixture(scope="module")
def recipes(folder: Path, chosen: list[tuple[str, str, int]]) -> dict[str, Path]:
    """Each makes five rows of micro-batches of two."""
    data = {}
    for name, every in (("all", 1), ("few", 6)):
        (folder / name).mkdir()
        data[name] = make_image_chat(folder / name, rows=15, every=every)
    paths = {}
    for family in dict.fromkeys(name.partition("-")[0] for name, *_ in chosen):
        model = add_processor(make_vision_model(folder / family / "model", family), family)
        steps: dict[str, Any] = {
            "global_batch_size": 3,
            "max_steps": STEPS,
            "save_steps": 1,
            "max_length": 128,
        }
        steps |= {"packing": True, "per_device_train_batch_size": 2}
        # An image is cut into parts, each of which is named, or never smaller than so many tokens.
        lengths = {"smolvlm": 256, "idefics3": 512, "gemma4": 512, "gemma4_large": 512}
        steps |= {"max_length": lengths.get(family, 128)}
        kinds: dict[str, dict[str, Any]] = {"": {}, "-few": {}, "-lora": LORA}
        kinds["-tower"] = {"trainable_modules": TOWER[family]} if family in TOWER else {}
        kinds["-padded"] = {"packing": False, "attn_implementation": "sdpa"}
        for kind, keys in kinds.items():
            paths[family + kind] = write_recipe(
                folder / f"{family}{kind}.yaml",
                model,
                data[
                    "few"
                    if kind == "-few" or (kind == "-tower" and family not in ("llava", "mllama"))
                    else "all"
                ],
                **steps | keys,
            )
    return paths


@pytest.fixture(scope="module")
def runs(
    folder: Path, recipes: dict[str, Path], chosen: list[tuple[str, str, int]]
) -> Callable[[str, str, int], Path]:
    """(family, layout, ranks) -> the run's folder."""
    return train_families(
        folder,
        recipes,
        chosen,
        [
            each
            for each in chosen
            if each[0].endswith("-lora") or each == ("gemma3-tower", "single", 1)
        ],
    )


@pytest.mark.parametrize(
    ("name", "layout", "ranks"),
    [pytest.param(*each, marks=[pytest.mark.slow] * (each not in QUICK)) for each in WANTED],
)
def test_losses_and_gradients_are_those_of_one_document_at_a_time(
    name: str,
    layout: str,
    ranks: int,
    runs: Callable[..., Path],
    recipes: dict[str, Path],
    folder: Path,
) -> None:
    family = name.partition("-")[0]
    if family in PACKAGES:
        pytest.importorskip(PACKAGES[family], reason=f"{PACKAGES[family]} is not installed")
    processor = open_processor(folder / family / "model", family)
    reference.assert_as_near(
        steps_of(runs(name, layout, ranks)),
        recipes[name],
        prepare=_freeze_tower
        if not name.endswith("-tower")
        else partial(_train_parts, TOWER[family]),
        inputs_of=lambda place: process_row(place, processor),
        make_optimizer=_make_zero_filling if name == "mllama-few" else None,
    )


class _ZeroFilling(torch.optim.AdamW):
    """Layers that a step has no use for have gradients of zero, as on several ranks: the momentum of earlier steps moves them."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        return super().step(closure)


def _make_zero_filling(trained: list[nn.Parameter]) -> torch.optim.Optimizer:
    return _ZeroFilling(trained, lr=0.0, weight_decay=0.0, eps=1e-8)


@pytest.mark.slow
def test_every_family_trains_on_images_on_two_ranks(folder: Path, recipes: dict[str, Path]) -> None:
    """Sharded and replicated, each in full with its tower frozen."""
    families = [
        family for family in dict.fromkeys(name for name, *_ in TRAINED) if "-" not in family
    ]
    wanted = [(family, layout, 2) for family in families for layout in ("full_shard", "ddp")]
    (folder / "two").mkdir()
    runs = train_families(folder / "two", recipes, wanted, [])
    for family in families:
        processor = open_processor(folder / family / "model", family)
        expected = reference.train(
            recipes[family],
            prepare=_freeze_tower,
            inputs_of=partial(process_row, processor=processor),
        )
        for layout in ("full_shard", "ddp"):
            for line, (loss, norm) in zip(steps_of(runs(family, layout, 2)), expected, strict=True):
                assert line["loss"] == pytest.approx(loss, rel=1e-5), (family, layout)
                assert line["grad_norm"] == pytest.approx(norm, rel=1e-4), (family, layout)


@pytest.mark.parametrize("others", [(0,), pytest.param((0, 12), marks=pytest.mark.slow)])
def test_pairs_with_images_are_compared_as_by_the_whole_class(
    others: tuple[int, ...], tmp_path: Path
) -> None:
    """DPO: the image stands in both prompts, and each answer's log-probability has seen it."""
    model = add_processor(make_vision_model(tmp_path / "model", "qwen2_5_vl"), "qwen2_5_vl")
    processor = open_processor(model, "qwen2_5_vl")
    for other in others:  # of the same sizes: the second's reference is not that of the first
        data, flat = _write_pairs(tmp_path, other)
        keys: dict[str, Any] = {
            "method": "dpo",
            "global_batch_size": 1,
            "max_steps": 2,
            "packing": True,
        }
        run = tmp_path / f"run-{other}"
        recipe = write_recipe(tmp_path / f"{other}.yaml", model, data, **keys, output_dir=str(run))
        train_all(tmp_path, [(recipe, write_config(tmp_path, "single"), [])], ranks=1)
        expected = reference.train(
            recipe, prepare=_freeze_tower, inputs_of=_side_by_side(flat, processor)
        )
        for line, (loss, norm) in zip(steps_of(run), expected, strict=True):
            assert line["loss"] == pytest.approx(loss, rel=1e-5)
            assert line["grad_norm"] == pytest.approx(norm, rel=1e-5)


def _write_pairs(folder: Path, other: int) -> tuple[Path, Path]:
    """(pairs about images, a row for each of their sides); `other`: which images."""
    lines, sides = [], []
    for row in range(4):
        part = {"type": "image", "path": draw_image(folder / f"{row}.png", row + other).name}
        asked = {"role": "user", "content": [part, {"type": "text", "text": f"What is {row}?"}]}
        answers = [
            [asked, {"role": "assistant", "content": text}]
            for text in (f"It is {row}.", "No idea.")
        ]
        lines.append(
            json.dumps({"prompt": [asked], "chosen": answers[0][1:], "rejected": answers[1][1:]})
            + "\n"
        )
        sides += [json.dumps({"messages": messages}) + "\n" for messages in answers]
    data, flat = folder / "pairs.jsonl", folder / "sides.jsonl"
    data.write_text("".join(lines))
    flat.write_text("".join(sides))
    return data, flat


def _side_by_side(flat: Path, processor: Any) -> Callable[[str], dict[str, Any]]:
    """The inputs of the sides of pairs, which are asked for in turns: chosen, rejected, chosen, ..."""
    asked = itertools.count()

    def inputs_of(place: str) -> dict[str, Any]:
        return process_row(
            f"{flat}:{2 * int(place.rpartition(':')[2]) - 1 + next(asked) % 2}", processor
        )

    return inputs_of


def _freeze_tower(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if not any(part in name for part in ("language_model", "text_model", "lm_head")):
            parameter.requires_grad_(False)


def _train_parts(parts: list[str], model: Any) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(part in name for part in parts))


def test_a_trained_tower_is_exported(runs: Callable[..., Path], folder: Path) -> None:
    source = folder / "gemma3" / "model" / "model.safetensors"
    exported = runs("gemma3-tower", "single", 1) / "export"
    before, after = load_file(source), load_file(exported / "model.safetensors")
    moved = [name for name in before if not torch.equal(before[name], after[name])]
    assert any("vision_tower.encoder.layers.0.self_attn.q_proj" in name for name in moved)
    assert any("multi_modal_projector" in name for name in moved)
    open_whole(exported)


@pytest.mark.parametrize("family", slow_but({"llava", "qwen2_5_vl"}, sorted({*PACKED, "qwen2_vl"})))
def test_what_no_image_reaches_is_what_gets_no_gradient_in_transformers(
    family: str, tmp_path: Path
) -> None:
    """Found on meta before the weights are read, held against a whole backward of transformers' own class."""
    if family in PACKAGES:
        pytest.importorskip(PACKAGES[family], reason=f"{PACKAGES[family]} is not installed")
    keys = Model(
        model_name_or_path=str(add_processor(make_vision_model(tmp_path / "model", family), family))
    )
    tokenizer = load_tokenizer(keys, Data())
    built = build_on_meta(trained_config(load_config(keys), keys), torch.float32)
    built.requires_grad_(True)
    ids, images = tokenizer.images.make_blank_document()
    unreached = freeze_unreached(built, lambda: (ids, images))
    assert all(
        built.get_parameter(name).requires_grad == (name not in unreached)
        for name, _ in built.named_parameters()
    )
    whole: Any = open_whole(tmp_path / "model")
    types = (ids == whole.config.image_token_id).int()
    named = {"token_type_ids": types.long(), "mm_token_type_ids": types}
    accepted = inspect.signature(whole.forward).parameters
    given = {name: value for name, value in named.items() if name in accepted}
    whole(input_ids=ids, attention_mask=torch.ones_like(ids), **images, **given).logits.logsumexp(
        -1
    ).sum().backward()
    beside = {
        name: p for name, p in whole.named_parameters() if not name.startswith(text_names(whole))
    }
    assert list(unreached) == [name for name, parameter in beside.items() if parameter.grad is None]
    is_cut = family.startswith("llava")  # its projector reads the last but one of two layers
    assert any("layers.1.mlp" in name for name in unreached) == is_cut
    # Gemma 3n hears, too
    assert bool(unreached) == is_cut or all("audio" in n or ".head." in n for n in unreached)


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        ("full_shard", 2),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (("single", 1), ("FULL_SHARD", 2), ("ddp", 2))
        ),
    ],
)
def test_a_tower_of_which_no_image_reaches_a_part_is_resumed(
    layout: str, ranks: int, runs: Callable[..., Path], recipes: dict[str, Path], tmp_path: Path
) -> None:
    whole, stopped = runs("llava-tower", layout, ranks), tmp_path / "stopped"
    shutil.copytree(whole, stopped)
    shutil.rmtree(step_folder(stopped, STEPS))
    (stopped / "finished.json").unlink()
    config = write_config(tmp_path, layout, checkpointing=layout == "full_shard")
    overrides = [f"output_dir={stopped}", "export_at_end=false"]
    said = train_all(tmp_path, [(recipes["llava-tower"], config, overrides)], ranks=ranks)
    assert f"resumed at step {STEPS - 1}" in said
    assert re.search(
        r"not trained: model\.vision_tower\.\S*layers\.1\..* and 6 more: the model reads nothing",
        said,
    )
    assert_bit_equal(whole, stopped, STEPS)
    trained = read_folder(step_folder(stopped, STEPS) / "optimizer")
    assert any("layers.0.mlp" in name for name in trained) and not any(
        "post_layernorm" in name for name in trained
    )


def test_a_tower_is_not_trained_without_images(recipes: dict[str, Path], tmp_path: Path) -> None:
    data = make_chat(tmp_path / "chat.jsonl", rows=8)
    keys = [f"datasets=[{{path: {data}}}]", f"output_dir={tmp_path}"]
    recipe = read_recipe(str(recipes["gemma3-tower"]), keys)
    with (
        pytest.raises(UserError, match="only images reach, and no row holds one"),
        Session(recipe) as session,
    ):
        session.model.train()


def test_every_plan_of_a_run_with_images_counts_their_masks(
    recipes: dict[str, Path], runs: Callable[..., Path], tmp_path: Path
) -> None:
    """An image's tokens see each other by a mask [tokens, tokens], which other rows do not need."""
    keys = ["max_length=4096", "dtype=bfloat16", f"output_dir={tmp_path}"]
    with Session(read_recipe(str(recipes["gemma3-tower"]), keys)) as session:
        with pytest.raises(UserError) as explained, session.computing():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        planned = make_plan(session.recipe, session.world.sharding, 1, on_cpu=True, images="gemma3")
        # on a CPU and in fp32 a sliding window has such masks of its own
        with_masks, without = (
            make_plan(session.recipe, session.world.sharding, 1, images=images)
            for images in ("gemma3", None)
        )
    # a mask of two layers, in bfloat16
    assert with_masks.peak_bytes - without.peak_bytes > 2 * 2 * 4096**2
    assert f"and {gib(planned.peak_bytes)} GiB in all" in str(explained.value)
    reported = plan_run(read_run(runs("gemma3-tower", "single", 1)))
    assert reported is not None and reported.spec.images == "gemma3"


@pytest.mark.slow
def test_a_killed_run_ends_as_one_that_was_not_interrupted(
    runs: Callable[..., Path], recipes: dict[str, Path], tmp_path: Path
) -> None:
    """SIGKILL after the first step that was saved, then the same command again."""
    whole, killed, config = (
        runs("gemma3", "single", 1),
        tmp_path / "killed",
        write_config(tmp_path, "single"),
    )
    begin = ["--recipe", str(recipes["gemma3"]), "--config", str(config)]
    begin += [f"output_dir={killed}", "export_at_end=False"]
    kill_after(1, killed, begin, ranks=1)
    again = launch_ranks(RUN, begin, ranks=1).check()
    assert (
        "resumed at step" in again.outputs[0] and f"resumed at step {STEPS}" not in again.outputs[0]
    )
    assert_bit_equal(whole, killed, STEPS)


@pytest.mark.parametrize("family", slow_but({"qwen2_5_vl"}, ["gemma3", "qwen2_5_vl", "mllama"]))
def test_held_out_images_are_answered_as_by_the_exported_model(
    family: str, runs: Callable[..., Path], recipes: dict[str, Path], folder: Path
) -> None:
    run = runs(f"{family}-lora", "single", 1)
    lines = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    found = [line for line in lines if line["step"] == STEPS]
    recipe = read_recipe(str(recipes[f"{family}-lora"]))
    held_out = prepare_data(recipe, load_tokenizer(recipe.model, recipe.data), Rank()).evaluation
    assert held_out is not None and len(found) == 3
    processor, model = open_processor(folder / family / "model", family), open_whole(run / "export")
    stop, pad = processor.tokenizer.eos_token_id, processor.tokenizer.pad_token_id
    for index, line in enumerate(found):
        inputs = process_row(held_out.examples.where(index), processor)
        trained = (held_out.examples[index].labels != IGNORE_INDEX).nonzero()[0]
        breaks = (trained[1:] - trained[:-1] > 1).nonzero()[0]
        end = int(trained[breaks[-1] + 1] if len(breaks) else trained[0]) + 1  # the last question
        asked = {
            name: value[:, :end] if value.shape[1:2] == inputs["input_ids"].shape[1:] else value
            for name, value in inputs.items()
        }
        with torch.no_grad():
            ids = model.generate(
                **asked, max_new_tokens=24, do_sample=False, eos_token_id=stop, pad_token_id=pad
            )
        own = processor.tokenizer.decode(ids[0, end:], skip_special_tokens=True).strip()
        assert own.startswith(line["answer"])
    assert any(line["answer"] for line in found)


@pytest.mark.parametrize(
    "part",
    slow_but(
        {"export", "checkpoints/step-00000003"}, ["export", "adapter", "checkpoints/step-00000003"]
    ),
)
def test_chat_answers_about_images_as_the_run_does(
    part: str,
    runs: Callable[..., Path],
    recipes: dict[str, Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = runs("qwen2_5_vl-lora", "single", 1)
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()][-3:]
    recipe = read_recipe(str(recipes["qwen2_5_vl-lora"]))
    held_out = prepare_data(recipe, load_tokenizer(recipe.model, recipe.data), Rank()).evaluation
    assert held_out is not None
    data = Path(recipe.data.datasets[0].path)
    lines = [int(held_out.examples.where(index).rpartition(":")[2]) for index in range(3)]
    rows = [data.read_text().splitlines()[line - 1] for line in lines]
    asked = data.with_name("asked.jsonl")  # beside its images
    asked.write_text("".join(row + "\n" for row in rows))
    chat = ["chat", str(run / part), "--temperature", "0", "--max-new-tokens", "30", "--json"]
    assert main([*chat, "--prompts", str(asked)]) == 0
    answers = [
        json.loads(line)["answers"][0]["answer"].strip()
        for line in capsys.readouterr().out.splitlines()
    ]
    assert [
        answer.startswith(sample["answer"]) for answer, sample in zip(answers, samples, strict=True)
    ] == [True] * 3
    first = json.loads(rows[0])["messages"][0]["content"]
    images = [data.with_name(part["path"]) for part in first if part["type"] == "image"]
    text = next(part["text"] for part in first if part["type"] == "text")
    if first[-1]["type"] == "text" and len(json.loads(rows[0])["messages"]) == 2:
        named = [word for image in images for word in ("--image", str(image))]
        assert main([*chat, "--prompt", text, *named]) == 0
        assert json.loads(capsys.readouterr().out)["answers"][0]["answer"].strip() == answers[0]
        # A row with a text for its prompt and a column of images asks the same.
        asked.write_text(
            json.dumps({"prompt": text, "images": [part.name for part in images]}) + "\n"
        )
        assert main([*chat, "--prompts", str(asked)]) == 0
        assert json.loads(capsys.readouterr().out)["answers"][0]["answer"].strip() == answers[0]


def test_an_image_that_cannot_be_asked_about_is_one_sentence(
    runs: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = ["chat", str(runs("qwen2_5_vl-lora", "single", 1) / "export"), "--prompt", "What is it?"]
    (tmp_path / "text.png").write_text("no image")
    for path, error in (
        (tmp_path / "none.png", "no such file"),
        (tmp_path / "text.png", "cannot be read as an image"),
    ):
        assert main([*chat, "--image", str(path)]) == 2
        assert f"image: {path}: {error}" in capsys.readouterr().err
        rows = tmp_path / "rows.jsonl"
        rows.write_text(json.dumps({"prompt": "What is it?", "images": [path.name]}) + "\n")
        assert main([*chat[:2], "--prompts", str(rows)]) == 2
        said = capsys.readouterr().err
        assert f"{rows}:1: image: {path}: {error}" in said and "model " not in said, (
            "before the model is loaded"
        )
    assert (
        main([*chat, "--image", str(draw_image(tmp_path / "one.png", 1)), "--no-chat-template"])
        == 2
    )
    assert "name one with --chat-template" in capsys.readouterr().err
    assert main(["chat", str(make_model(tmp_path / "text")), "--prompt", "What?", "--chat-template", "chatml",
                 "--image", str(tmp_path / "one.png")]) == 2  # fmt: skip
    assert "a row holds an image, and this model takes none" in capsys.readouterr().err
    assert main([*chat[:2], "--image", str(tmp_path / "one.png")]) == 2
    assert "--image: is asked about by --prompt" in capsys.readouterr().err


def test_the_report_counts_images(runs: Callable[..., Path], folder: Path) -> None:
    report = json.loads((runs("llava-tower", "full_shard", 2) / "data_report.json").read_text())
    named = (folder / "all").glob("*.jsonl")
    images = sum(path.read_text().count('"type": "image"') for path in named)
    assert report["sources"][0]["images"] == images > 0


def test_held_out_images_are_answered_in_bounded_batches_that_need_the_tower_on_all_ranks_or_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """200 questions, of which 70 have an image, on three ranks; the answers stand in the order of the prompts."""
    image = (EncodedImage(b"an image"),)
    prompts = [Prompt([i], "", image if i % 20 < 7 else ()) for i in range(200)]
    batches: list[list[Prompt]] = []

    def generate(_model: Any, batch: list[Prompt], *_: Any) -> list[Sample]:
        batches.append(batch)
        return [Sample(str(prompt.prompt_ids[0]), "", "") for prompt in batch]

    monkeypatch.setattr(evaluate, "_generate", generate)
    model: Any = nn.Module()
    model.base_model_prefix, model.config = "model", SimpleNamespace(model_type="llama")
    gathered: list[Any] = []

    def answer_on(rank: int) -> list[str]:
        world: Any = SimpleNamespace(
            tensor_group_count=3, tensor_group_index=rank, stage_size=3,
            sharding=SimpleNamespace(is_fsdp=False),
            gather=lambda mine: [*gathered[:rank], mine, *gathered[rank + 1 :]],
        )  # fmt: skip
        return [sample.prompt for sample in answer(model, prompts, None, world)]

    of_ranks = []
    for rank in range(3):
        batches = []
        gathered = [[asdict(Sample("", "", ""))] * 100] * 3
        answer_on(rank)
        of_ranks.append(batches)
    assert len({tuple(any(p.images for p in b) for b in each) for each in of_ranks}) == 1
    assert len(of_ranks[0]) > 1 and all(
        len(b) <= ANSWERS_AT_ONCE for each in of_ranks for b in each
    )
    batches = []
    gathered = [[asdict(s) for b in each for s in generate(model, b)] for each in of_ranks]
    assert answer_on(1) == [str(i) for i in range(200)]
