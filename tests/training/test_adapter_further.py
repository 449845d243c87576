"""A LoRA adapter trained further: as plain peft does it, in every form, and refused where it does not fit."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from finetune.config.accelerate_file import read_sharding
from finetune.config.module_names import base_name, peft_name
from finetune.config.pretrained import complete_lora, load_config, set_head
from finetune.config.reader import read_recipe
from finetune.config.schema import Recipe
from finetune.distributed.model_parts import Values
from finetune.errors import UserError
from finetune.inference.inference_model import LoadOptions, load_inference_model
from finetune.inference.inputs import find_model
from finetune.models.load import build_on_meta
from finetune.models.lora import add_adapters, read_adapter
from finetune.plan.plan import make_plan
from tests.conftest import make_chat, make_model, slow_but
from tests.training import reference
from tests.training.layouts import (
    assert_bit_equal,
    assert_losses,
    train_all,
    write_config,
    write_recipe,
)

STEPS, SAVED_AT = 4, 2
MODES: dict[str, dict[str, Any]] = {
    "lora": {},
    "qlora": {"load_in_4bit": True},
    "dpo": {"method": "dpo", "beta": 0.5, "datasets": [{"path": "PAIRS"}]},
}


RUNS = [(mode, layout) for mode in MODES for layout in ("single", "full_shard")]
QUICK = [("lora", "single"), ("dpo", "single")]


def make_adapter(
    folder: Path,
    model: Path,
    *,
    tokens: int | None = None,
    save_embedding_layers: bool | str = "auto",
    **keys: Any,
) -> Path:
    """A PEFT folder with an adapter of `model`, grown to `tokens`, whose factors are all random."""
    config = {"r": 4, "lora_alpha": 12, "target_modules": ["q_proj", "v_proj", "down_proj"]} | keys
    torch.manual_seed(5)
    base: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if tokens is not None:
        base.resize_token_embeddings(tokens)
    get_peft_model(
        base, LoraConfig(init_lora_weights=False, task_type="CAUSAL_LM", **config)
    ).save_pretrained(folder, save_embedding_layers=save_embedding_layers)
    return folder


def make_pairs(path: Path, *, rows: int) -> Path:
    with path.open("w") as file:
        for row in range(rows):
            pair = {
                "prompt": f"What is {row} plus {row}?",
                "chosen": f"It is {2 * row}.",
                "rejected": "Who knows?",
            }
            file.write(json.dumps(pair) + "\n")
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, its adapter, and a recipe for each mode."""
    folder = tmp_path_factory.mktemp("further")
    model = make_model(folder / "model", hidden_size=40, intermediate_size=75)
    adapter = make_adapter(
        folder / "adapter",
        model,
        rank_pattern={"layers.0.*q_proj": 6},
        lora_alpha=12.5,  # peft scales by a fraction too
        use_rslora=True,
        modules_to_save=["norm"],
    )
    data = make_chat(folder / "chat.jsonl", rows=24)
    make_pairs(folder / "pairs.jsonl", rows=24)
    for mode, keys in MODES.items():
        keys = json.loads(json.dumps(keys).replace("PAIRS", f"{folder}/pairs.jsonl"))
        common = {
            "use_peft": True,
            "adapter_name_or_path": str(adapter),
            "global_batch_size": 4,
            "max_steps": STEPS,
        }
        write_recipe(folder / f"{mode}.yaml", model, data, **common | keys)
    return folder


@pytest.fixture(scope="module")
def runs(folder: Path, slow_too: bool) -> Path:
    """Every mode on one rank and sharded over two; lora once more resumed from its middle, and exported."""
    single, sharded = (
        write_config(folder, "single"),
        write_config(folder, "full_shard", checkpointing=True),
    )
    saves = [f"save_steps={SAVED_AT}", "save_total_limit=9"]
    keys_of = {
        "single": (single, ["per_device_train_batch_size=4", "export_at_end=true"]),
        "full_shard": (sharded, ["per_device_train_batch_size=2"]),
    }
    wanted: dict[str, list[Any]] = {"single": [], "full_shard": []}
    for mode, layout in RUNS if slow_too else QUICK:
        config, keys = keys_of[layout]
        given = [f"output_dir={folder}/{mode}-{layout}", *saves, *keys]
        wanted[layout].append((folder / f"{mode}.yaml", config, given))
    middle = f"resume_from_checkpoint={folder}/lora-full_shard/checkpoints/step-{SAVED_AT:08d}"
    rows = "per_device_train_batch_size=2"
    again = (folder / "lora.yaml", sharded, [f"output_dir={folder}/resumed", middle, rows, *saves])
    train_all(folder, wanted["single"], ranks=1)
    if slow_too:
        train_all(folder, [*wanted["full_shard"], again], ranks=2)
    return folder


@pytest.mark.parametrize(("mode", "layout"), slow_but(QUICK, RUNS))
def test_the_losses_are_those_of_plain_peft(mode: str, layout: str, runs: Path) -> None:
    """peft loads the adapter with is_trainable, and the reference of DPO is the model with the adapter as it was."""
    expected = reference.losses(runs / f"{mode}.yaml")
    assert expected[-1][0] < expected[0][0]
    assert_losses(runs / f"{mode}-{layout}", expected)


@pytest.mark.slow
def test_a_resumed_run_ends_the_same(runs: Path) -> None:
    assert_bit_equal(runs / "lora-full_shard", runs / "resumed", STEPS, SAVED_AT)


def test_the_adapter_opens_in_peft_and_can_be_trained_further_again(runs: Path) -> None:
    """Its export has the rank and alpha of the adapter that it began with, and the run itself is a name for it."""
    out = runs / "lora-single" / "adapter"
    assert find_model(str(runs / "lora-single")).kind == "adapter"
    base = AutoModelForCausalLM.from_pretrained(runs / "model", dtype=torch.float32)
    merged = AutoModelForCausalLM.from_pretrained(
        runs / "lora-single" / "export", dtype=torch.float32
    )
    ids = torch.arange(12)[None]
    torch.testing.assert_close(
        PeftModel.from_pretrained(base, out)(ids).logits, merged(ids).logits, rtol=0, atol=2e-5
    )
    assert any(
        (load_file(out / "adapter_model.safetensors")[n] != t).any()
        for n, t in load_file(runs / "adapter/adapter_model.safetensors").items()
    )
    again = complete_lora(
        read_recipe(str(runs / "lora.yaml"), [f"adapter_name_or_path={runs}/lora-single"])
    )
    first = complete_lora(read_recipe(str(runs / "lora.yaml")))
    assert (again.lora.lora_r, again.lora.lora_alpha, again.lora.rank_pattern) == (
        4,
        12.5,
        {"layers.0.*q_proj": 6},
    )
    assert set(again.lora.lora_target_modules) == set(first.lora.lora_target_modules)


@pytest.mark.parametrize(
    ("sizes", "adapter", "expected"),
    [
        (
            {"hidden_size": 48},
            "adapter",
            "q_proj.lora_A.weight has the shape [6, 40], but LlamaForCausalLM needs [6, 48]",
        ),
        (
            {"num_hidden_layers": 1},
            "adapter",
            "adapter does not fit the model: modules_to_save: model.layers.1.input_layernorm",
        ),
        ({"seed": 1}, "lora-single", "adapter was trained on other weights than those of"),
    ],
)
def test_another_base_is_refused(
    sizes: dict[str, int], adapter: str, expected: str, runs: Path, tmp_path: Path
) -> None:
    model = make_model(tmp_path / "model", **{"hidden_size": 40, "intermediate_size": 75} | sizes)
    given = [
        f"model_name_or_path={model}",
        f"adapter_name_or_path={runs / adapter}",
        f"output_dir={tmp_path}/run",
    ]
    with pytest.raises(AssertionError) as error:
        train_all(
            tmp_path, [(runs / "lora.yaml", write_config(tmp_path, "single"), given)], ranks=1
        )
    said = str(error.value).splitlines()[1:]
    assert expected in said[-1] and len(said) == 1


def test_the_plan_counts_the_adapter_that_it_finds(runs: Path) -> None:
    recipe = read_recipe(str(runs / "dpo.yaml"))
    spec = make_plan(recipe, read_sharding(None, None, {"WORLD_SIZE": "1"}), 1, on_cpu=True).spec
    trained = sum(
        tensor.numel()
        for tensor in load_file(runs / "adapter" / "adapter_model.safetensors").values()
    )
    assert (spec.trained_numel, spec.reference) == (trained, "stored")


Changes = Callable[[dict[str, Any]], object]
# name -> (a change of adapter_config.json, overrides, a part of the sentence)
REFUSED: dict[str, tuple[Changes, list[str], str]] = {
    "another rank": (dict, ["lora_r=8"], "command line: lora_r: 8: the adapter"),
    "a rank and a half": (
        lambda c: c.update(rank_pattern={"q_proj": 4.5}),
        [],
        "rank_pattern: a mapping of modules to positive whole numbers is expected",
    ),
    "an endless scale": (
        lambda c: c.update(lora_alpha=float("inf")),
        [],
        "lora_alpha: a positive number is expected, not inf",
    ),
    "a rank of a billion": (
        lambda c: c.update(r=10**9),
        [],
        "r: 1,000,000,000: its weights have factors of rank ",
    ),
    "one of a layer": (
        lambda c: c.update(rank_pattern={"q_proj": 10**9}),
        [],
        "r: 1,000,000,000: its weights have ",
    ),
    "another kind": (
        lambda c: c.update(peft_type="IA3"),
        [],
        "peft_type: 'IA3' is neither LORA nor OFT",
    ),
    "targets that are no names": (
        lambda c: c.update(target_modules=5),
        [],
        "adapter_config.json: target_modules: a list of names or a pattern is expected, not 5",
    ),
    "a dropout of all": (
        lambda c: c.update(lora_dropout=2),
        [],
        "lora_dropout: a number from 0 to below 1 is expected, not 2",
    ),
    "a flag that is text": (
        lambda c: c.update(use_dora="yes"),
        [],
        "use_dora: true or false is expected, not 'yes'",
    ),
    "layers that are no numbers": (
        lambda c: c.update(layers_to_transform="x"),
        [],
        "layers_to_transform: a number or numbers of layers is expected, not 'x'",
    ),
    "a start that changes the base": (
        lambda c: c.update(init_lora_weights="pissa"),
        [],
        "init_lora_weights: pissa",
    ),
    "trained biases": (
        lambda c: c.update(bias="all"),
        [],
        "bias: trained biases are not supported",
    ),
    "a model": (
        dict,
        ["adapter_name_or_path=MODEL"],
        "it is a model: name it in model_name_or_path",
    ),
    "no folder": (
        dict,
        ["adapter_name_or_path=./nowhere"],
        "adapter_name_or_path: ./nowhere: no such file or folder",
    ),
    "full fine-tuning": (
        dict,
        ["use_peft=false"],
        "adapter_name_or_path has no effect without use_peft: true",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_adapter_that_does_not_fit_is_one_sentence(
    case: str, folder: Path, tmp_path: Path
) -> None:
    change, overrides, expected = REFUSED[case]
    adapter = Path(shutil.copytree(folder / "adapter", tmp_path / "adapter"))
    config = json.loads((adapter / "adapter_config.json").read_text())
    change(config)
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    given = [
        f"adapter_name_or_path={adapter}",
        *(each.replace("MODEL", f"{folder}/model") for each in overrides),
    ]
    with pytest.raises(UserError) as error:
        complete_lora(read_recipe(str(folder / "lora.yaml"), given))
    assert expected in str(error.value) and "\n" not in str(error.value)


TIED: dict[str, dict[str, Any]] = {
    "tied": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "embedding apart": {"modules_to_save": ["embed_tokens"]},
    "head apart": {"modules_to_save": ["lm_head"]},
    "both apart": {"modules_to_save": ["embed_tokens", "lm_head"]},
}


@pytest.mark.parametrize("case", TIED)
def test_a_tied_weight_that_peft_trained_apart_is_refused(
    case: str, folder: Path, tmp_path: Path
) -> None:
    """It would be tied again here, and the first loss would be another than peft's."""
    model = make_model(tmp_path / "model", tie_word_embeddings=True)
    adapter = make_adapter(tmp_path / "adapter", model, **TIED[case])
    if case == "both apart":
        weights = load_file(adapter / "adapter_model.safetensors")
        weights["base_model.model.lm_head.weight"][0, 0] += 1
        save_file(weights, adapter / "adapter_model.safetensors")
    keys = [f"adapter_name_or_path={adapter}", f"model_name_or_path={model}"]
    recipe = read_recipe(str(folder / "lora.yaml"), keys)
    if case == "tied":
        read_values(recipe, adapter)
        return
    with pytest.raises(UserError, match="was trained apart from the weight that it is tied to"):
        read_values(recipe, adapter)


def read_values(recipe: Recipe, adapter: Path) -> Values:
    """`read_adapter` on the recipe's model, whose other values are those of its file."""
    model = build_on_meta(load_config(recipe.model), torch.float32)
    add_adapters(model, complete_lora(recipe).lora, torch.float32)
    stored = load_file(Path(str(recipe.model.model_name_or_path)) / "model.safetensors")
    return read_adapter(model, adapter, lambda name, slices: stored[base_name(name)][slices])


def test_a_head_of_scores_is_trained_beside_the_adapter_of_a_language_model(folder: Path) -> None:
    """As peft trains it under the task SEQ_CLS: the adapter itself has none."""
    given = ["method=reward", f"datasets=[{{path: {folder}/pairs.jsonl}}]"]
    recipe = read_recipe(str(folder / "lora.yaml"), given)
    completed = complete_lora(recipe)
    config = load_config(recipe.model)
    set_head(config, recipe.score_head, pad_id=0)
    model = build_on_meta(config, torch.float32)
    add_adapters(model, completed.lora, torch.float32)
    base = AutoModelForSequenceClassification.from_pretrained(folder / "model", num_labels=1)
    adapter_config = LoraConfig.from_pretrained(str(folder / "adapter"))
    adapter_config.task_type, adapter_config.inference_mode = "SEQ_CLS", False
    expected = get_peft_model(base, adapter_config)
    assert list_trained(model) == list_trained(expected) >= {"score.weight"}


def list_trained(model: torch.nn.Module) -> set[str]:
    """Lists the trained parameters of a model with an adapter by their names in peft's file."""
    return {peft_name(name) for name, each in model.named_parameters() if each.requires_grad}


def test_an_adapter_of_one_layer_may_have_its_number(folder: Path, tmp_path: Path) -> None:
    """As peft takes it: a number or a list of them."""
    adapter = make_adapter(tmp_path / "adapter", folder / "model", layers_to_transform=0)
    recipe = read_recipe(str(folder / "lora.yaml"), [f"adapter_name_or_path={adapter}"])
    assert all("layers.0" in target for target in complete_lora(recipe).lora.lora_target_modules)
    read_values(recipe, adapter)


def test_a_frozen_embedding_that_peft_saved_is_the_bases(folder: Path, tmp_path: Path) -> None:
    """peft saves it with save_embedding_layers, also beside modules that it trains whole."""
    adapter = make_adapter(
        tmp_path / "adapter", folder / "model", modules_to_save=["norm"], save_embedding_layers=True
    )
    recipe = read_recipe(str(folder / "lora.yaml"), [f"adapter_name_or_path={adapter}"])
    assert "model.embed_tokens" not in complete_lora(recipe).lora.modules_to_save
    values = read_values(recipe, adapter)
    embedding = load_file(folder / "model" / "model.safetensors")["model.embed_tokens.weight"]
    whole = (slice(None), slice(None))
    assert torch.equal(values("model.embed_tokens.weight", whole), embedding)
    weights = load_file(adapter / "adapter_model.safetensors")
    weights["base_model.model.model.embed_tokens.weight"][0, 0] += 1
    save_file(weights, adapter / "adapter_model.safetensors")
    with pytest.raises(UserError, match=r"trained on another model\.embed_tokens\.weight than"):
        read_values(recipe, adapter)("model.embed_tokens.weight", whole)


def test_an_adapter_of_another_vocabulary_is_one_sentence(folder: Path, tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "adapter", folder / "model", tokens=263)
    recipe = read_recipe(str(folder / "lora.yaml"), [f"adapter_name_or_path={adapter}"])
    with pytest.raises(
        UserError, match=r"has the shape \[263, 40\].*or merge it \(finetune export\)"
    ):
        read_values(recipe, adapter)


@pytest.mark.parametrize("text", ['{"r": 4, ', "[1]", '{"r": 4, "r": 8}'])
def test_a_damaged_config_of_an_adapter_is_named(text: str, folder: Path, tmp_path: Path) -> None:
    adapter = Path(shutil.copytree(folder / "adapter", tmp_path / "adapter"))
    (adapter / "adapter_config.json").write_text(text)
    recipe = read_recipe(str(folder / "lora.yaml"), [f"adapter_name_or_path={adapter}"])
    with pytest.raises(UserError, match=r"adapter_config\.json: .*(JSON|damaged)"):
        complete_lora(recipe)


def test_a_rank_of_a_billion_takes_no_memory_in_chat(folder: Path, tmp_path: Path) -> None:
    """An adapter may come from anyone: nothing of that size is made before its file is looked at."""
    adapter = Path(shutil.copytree(folder / "adapter", tmp_path / "adapter"))
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"r": 10**9}))
    with pytest.raises(
        UserError,
        match=r"adapter_config.json: r: 1,000,000,000: its weights have factors of rank \d+ at",
    ):
        load_inference_model(find_model(str(adapter)), LoadOptions(), print)
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(
        UserError, match=r"r: 1,000,000,000: more than 65,536, which no adapter has; copy it again"
    ):
        load_inference_model(find_model(str(adapter)), LoadOptions(), print)
