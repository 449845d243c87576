"""Expert parallelism: experts divided over ranks give the losses, gradients, checkpoints and exports of one process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from finetune.checkpoint.manifest import MODEL
from finetune.config.families import FAMILIES as KNOWN
from finetune.export.export import export
from finetune.files.tensors import read, read_folder
from tests.conftest import make_chat, make_model, slow_but
from tests.training import reference
from tests.training.layouts import (
    assert_bit_equal,
    assert_losses,
    steps_of,
    train_all,
    write_config,
    write_recipe,
    write_split_recipes,
)
from tests.training.test_expert_adapters import EXPERTS
from tests.training.test_experts import BALANCED, COEFFICIENT, FAMILIES, SMALL

STEPS, SAVED, FAMILY_STEPS = 6, 2, 2
DIVIDED = "expert_parallel_size=2"
COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
LORA: dict[str, Any] = {
    "use_peft": True, "lora_r": 4, "lora_target_modules": ["q_proj", "v_proj", "o_proj"], "lora_target_parameters": EXPERTS,
}  # fmt: skip
SAVING = {"save_steps": SAVED, "save_total_limit": None}
PACKED = {"packing": True, "max_length": 160}  # three documents a row
# A name of the run -> model, keys. On 4 ranks, 2 of them have the same experts: 2 of 4, which FSDP deals out whole, or 3 of 6,
# whose rows it shards.
ON_TWO: dict[str, tuple[str, dict[str, Any]]] = {
    "padded": ("mixtral-4", {"max_steps": STEPS} | SAVING),
    "lora": (
        "mixtral-4",
        {"max_steps": STEPS, "modules_to_save": ["layers.1.mlp.gate"]} | SAVING | LORA,
    ),
    "lora-packed": ("qwen3_moe-6", {"max_steps": STEPS} | LORA | PACKED),
    "tokens": (
        "mixtral-4",
        {"max_steps": FAMILY_STEPS} | PACKED,
    ),  # of a row are on both ranks as well
    "idle": ("mixtral-idle", {"max_steps": FAMILY_STEPS}),
    "idle-lora": ("mixtral-idle", {"max_steps": FAMILY_STEPS} | LORA),
    "gpt_oss-lora": (
        "gpt_oss-4",
        {"max_steps": FAMILY_STEPS} | LORA,
    ),  # whose experts are stored transposed
    **{
        family: (f"{family}-4", {"max_steps": FAMILY_STEPS})
        for family, known in KNOWN.items()
        if known.has_expert_parallelism
        if family not in ("mixtral", "qwen3_moe")
    },
}
QUICK = ("padded", "lora", "idle-lora")
ON_FOUR: dict[str, tuple[str, dict[str, Any]]] = {
    "four": ("mixtral-4", {"max_steps": STEPS} | SAVING),
    "four-packed": ("qwen3_moe-6", {"max_steps": STEPS} | PACKED),
    "four-lora": ON_TWO["lora"],
}
# Dense and shared layers too, whose names plain peft would take for a routed expert's: compared with one process of ours.
ALL_LINEAR = LORA | {"max_steps": FAMILY_STEPS, "lora_target_modules": "all-linear"}
# On two replicas -> the recipe of the run.
REPLICATED = {
    "hybrid": "four",
    "hybrid-packed": "four-packed",
    "hybrid-lora": "four-lora",
    "hybrid-lora-packed": "lora-packed",
    "hybrid-split": "split",  # a row's turns, as a row for each
}
PLAIN = {
    "four": "padded",
    "split": "apart",
}  # the same on more ranks, or in other rows: the recipe of its plain loop
UNMOVED = ("mixtral-4", "gpt_oss-6")
QUICK_UNMOVED = ("gpt_oss-6",)
# A run that resumed -> the whole one that its steps are compared with, and the step that it resumed from.
RESUMED = {
    "whole": ("four", SAVED), "single": ("four", SAVED), "whole-two": ("four", SAVED + 3), "single-two": ("four", SAVED + 3),
    "lora-whole": ("four-lora", SAVED), "lora-two": ("four-lora", SAVED),
}  # fmt: skip


@pytest.fixture(scope="module")
def recipes(folder: Path, slow_too: bool) -> dict[str, Path]:
    """A recipe for each run; the rows of a step do not divide by ranks and micro-batches: some ranks get fillers."""
    data, models = make_chat(folder / "chat.jsonl", rows=26), {}
    trained = ON_TWO | ON_FOUR | {"all-linear": ("deepseek_v3-4", ALL_LINEAR)}
    unmoved = UNMOVED if slow_too else QUICK_UNMOVED
    if not slow_too:
        trained = {name: trained[name] for name in QUICK}
    for name in {model for model, _ in trained.values()} | set(unmoved):
        family, _, count = name.rpartition("-")
        keys = {
            key: 4 if count == "idle" else int(count) for key in COUNTS if key in FAMILIES[family]
        }
        models[name] = make_model(
            folder / name, model_type=family, **SMALL | FAMILIES[family] | keys
        )
    path = models["mixtral-idle"] / "model.safetensors"
    tensors = load_file(path)
    routers = [name for name in tensors if name.endswith("layers.1.block_sparse_moe.gate.weight")]
    assert routers
    tensors[
        routers[0]
    ].zero_()  # ties: every token chooses the first two experts, both on the first rank
    save_file(tensors, path, {"format": "pt"})
    found = {}
    for name, (model, keys) in trained.items():
        coefficient = COEFFICIENT if model.rpartition("-")[0] in BALANCED else None
        common = {
            "global_batch_size": 5,
            "router_aux_loss_coef": coefficient,
            "learning_rate": 3e-4,
        }
        found[name] = write_recipe(folder / f"{name}.yaml", models[model], data, **common | keys)
    for model in unmoved:
        steps = {"global_batch_size": 4, "max_steps": 1, "learning_rate": 1e-46}  # 0 in fp32
        found[f"unmoved-{model}"] = write_recipe(
            folder / f"unmoved-{model}.yaml", models[model], data, **steps
        )
    if slow_too:
        auxiliary = {"router_aux_loss_coef": COEFFICIENT}
        found["split"], found["apart"] = write_split_recipes(
            folder, models["mixtral-4"], max_steps=SAVED, **auxiliary
        )
    return found


@pytest.fixture(scope="module")
def configs(folder: Path) -> dict[str, Path]:
    """The Accelerate file of a run, where it is not the first."""
    return {
        "whole": write_config(folder, "full_shard"),
        "tokens": write_config(folder, "full_shard", sizes={"cp_size": 2}),
        "four": write_config(folder, "full_shard", checkpointing=True),
        "four-lora": write_config(folder, "shard_grad_op"),
        "glm4_moe": write_config(folder, "offload"),
        "olmoe": write_config(folder, "no_wrap"),
        "single": write_config(folder, "single"),
        "bf16": write_config(folder, "full_shard", "bf16"),
    }


@pytest.fixture(scope="module")
def run(folder: Path, recipes: dict[str, Path], configs: dict[str, Path]) -> Callable[..., Any]:
    """A run for `train_all`: its name, its recipe's and its file's name, and keys."""

    def make(name: str, recipe: str, config: str, *keys: str) -> tuple[Path, Path, list[str]]:
        return (
            recipes[recipe],
            configs.get(config, configs["whole"]),
            [f"output_dir={folder / 'runs' / name}", *keys],
        )

    return make


@pytest.fixture(scope="module")
def runs(folder: Path, run: Callable[..., Any], slow_too: bool) -> Callable[[str], Path]:
    """The folder of a run of 2 ranks, or of one, which resumes what was saved before. Each set of ranks is started once."""
    unmoved = UNMOVED if slow_too else QUICK_UNMOVED
    two = [run(f"unmoved-{model}", f"unmoved-{model}", "whole", DIVIDED) for model in unmoved]
    names = (*ON_TWO, "all-linear") if slow_too else QUICK
    two += [run(name, name, name, DIVIDED) for name in names]
    train_all(folder, two, ranks=2, timeout=400)
    saved = folder / "runs" / "padded" / "checkpoints" / f"step-{SAVED:08d}"
    one = [run("alone", "padded", "single", f"resume_from_checkpoint={saved}")]
    one += [run("lora-single", "lora", "single")]
    one += [run("all-linear-single", "all-linear", "single")] if slow_too else []
    train_all(folder, one, ranks=1)
    return lambda name: folder / "runs" / name


@pytest.fixture(scope="module")
def more_runs(
    folder: Path, run: Callable[..., Any], runs: Callable[[str], Path]
) -> Callable[[str], Path]:
    """As `runs`, of 4 ranks first, then 1, then 2, which resume what was saved before."""

    def resume(
        name: str, start: str, step: int, config: str, *keys: str, recipe: str = "four"
    ) -> Any:
        path = runs(start) / "checkpoints" / f"step-{step:08d}"
        return run(
            name, recipe, config, f"resume_from_checkpoint={path}", f"save_steps={SAVED + 3}", *keys
        )

    four = [run(name, name, name, DIVIDED) for name in ON_FOUR]
    few = [DIVIDED, f"max_steps={FAMILY_STEPS}"]
    in_files = ["optim_offload=nvme", f"offload_dir={folder}/scratch"]
    four += [
        run("in memory", "four-packed", "bf16", *few),
        run("in files", "four-packed", "bf16", *few, *in_files),
    ]
    train_all(folder, [*four, resume("whole", "four", SAVED, "whole")], ranks=4, timeout=400)
    train_all(folder, [resume("single", "four", SAVED, "single")], ranks=1)
    again = [
        resume(f"{start}-two", start, SAVED + 3, "whole", DIVIDED) for start in ("whole", "single")
    ]
    again += [resume("lora-whole", "four-lora", SAVED, "whole", recipe="four-lora")]
    again += [resume("lora-two", "lora-single", SAVED, "whole", DIVIDED, recipe="four-lora")]
    train_all(folder, again, ranks=2, timeout=400)
    return runs


@pytest.fixture(scope="module")
def replicated(
    folder: Path, recipes: dict[str, Path], more_runs: Callable[[str], Path]
) -> Callable[[str], Path]:
    """As `more_runs`, of two replicas of two ranks, which divide the experts between them."""
    hybrid = write_config(folder, "full_shard", mesh=(2, 2))

    def resume(name: str, start: str, config: Path, *keys: str) -> Any:
        path = more_runs(start) / "checkpoints" / f"step-{SAVED:08d}"
        return (
            recipes["four"],
            config,
            [f"output_dir={more_runs(name)}", f"resume_from_checkpoint={path}", *keys],
        )

    four: list[Any] = [
        (recipes[name], hybrid, [f"output_dir={more_runs(run)}", DIVIDED])
        for run, name in REPLICATED.items()
    ]
    train_all(folder, [*four, resume("into-hybrid", "four", hybrid, DIVIDED)], ranks=4, timeout=400)
    train_all(folder, [resume("hybrid-single", "hybrid", write_config(folder, "single"))], ranks=1)
    train_all(
        folder,
        [resume("hybrid-two", "hybrid", write_config(folder, "full_shard"), DIVIDED)],
        ranks=2,
    )
    return more_runs


@pytest.mark.slow
@pytest.mark.parametrize("name", REPLICATED)
def test_replicas_of_divided_experts_train_as_one_process(
    name: str, replicated: Callable[[str], Path], recipes: dict[str, Path]
) -> None:
    """Their gradients are averaged over the replicas, once for each step."""
    lines = assert_losses(
        replicated(name), reference.losses(recipes[PLAIN.get(REPLICATED[name], REPLICATED[name])])
    )
    # Later a large norm has drifted by 3e-5, on one rank too.
    assert len(lines) == (SAVED if name == "hybrid-split" else STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["into-hybrid", "hybrid-single", "hybrid-two"])
def test_a_run_resumes_with_replicas_of_divided_experts_and_without(
    name: str, replicated: Callable[[str], Path]
) -> None:
    _assert_resumed(replicated(name), replicated("four"), SAVED)


@pytest.mark.parametrize("name", slow_but(QUICK, ON_TWO))
def test_losses_and_gradients_are_those_of_one_process(
    name: str, runs: Callable[[str], Path], recipes: dict[str, Path]
) -> None:
    """Of transformers alone, whatever the ranks send each other; a rank that no token is sent to has its part in it."""
    lines = assert_losses(runs(name), reference.losses(recipes[name]))
    assert len(lines) == ON_TWO[name][1]["max_steps"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_FOUR)
def test_four_ranks_of_which_two_have_the_same_experts(
    name: str, more_runs: Callable[[str], Path], recipes: dict[str, Path]
) -> None:
    lines = assert_losses(more_runs(name), reference.losses(recipes[PLAIN.get(name, name)]))
    assert len(lines) == STEPS


def test_idle_experts_are_those_of_all_ranks(runs: Callable[[str], Path]) -> None:
    assert steps_of(runs("idle-lora"))[0]["idle_expert_share_by_layer"][1] == 0.5


@pytest.mark.slow
def test_routing_is_counted_once(more_runs: Callable[[str], Path]) -> None:
    """The auxiliary loss is that of another number of ranks."""
    two, four = steps_of(more_runs("padded")), steps_of(more_runs("four"))
    for key in ("router_aux_loss", "largest_expert_share_by_layer"):
        assert [line[key] for line in two] == [pytest.approx(line[key], rel=1e-5) for line in four]


def test_a_run_of_two_ranks_resumes_on_one(runs: Callable[[str], Path]) -> None:
    _assert_resumed(runs("alone"), runs("padded"), SAVED)


@pytest.mark.slow
@pytest.mark.parametrize("name", RESUMED)
def test_a_run_resumes_in_another_layout(name: str, more_runs: Callable[[str], Path]) -> None:
    """Divided on 4 ranks, then sharded on 4 or 2 or whole on 1, then divided on 2."""
    start, step = RESUMED[name]
    _assert_resumed(more_runs(name), more_runs(start), step)


def _assert_resumed(run: Path, whole: Path, step: int) -> None:
    expected = {line["step"]: line for line in steps_of(whole)}
    lines = steps_of(run)
    assert [line["step"] for line in lines] == list(range(step + 1, STEPS + 1))
    for line in lines:
        assert line["loss"] == pytest.approx(expected[line["step"]]["loss"], rel=1e-5)
        assert line["grad_norm"] == pytest.approx(expected[line["step"]]["grad_norm"], rel=1e-5)
    ours, theirs = (_checkpoint(each, STEPS) for each in (run, whole))
    assert ours.keys() == theirs.keys()
    assert all(torch.allclose(ours[key], theirs[key], rtol=1e-3, atol=1e-5) for key in ours)


@pytest.mark.slow
def test_state_in_files_is_bit_for_bit_that_in_memory(more_runs: Callable[[str], Path]) -> None:
    """Of experts, whose rows are sharded, and of all else, which is sharded over all ranks."""
    assert_bit_equal(more_runs("in files"), more_runs("in memory"), FAMILY_STEPS)


@pytest.mark.parametrize("model", slow_but(QUICK_UNMOVED, UNMOVED))
def test_the_export_of_experts_that_did_not_move_is_the_folder_they_came_from(
    model: str, runs: Callable[[str], Path], folder: Path, tmp_path: Path
) -> None:
    """Loaded, saved and exported: the same names, dtypes and values, tensor by tensor."""
    before = load_file(folder / model / "model.safetensors")
    exported = export(
        runs(f"unmoved-{model}"), tmp_path / "export", verify=False, log=lambda _: None
    )
    after = load_file(exported / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(
        before[name].dtype == after[name].dtype and torch.equal(before[name], after[name])
        for name in before
    )


@pytest.mark.slow
def test_adapters_on_every_layer_are_those_of_one_process(runs: Callable[[str], Path]) -> None:
    """Of latent attention, a dense layer and shared experts too, and the routed ones."""
    divided, alone = (steps_of(runs(name)) for name in ("all-linear", "all-linear-single"))
    for key in ("loss", "grad_norm"):
        assert [line[key] for line in divided] == [
            pytest.approx(line[key], rel=1e-5) for line in alone
        ]


def test_plain_peft_opens_the_adapter_of_divided_experts(
    runs: Callable[[str], Path], folder: Path
) -> None:
    """Whose tensors are those of a run of one process, and whose logits are those of the merged export."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    for name in ("lora", "lora-single"):
        export(runs(name), runs(name) / "adapter", adapter_only=True, log=lambda _: None)
    export(runs("lora"), runs("lora") / "export", verify=False, log=lambda _: None)
    ours, alone = (
        load_file(runs(n) / "adapter/adapter_model.safetensors") for n in ("lora", "lora-single")
    )
    assert ours.keys() == alone.keys()
    assert all(torch.allclose(ours[key], alone[key], rtol=1e-3, atol=1e-5) for key in ours)
    ids, load = torch.arange(3, 40)[None], AutoModelForCausalLM.from_pretrained
    base = load(folder / "mixtral-4", dtype=torch.float32).eval()
    before = base(ids).logits
    found = PeftModel.from_pretrained(base, runs("lora") / "adapter").eval()(ids).logits
    merged = load(runs("lora") / "export", dtype=torch.float32).eval()(ids).logits
    assert (found - before).norm() > 1e-3 * before.norm()
    assert (found - merged).norm() < 1e-5 * merged.norm()


def _checkpoint(run: Path, step: int) -> dict[str, torch.Tensor]:
    stored = read_folder(run / "checkpoints" / f"step-{step:08d}" / MODEL)
    return {name: read(tensor) for name, tensor in stored.items()}
