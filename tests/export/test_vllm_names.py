"""Adapters under the names by which vLLM loads them: the same products, computed plainly from the file as vLLM reads it.

What vLLM itself computes with such a file is in the table of docs/export.md (benchmarks/serving.py).
"""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from finetune.cli import main
from tests.conftest import make_model

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
FAMILIES: dict[str, dict[str, Any]] = {
    "glm4": {"target_modules": ["q_proj", "gate_up_proj", "down_proj"]},
    "mixtral": {"target_modules": ["o_proj"], "target_parameters": EXPERTS},
}
SIZES = {"mixtral": {"num_local_experts": 3}}
# Patterns name modules by their names in transformers, of one layer and of all.
PATTERNS: dict[str, dict[str, Any]] = {
    "glm4": {
        "rank_pattern": {r"layers.1.mlp.gate_up_proj": 2, "q_proj": 6},
        "alpha_pattern": {r"mlp\.gate_up_proj": 24, r"layers.0.*.down_proj": 5},
    },
    "mixtral": {
        "rank_pattern": {r"layers.1.mlp.experts.gate_up_proj": 2, "mlp.experts.down_proj": 3},
        "alpha_pattern": {r"layers.0.mlp.experts.down_proj": 24, "o_proj": 5},
    },
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bases")
    return {
        family: make_model(folder / family, model_type=family, **SIZES.get(family, {}))
        for family in FAMILIES
    }


def save_adapter(base: Path, folder: Path, **keys: Any) -> dict[str, Tensor]:
    """Saves an adapter with random values by peft, and returns what peft adds to each parameter of the base."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    before = {
        name: each.detach().clone()
        for name, each in AutoModelForCausalLM.from_pretrained(base).named_parameters()
    }
    torch.manual_seed(0)
    config = LoraConfig(**{"r": 4, "lora_alpha": 16, "init_lora_weights": False} | keys)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    model.save_pretrained(folder)
    after = model.merge_and_unload().named_parameters()
    changes = {name: each.detach() - before[name] for name, each in after}
    return {name: change for name, change in changes.items() if change.any()}


def find_scale(config: dict[str, Any], module: str) -> tuple[int, float]:
    """Rank and scale by vLLM's rule (`PEFTHelper.get_rank_and_scaling` of vLLM 0.32)."""
    if module.endswith(".experts.base_layer"):
        module = module.removesuffix(".base_layer") + ".gate_up_proj"
    elif module.endswith(".experts"):
        module += ".down_proj"

    def find(key: str, default: int) -> int:
        for pattern, value in (config[key] or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", module):
                return int(value)
        return default

    rank = find("rank_pattern", config["r"])
    alpha = find("alpha_pattern", config["lora_alpha"])
    return rank, alpha / (math.sqrt(rank) if config["use_rslora"] else rank)


def multiply(folder: Path) -> dict[str, Tensor]:
    """What vLLM adds to each of its modules: A and B of a layer, or those of all experts, peft's way stacked."""
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    products = {}
    for name, a in tensors.items():
        if not name.endswith(".lora_A.weight"):
            continue
        b = tensors[name.replace("lora_A", "lora_B")]
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        rank, scale = find_scale(config, module)
        if ".experts" in module:
            experts = len(a) // rank
            product = torch.einsum(
                "erk,ore->eok", a.view(experts, rank, -1), b.view(-1, rank, experts)
            )
        else:
            product = b @ a
        products[module] = product * scale
    return products


@pytest.mark.parametrize("keys", ["plain", "rslora", "patterns"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_products_are_pefts(
    family: str, keys: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    more = {"plain": {}, "rslora": {"use_rslora": True}, "patterns": PATTERNS[family]}[keys]
    changes = save_adapter(bases[family], tmp_path / "peft", **FAMILIES[family] | more)
    out = tmp_path / "out"
    command = ["export", str(tmp_path / "peft"), "--output", str(out), "--adapter-only"]
    assert main([*command, "--adapter-names", "vllm"]) == 0
    products = multiply(out)
    expected = {}
    for name, change in changes.items():
        module = name.removesuffix(".weight")
        if family == "glm4" and module.endswith("gate_up_proj"):
            gate, up = change.chunk(2)
            expected[module.replace("gate_up_proj", "gate_proj")] = gate
            expected[module.replace("gate_up_proj", "up_proj")] = up
        elif ".experts." in module:
            place = "experts.base_layer" if module.endswith("gate_up_proj") else "experts"
            expected[re.sub(r"mlp\.experts.*", f"block_sparse_moe.{place}", module)] = change
        else:
            expected[module] = change
    assert products.keys() == expected.keys()
    for module, product in products.items():
        torch.testing.assert_close(product, expected[module], atol=2e-6, rtol=1e-5)


def test_an_adapter_whose_names_are_vllms_too_stays_a_peft_folder(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    save_adapter(bases["mixtral"], tmp_path / "peft", target_modules=["q_proj"])
    command = ["export", str(tmp_path / "peft"), "--adapter-only", "--output"]
    assert main([*command, str(tmp_path / "plain")]) == 0
    assert main([*command, str(tmp_path / "vllm"), "--adapter-names", "vllm"]) == 0
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        one = (tmp_path / "plain" / file).read_bytes()
        assert one == (tmp_path / "vllm" / file).read_bytes()


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"use_dora": True, "target_modules": ["gate_up_proj"]}, "use_dora"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"target_modules": ["q_proj"], "init_lora_weights": "pissa"}, "init_lora_weights: pissa"),
        ({"target_modules": ["q_proj"], "r": 600}, "a rank above 512"),
        ({"target_parameters": EXPERTS[:1]}, "gate_up_proj of experts alone"),
    ],
)
def test_what_vllm_loads_under_no_name_is_a_sentence(
    keys: dict[str, Any],
    reason: str,
    bases: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    family = "mixtral" if "target_parameters" in keys else "glm4"
    save_adapter(bases[family], tmp_path / "peft", **keys)
    command = ["export", str(tmp_path / "peft"), "--output", str(tmp_path / "out")]
    assert main([*command, "--adapter-only", "--adapter-names", "vllm"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert (
        f"{tmp_path / 'peft'}: --adapter-names: vLLM loads no adapter with {reason}; export the "
        "merged model without --adapter-only" in said
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("flags", [[], ["--adapter-only", "--format", "gguf"]])
def test_the_names_are_of_a_peft_folder_alone(
    flags: list[str], bases: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_adapter(bases["glm4"], tmp_path / "peft", target_modules=["q_proj"])
    command = ["export", str(tmp_path / "peft"), "--output", str(tmp_path / "out")]
    assert main([*command, "--adapter-names", "vllm", *flags]) == 2
    assert "--adapter-names: vllm: vLLM loads an adapter from a PEFT folder; " in " ".join(
        capsys.readouterr().err.split()
    )


def test_the_last_screens_command_works_and_the_folder_says_whose_it_is(
    bases: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_adapter(bases["glm4"], tmp_path / "peft", **FAMILIES["glm4"])
    out = tmp_path / "adapter"
    assert main(["export", str(tmp_path / "peft"), "--output", str(out), "--adapter-only"]) == 0
    said = capsys.readouterr().out
    advised = re.search(r"vLLM +finetune (export .*) && (vllm serve .*)", said)
    assert advised is not None, said
    assert main(advised[1].split()) == 0
    named = f"{out}-vllm"
    assert advised[2].endswith(f"--lora-modules adapter-vllm={named}")
    said = capsys.readouterr().out
    assert advised[2] in said and "finetune chat" not in said
    assert not any(
        "gate_up_proj" in name for name in load_file(f"{named}/adapter_model.safetensors")
    )
    (tmp_path / "prompts.txt").write_text("Hi\n")
    check = ["serve-check", named, "--server", "vllm", "--prompts", str(tmp_path / "prompts.txt")]
    for command in (["chat", named, "--prompt", "Hi"], check):
        assert main(command) == 2
        assert (
            "adapter_config.json: adapter_names: its modules have the names of vllm, which alone "
            "opens it; name the folder that it was exported from"
        ) in " ".join(capsys.readouterr().err.split())


def test_serve_check_gives_vllm_the_names_that_it_knows(
    bases: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`vllm` is a stand-in here, which copies the folder that it was given, and ends."""
    save_adapter(bases["glm4"], tmp_path / "peft", **FAMILIES["glm4"])
    script = tmp_path / "bin" / "vllm"
    script.parent.mkdir()
    script.write_text(
        "#!/bin/sh\nfor given; do case $given in peft=*) cp -r ${given#peft=} "
        f"{tmp_path}/given;; esac; done\necho Error: a stand-in; exit 3\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(script.parent), prepend=":")
    (tmp_path / "prompts.txt").write_text("Once upon a time\n")
    command = ["serve-check", str(tmp_path / "peft"), "--server", "vllm"]
    assert main([*command, "--prompts", str(tmp_path / "prompts.txt")]) == 2
    assert "ended with 3: Error: a stand-in" in " ".join(capsys.readouterr().err.split())
    names = load_file(tmp_path / "given" / "adapter_model.safetensors").keys()
    assert any(".mlp.gate_proj.lora_B" in name for name in names)
    assert not any("gate_up_proj" in name for name in names)
