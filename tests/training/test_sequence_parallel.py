"""Ranks that divide the tokens of a row between them train as a plain loop does, resume other layouts' runs, and are resumed."""

import json
from collections.abc import Callable, Container, Iterable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from finetune.cli import main
from finetune.export.export import export
from tests.conftest import make_chat, make_model, slow_but
from tests.models.families import forget_lengths
from tests.training import reference
from tests.training.layouts import (
    assert_bit_equal,
    assert_losses,
    steps_of,
    train_all,
    write_config,
    write_recipe,
)
from tests.training.test_preference_layouts import make_pairs

STEPS, SAVED_AT = 6, 3
FEW = {"max_steps": 2}
LORA = {"use_peft": True, "lora_r": 4}
THREE = {
    "packing": True,
    "max_length": 192,
    "global_batch_size": 2,
}  # some three documents in a row
MODES: dict[str, dict[str, Any]] = {
    "padded": {"global_batch_size": 4},
    "padded-lora": {"global_batch_size": 4, **LORA},
    "alone": {
        "packing": True,
        "max_length": 64,
        "global_batch_size": 4,
    },  # no two documents fit in a row
    "three": {**THREE, "save_steps": SAVED_AT, "save_total_limit": 9},
    "three-lora": {**THREE, **LORA},
    "nf4": {**THREE, **LORA, **FEW, "load_in_4bit": True, "bnb_4bit_use_double_quant": True},
    "experts": {**THREE, **FEW, "router_aux_loss_coef": 0.2},
    "dpo": {**THREE, **FEW, "method": "dpo", "beta": 0.3, "rpo_alpha": 0.3},
    "dpo-lora": {**LORA, **FEW, "method": "dpo", "beta": 0.3, "global_batch_size": 4},
    "kto": {**THREE, **FEW, "method": "kto", "beta": 0.3},
    "short": {**THREE, **FEW},
    "kept attention": {**THREE, **FEW, "activation_checkpointing_keeps": "attention"},
    "streamed": {**THREE, **FEW, "streaming": True},
    "noise": {**THREE, **FEW, "neftune_noise_alpha": 5.0},
    "distill": {**THREE, **FEW, "method": "distill", "distill_alpha": 0.5},
    "masks": {**THREE, **LORA, **FEW, "lora_dropout": 0.1, "attention_dropout": 0.1},
    "longrope": {**THREE, **FEW},
    "longrope-padded": {"global_batch_size": 4, **FEW},
    "dynamic": {**THREE, **FEW},
    "dynamic-padded": {"global_batch_size": 4, **FEW},
    "gathered": {**THREE, **FEW},
    "gathered-padded": {"global_batch_size": 4, **FEW},
    "in memory": {**THREE, **FEW},
    "in files": {**THREE, **FEW, "optim_offload": "nvme"},
}
LONG_CONTEXT = (
    "longrope",
    "longrope-padded",
    "dynamic",
    "dynamic-padded",
)  # the documents have 36 to 80 tokens
LONG = 48
CORE = ("padded", "padded-lora", "alone", "three", "three-lora")
PLAIN = (
    *CORE,
    *LONG_CONTEXT,
    "short",
    "gathered",
    "gathered-padded",
    "kept attention",
    "nf4",
    "experts",
    "dpo",
    "dpo-lora",
    "kto",
)  # what tests/training/reference.py computes
ALIKE = ("noise", "distill", "streamed")  # what is compared with whole rows
# name -> ranks, the sizes of its Accelerate file, whether activations are checkpointed, and what is trained under it.
LAYOUTS: dict[str, tuple[int, dict[str, int], bool, tuple[str, ...]]] = {
    "full_shard": (2, {}, False, ("three", *LONG_CONTEXT, *ALIKE)),
    "sp 2": (
        2,
        {"cp_size": 2},
        False,
        (
            *CORE,
            "nf4",
            "experts",
            "dpo",
            "kto",
            "gathered",
            "gathered-padded",
            *LONG_CONTEXT,
            *ALIKE,
        ),
    ),
    "sp 2 offload": (2, {"sp_size": 2}, False, ("short",)),
    "sp 2 bf16": (2, {"sp_size": 2}, False, ("in memory", "in files")),
    "sp 4": (4, {"sp_size": 4}, True, (*CORE, "kept attention", "experts")),
    "sp 2 x shard 2": (
        4,
        {"sp_size": 2, "dp_shard_size": 2},
        False,
        (*CORE, "experts", "dpo-lora", "kto"),
    ),
    "sp 2 x replicate 2": (4, {"sp_size": 2, "dp_replicate_size": 2}, False, ("short",)),
    "sp 2 x tp 2": (4, {"sp_size": 2, "tp_size": 2}, True, (*CORE, "dpo-lora", "kto", "masks")),
    "single": (1, {}, False, ()),
}
# (layout, mode) that a commit trains; the others are slow
QUICK = {("full_shard", "three"), ("sp 2", "three"), ("sp 2", "experts")}
# (saved under, resumed under): the latter's ranks are started after the former's.
RESUMED = [
    ("sp 2", "full_shard"),
    ("full_shard", "sp 2"),
    ("full_shard", "sp 4"),
    ("sp 2", "sp 2 x shard 2"),
    ("sp 4", "single"),
    ("sp 2", "sp 2 x tp 2"),
    ("sp 2 x tp 2", "single"),
]


def mark(cases: Iterable[tuple[str, ...]], quick: Container[tuple[str, ...]]) -> list[Any]:
    """The cases, of which those that are not `quick` are slow."""
    return [pytest.param(*case, marks=[] if case in quick else pytest.mark.slow) for case in cases]


CASES = [
    (layout, mode)
    for layout, (_, _, _, modes) in LAYOUTS.items()
    for mode in modes
    if mode in PLAIN
]

Run = Callable[..., Path]


@pytest.fixture(scope="module")
def recipes(folder: Path) -> dict[str, Path]:
    """A recipe for each mode, on a model whose sizes divide by nothing but its 4 heads; it has 2 key-value heads."""
    model = make_model(
        folder / "model",
        hidden_size=72,
        vocab_size=509,
        num_hidden_layers=2,
        tie_word_embeddings=True,
    )
    teacher = make_model(folder / "teacher", vocab_size=509, num_hidden_layers=1, seed=1)
    experts = make_model(folder / "experts", model_type="qwen3_moe", num_experts=4, num_experts_per_tok=2,
                         moe_intermediate_size=32, initializer_range=0.3)  # fmt: skip
    rope = {
        "rope_type": "longrope",
        "short_factor": [1.0] * 8,
        "long_factor": [3.0] * 8,
        "rope_theta": 1e4,
    }
    longrope = make_model(folder / "longrope", model_type="phi3", original_max_position_embeddings=LONG,
                          rope_parameters=rope | {"original_max_position_embeddings": LONG})  # fmt: skip
    dynamic = make_model(folder / "dynamic", max_position_embeddings=LONG,
                         rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4})  # fmt: skip
    # Three heads, which two ranks cannot divide.
    gathered = make_model(folder / "gathered", model_type="mistral", hidden_size=48, num_attention_heads=3,
                          num_key_value_heads=1, sliding_window=24)  # fmt: skip
    models = {"gathered": gathered, "experts": experts, "longrope": longrope, "dynamic": dynamic}
    chat, pairs = (
        make_chat(folder / "chat.jsonl", rows=26),
        make_pairs(folder / "pairs.jsonl", rows=14),
    )
    own = {
        "distill": {"teacher_model_name_or_path": str(teacher)},
        "in files": {"offload_dir": str(folder / "scratch")},
    }
    return {
        mode: write_recipe(
            folder / f"{mode}.yaml",
            models.get(mode.removesuffix("-padded"), model),
            pairs if keys.get("method") in ("dpo", "kto") else chat,
            **{"max_steps": STEPS} | keys | own.get(mode, {}),
        )
        for mode, keys in MODES.items()
    }


@pytest.fixture(scope="module")
def run(folder: Path, recipes: dict[str, Path], slow_too: bool) -> Run:
    """(layout, mode) -> the run's folder; (layout, mode, saved under) -> that of one that was saved under another layout. Each
    number of ranks is started once."""
    held_out = f"eval_datasets=[{{path: {folder}/chat.jsonl}}]"
    answers = [held_out, "exact_match_samples=3", "sample_prompts=[Add 3 and 3]"]
    unchanged = ["learning_rate=1e-60", f"max_steps={SAVED_AT + 1}", "allow_changed_recipe=true"]
    configs = {}
    for layout, (_, sizes, checkpointing, _) in LAYOUTS.items():
        base = (
            "single" if layout == "single" else "offload" if "offload" in layout else "full_shard"
        )
        precision = "bf16" if "bf16" in layout else "no"
        configs[layout] = write_config(
            folder, base, precision, checkpointing=checkpointing, sizes=sizes
        )

    def path_of(*which: str) -> Path:
        return folder / "-".join(which).replace(" ", "")

    def resume(layout: str, saved: str, name: str, *overrides: str) -> tuple[Path, Path, list[str]]:
        start = path_of(saved, "three") / "checkpoints" / f"step-{SAVED_AT:08}"
        given = [
            f"output_dir={path_of(layout, name, saved)}",
            f"resume_from_checkpoint={start}",
            *overrides,
        ]
        return recipes["three"], configs[layout], given

    started: list[int] = []

    def start(ranks: int) -> None:
        here = [layout for layout, (count, _, _, _) in LAYOUTS.items() if count == ranks]
        runs = [
            (
                recipes[mode],
                configs[layout],
                [f"output_dir={path_of(layout, mode)}", *(answers if mode == "three" else [])],
            )
            for layout in here
            for mode in LAYOUTS[layout][3]
            if slow_too or (layout, mode) in QUICK
        ]
        for saved, layout in RESUMED if slow_too else ():
            if layout in here:  # the second changes nothing: what it saves is what it has read
                runs += [
                    resume(layout, saved, "resumed"),
                    resume(layout, saved, "kept", *unchanged),
                ]
        (folder / f"printed-{ranks}.txt").write_text(
            train_all(folder, runs, ranks=ranks, timeout=400)
        )

    def trained(layout: str, *which: str) -> Path:
        order = (2, 4, 1)
        for ranks in order[: order.index(LAYOUTS[layout][0]) + 1]:
            if ranks not in started:
                started.append(ranks)
                start(ranks)
        return path_of(layout, *which)

    return trained


@pytest.mark.parametrize(("layout", "mode"), mark(CASES, QUICK))
def test_losses_and_gradient_norms_are_those_of_a_plain_loop(
    layout: str, mode: str, run: Run, recipes: dict[str, Path]
) -> None:
    assert_losses(run(layout, mode), reference.losses(recipes[mode], prepare=forget_lengths))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ALIKE)
def test_noise_a_teacher_and_a_stream_are_those_of_whole_rows(mode: str, run: Run) -> None:
    names = ("loss", "grad_norm", *(("kl", "cross_entropy") if mode == "distill" else ()))
    for divided, whole in zip(
        steps_of(run("sp 2", mode)), steps_of(run("full_shard", mode)), strict=True
    ):
        assert [divided[name] for name in names] == pytest.approx(
            [whole[name] for name in names], rel=1e-5
        )


@pytest.mark.slow
def test_state_in_files_is_bit_for_bit_that_in_memory(run: Run) -> None:
    assert_bit_equal(run("sp 2 bf16", "in files"), run("sp 2 bf16", "in memory"), FEW["max_steps"])


@pytest.mark.slow
def test_what_routers_choose_is_counted_once(run: Run) -> None:
    for line, other in zip(
        steps_of(run("sp 4", "experts")), steps_of(run("sp 2 x shard 2", "experts")), strict=True
    ):
        for name in (
            "router_aux_loss",
            "largest_expert_share_by_layer",
            "idle_expert_share_by_layer",
        ):
            assert line[name] == pytest.approx(other[name], rel=1e-5)


@pytest.mark.parametrize(
    "layout", slow_but({"sp 2"}, ["sp 2", "sp 4", "sp 2 x shard 2", "sp 2 x tp 2"])
)
def test_held_out_loss_and_answers_are_those_of_whole_rows(layout: str, run: Run) -> None:
    """Generation computes whole rows on every rank."""

    def results(layout: str) -> tuple[list[float], list[Any]]:
        lines = [
            json.loads(line)
            for line in (run(layout, "three") / "metrics.jsonl").read_text().splitlines()
        ]
        samples = [
            json.loads(line)
            for line in (run(layout, "three") / "samples.jsonl").read_text().splitlines()
        ]
        return [line["eval_loss"] for line in lines if "eval_loss" in line], samples

    losses, samples = results("full_shard")
    assert len(losses) == 2 and len(samples) == 2 * (3 + 1)
    others, other_samples = results(layout)
    assert others == pytest.approx(losses, rel=1e-5)
    assert other_samples == samples


@pytest.mark.slow
@pytest.mark.parametrize(("saved", "layout"), RESUMED)
def test_a_run_resumes_under_another_layout(
    saved: str, layout: str, run: Run, tmp_path: Path
) -> None:
    """With the numbers of the run that nobody stopped, and not one bit of the model changed on the way."""
    lines, others = (
        steps_of(run(saved, "three"))[SAVED_AT:],
        steps_of(run(layout, "resumed", saved)),
    )
    assert [line["step"] for line in others] == [line["step"] for line in lines]
    for name in ("loss", "grad_norm"):
        assert [line[name] for line in others] == pytest.approx(
            [line[name] for line in lines], rel=1e-5
        )
    kept = {f"before-{saved}": run(saved, "three") / "checkpoints" / f"step-{SAVED_AT:08}",
            f"after-{layout}": run(layout, "kept", saved) / "checkpoints" / f"step-{SAVED_AT + 1:08}"}  # fmt: skip
    before, after = (
        load_file(
            export(path, tmp_path / name, verify=False, log=lambda _: None) / "model.safetensors"
        )
        for name, path in kept.items()
    )
    assert before.keys() == after.keys()
    assert all(before[name].equal(after[name]) for name in before)


@pytest.mark.slow
def test_what_every_rank_of_a_tensor_parallel_group_holds_stays_equal(run: Run) -> None:
    """A save compares it: under dropout too, whose masks are those of the tokens that the group has."""
    saved = run("sp 2 x tp 2", "masks") / "checkpoints" / f"step-{FEW['max_steps']:08}"
    assert (saved / "manifest.json").is_file()


def test_the_first_screen_says_what_divides_the_tokens(run: Run, folder: Path) -> None:
    run("sp 2", "three")
    printed = (folder / "printed-2.txt").read_text()
    assert (
        "(for cp_size and sp_size alike): 2 ranks divide the tokens of a row; rows go to 1 group"
        in printed
    )


def test_what_cannot_be_divided_is_refused_before_anything_is_loaded(
    recipes: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(sizes: dict[str, int], *overrides: str, precision: str = "no") -> str:
        config = write_config(tmp_path, "full_shard", precision, sizes=sizes)
        planned = ["plan", "--recipe", str(recipes["three"]), "--config", str(config)]
        assert main([*planned, *overrides]) == 2
        return capsys.readouterr().err

    capped = f"model_name_or_path={make_model(tmp_path / 'gemma2', model_type='gemma2')}"
    said = refuse({"sp_size": 8}, capped)
    assert "cp_size (or sp_size) 8 must divide the attention heads of gemma2" in said
    assert "but the model has 4; set it to 1, 2 or 4" in said
    of_two = "but the model has 4, of which tp_size 2 leaves 2 on a rank; set it to 1 or 2"
    assert of_two in refuse({"tp_size": 2, "sp_size": 4}, capped)
    assert "mixed_precision: fp8" in refuse({"sp_size": 2}, capped, precision="fp8")
    kernel = "attn_implementation: sdpa cannot be combined with cp_size"
    assert kernel in refuse({"sp_size": 2}, "attn_implementation=sdpa")
