"""Routing replay: the experts that were chosen while sampling are those of training, held against transformers' own forward."""

import json
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from finetune.config.accelerate_file import read_sharding
from finetune.config.reader import read_recipe
from finetune.distributed.world import alone
from finetune.errors import UserError
from finetune.models.routing import find_routing, install_routing
from finetune.rollout.embedded import EmbeddedEngine
from finetune.rollout.engine import Request, Sampled, Sampling
from finetune.run import fine_tune
from tests.conftest import make_chat, make_model
from tests.models.families import build, documents, gradients, ours, packed, plain_loss
from tests.training.layouts import assert_bit_equal, steps_of, train_all, write_config

FAMILIES = ("qwen3_moe", "mixtral")
SIZES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
}
SIZES["glm4_moe"] = {  # chooses a group first
    "n_routed_experts": 6,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
LENGTHS = (7, 12, 5)
LAYERS, EXPERTS, CHOSEN = 2, 8, 2


def take(model: Any, layer: int, given: Tensor) -> None:
    """Makes a router of transformers take `given` int64[tokens, chosen], written from the paper: weights are the softmax of all
    scores, at these, divided by their sum."""
    block = model.model.layers[layer].mlp
    divides = getattr(block.gate, "norm_topk_prob", True)

    def forward(self: Any, hidden: Tensor) -> Any:
        logits = hidden.reshape(-1, hidden.shape[-1]) @ self.weight.T
        weights = torch.stack(
            [row.float().softmax(-1)[own] for row, own in zip(logits, given, strict=True)]
        )
        if divides:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights.to(logits.dtype), given

    block.gate.forward = MethodType(forward, block.gate)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_replayed_forward_is_that_of_transformers_with_these_experts(family: str) -> None:
    config = SIZES[family]
    examples = documents(LENGTHS)
    drawn = torch.rand(sum(LENGTHS), LAYERS, EXPERTS, generator=torch.Generator().manual_seed(3))
    given = drawn.argsort(-1)[..., :CHOSEN]
    mine = ours(build(family, **config))
    install_routing(mine, None)
    routing = find_routing(mine)
    assert routing is not None
    routing.replay()
    inputs = packed(examples)
    rows = torch.full((1, inputs["input_ids"].shape[1], LAYERS, CHOSEN), -1, dtype=torch.int16)
    rows[0, : sum(LENGTHS)] = given.short()
    loss = mine(**inputs, replayed_experts=rows)
    found = gradients(mine, loss)
    theirs = build(family, **config)
    total = torch.zeros(())
    for example, own in zip(examples, given.split(LENGTHS), strict=True):
        for layer in range(LAYERS):
            take(theirs, layer, own[:, layer])
        total = total + plain_loss(theirs, [example])
    assert loss.item() == pytest.approx(total.item(), rel=1e-6)
    for name, expected in gradients(theirs, total).items():
        torch.testing.assert_close(found[name], expected, rtol=1e-4, atol=1e-5)
    free = build(family, **config)
    assert abs(plain_loss(free, examples).item() - total.item()) > 1e-2  # other experts matter


@pytest.mark.parametrize("family", FAMILIES)
def test_the_experts_of_a_completion_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    """Of prompts of several lengths, and completions that end at different tokens."""
    model = ours(build(family, **SIZES[family]))
    install_routing(model, None)
    routing = find_routing(model)
    assert routing is not None
    routing.replay()
    prompts = [(5, 6, 7), (9, 3, 4, 8, 2, 11), (12, 5)]
    requests = [Request(prompts[i % 3], (1, i), 2 + i) for i in range(6)]
    engine = EmbeddedEngine(model, alone(), [], 4, routing=routing)
    sampled = engine.sample(requests, Sampling(max_tokens=9))
    plain = build(family, **SIZES[family]).eval()
    for request, each in zip(requests, sampled, strict=True):
        ids = [*request.prompt_ids, *each.token_ids]
        assert each.experts is not None and each.experts.shape == (len(ids), LAYERS, CHOSEN)
        with torch.no_grad():
            scores = plain(torch.tensor([ids]), output_router_logits=True).router_logits
        own = torch.stack([layer.topk(CHOSEN).indices for layer in scores], 1)
        assert torch.equal(torch.from_numpy(each.experts[:-1]).long(), own[:-1])
        assert (each.experts[-1] == -1).all()
        again = Sampled.of_json(json.loads(json.dumps(each.as_json())))
        assert again.experts is not None and (again.experts == each.experts).all()


@pytest.fixture(scope="module")
def recipe(folder: Path) -> Path:
    sizes = SIZES["qwen3_moe"]
    model = make_model(folder / "model", model_type="qwen3_moe", initializer_range=0.3, **sizes)
    (folder / "my_rewards.py").write_text(
        "def even(completion_ids, **_):\n"
        "    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]\n"
    )
    keys = {
        "method": "grpo",
        "model_name_or_path": str(model),
        "datasets": [{"path": str(make_chat(folder / "chat.jsonl", rows=12))}],
        "dataset_cache_dir": str(folder / "cache"),
        "rewards": ["my_rewards.py:even"],
        "num_generations": 3,
        "max_completion_length": 12,
        "max_length": 100,
        "global_batch_size": 4,
        "per_device_train_batch_size": 2,
        "max_steps": 3,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "export_at_end": False,
        "routing_replay": True,
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(keys))
    return path


# (ranks, layout, whether layers are recomputed, whether rows are packed)
EVERY = [
    (ranks, layout, checkpointing, packing)
    for ranks, layout, checkpointing in (
        (1, "single", False),
        (1, "single", True),
        (2, "ddp", False),
        (2, "full_shard", True),
    )
    for packing in (True, False)
]
QUICK = [(1, "single", False, True), (2, "full_shard", True, False)]


@pytest.mark.parametrize(
    "cases", [QUICK, pytest.param(EVERY, marks=pytest.mark.slow)], ids=["quick", "every"]
)
def test_the_log_ratio_is_zero_in_every_layout(
    cases: list[tuple[int, str, bool, bool]], folder: Path, recipe: Path, tmp_path: Path
) -> None:
    """Packed and padded, recomputed or not; the ranks sample and train on the same."""
    losses = []
    for ranks in (1, 2):
        runs = []
        for count, layout, checkpointing, packing in cases:
            if count == ranks:
                config = write_config(folder, layout, checkpointing=checkpointing)
                name = f"{tmp_path}/{ranks}-{layout}-{checkpointing}-{packing}"
                runs.append((recipe, config, [f"packing={packing}", f"output_dir={name}"]))
        train_all(folder, runs, ranks=ranks)
        for *_, keys in runs:
            steps = steps_of(Path(keys[-1].partition("=")[2]))
            assert len(steps) == 3 and all(0 < step["log_ratio/mean"] <= 1e-5 for step in steps)
            losses.append([step["loss"] for step in steps])
    for each in losses:
        assert each == pytest.approx(losses[0], abs=1e-5)


@pytest.mark.slow
def test_a_resumed_run_trains_on_the_same_experts(folder: Path, recipe: Path) -> None:
    """Between two updates on the same completions, whose experts are in the checkpoint."""
    common = ["num_iterations=2", "max_steps=4", "learning_rate=0.01", "save_steps=1"]
    whole = fine_tune_in(folder / "whole", recipe, common)
    middle = whole / "checkpoints" / "step-00000003"
    assert '"int16"' in (middle / "rollouts.jsonl").read_text()
    parts = fine_tune_in(folder / "parts", recipe, [*common, f"resume_from_checkpoint={middle}"])
    assert_bit_equal(parts, whole, 4, from_step=3)


def fine_tune_in(output: Path, recipe: Path, keys: list[str]) -> Path:
    fine_tune(read_recipe(recipe, [*keys, f"output_dir={output}"]), read_sharding(None, None, {}))
    return output


@pytest.mark.parametrize(
    ("family", "keys", "message"),
    [
        ("llama", [], "routing_replay cannot be combined with the dense model"),
        ("qwen3_moe", ["torch_compile=true"], "a compiled layer chooses within its graph"),
        ("qwen3_moe", ["vllm_server_base_url=http://localhost:8000"], "does not hold the experts"),
        ("glm4_moe", [], "routing_replay: .*(does not choose a token's experts|are not found)"),
    ],
)
def test_what_cannot_be_replayed_is_a_sentence(
    tmp_path: Path, recipe: Path, family: str, keys: list[str], message: str
) -> None:
    model = make_model(tmp_path / "model", model_type=family, **SIZES.get(family, {}))
    with pytest.raises(UserError, match=message):
        fine_tune_in(tmp_path / "run", recipe, [*keys, f"model_name_or_path={model}"])
