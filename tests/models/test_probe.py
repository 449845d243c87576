"""Given a model of any family, when it is about to be trained, then its loss is that of one document at a time through
transformers alone, or it is refused in a sentence that says what to do."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.config.layout import Sharding
from finetune.config.schema import Data, Lora, Model
from finetune.distributed.join import join, leave
from finetune.errors import UserError
from finetune.models import probe
from finetune.models.load import load_model
from finetune.models.probe import check_training_forward
from tests.conftest import make_model, slow_but
from tests.models.families import HYBRIDS, MASKED, OTHERS, OWN_ATTENTION, build
from tests.ranks import launch_ranks

MIXTURE: dict[str, Any] = {
    "num_hidden_layers": 4,
    "n_routed_experts": 16,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 0,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "head_dim": 8,
    "num_key_value_heads": 4,
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"sharding": {"layout": "ddp"}},
    "fsdp1": {"sharding": {"layout": "fsdp1"}},
    "fsdp2": {"sharding": {"layout": "fsdp2"}},
    "bf16": {"sharding": {"layout": "fsdp2", "mixed_precision": "bf16"}},
    "bf16, ddp": {"sharding": {"layout": "ddp", "mixed_precision": "bf16"}},
    "dtype: bfloat16": {"sharding": {"layout": "fsdp2"}, "dtype": "bfloat16"},
    "lora": {"sharding": {"layout": "fsdp2"}, "use_peft": True},
    "lora, fsdp1, bf16": {
        "sharding": {"layout": "fsdp1", "mixed_precision": "bf16"},
        "use_peft": True,
    },
    "checkpointing": {"sharding": {"layout": "fsdp2", "activation_checkpointing": True}},
    "compiled": {"sharding": {"layout": "fsdp2"}, "torch_compile": True},
}
HYBRID: dict[str, dict[str, Any]] = {
    "hybrid": {
        "sharding": {
            "layout": "fsdp2",
            "strategy": "HYBRID_SHARD",
            "replicate_size": 2,
            "shard_size": 2,
        }
    }
}


@pytest.mark.parametrize(
    "case",
    [
        *(f"{family}, packed" for family in (*OTHERS, *HYBRIDS, *MASKED)),
        *(f"{family}, padded" for family in (*HYBRIDS, *MASKED, *OWN_ATTENTION)),
    ],
)
def test_what_is_let_in_trains_on_the_loss_of_one_document_at_a_time(
    case: str, loaded: dict[str, Any]
) -> None:
    found = loaded[case]
    assert found["error"] is None
    assert found["loss"] == pytest.approx(found["plain"], rel=1e-6)


@pytest.mark.parametrize("family", OWN_ATTENTION)
def test_attention_that_is_not_ours_is_refused_in_a_sentence(
    family: str, loaded: dict[str, Any]
) -> None:
    error = loaded[f"{family}, packed"]["error"]
    assert "cannot be trained on packed documents" in error and "\n" not in error
    assert error.endswith("set packing: false and remove attn_implementation")


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_state_that_runs_into_the_next_document_is_found(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What keeps documents apart in these layers is taken away."""
    monkeypatch.setattr("finetune.models.documents._read_documents", lambda *_: None)
    build(family).save_pretrained(tmp_path)
    recipe, world = (
        Model(model_name_or_path=str(tmp_path), dtype="float32"),
        join(Sharding(layout="single", use_cpu=True)),
    )
    try:
        model = load_model(recipe, Lora(), 0, world)[0]
        with pytest.raises(UserError, match=r"do not keep documents apart; set packing: false$"):
            check_training_forward(model, recipe, Data(packing=True, max_length=64), world)
    finally:
        leave(world)


def test_a_forward_that_computes_something_else_is_refused(loaded: dict[str, Any]) -> None:
    """ModernBERT's decoder has a layer of its own between its trunk and its output head."""
    assert (
        "does not compute what the model's own forward does"
        in loaded["modernbert-decoder, packed"]["error"]
    )


QUICK = ("bf16", "checkpointing")


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory, slow_too: bool) -> dict[str, Any]:
    """What the ranks found in each of LAYOUTS and HYBRID, or in QUICK: see probe_on_ranks.py."""
    folder = tmp_path_factory.mktemp("layouts")
    make_model(folder / "llama")
    build("nemotron").save_pretrained(folder / "nemotron")
    found: dict[str, Any] = {}
    quick = {name: LAYOUTS[name] for name in QUICK}
    for ranks, layouts in ((2, LAYOUTS), (4, HYBRID)) if slow_too else ((2, quick),):
        scenarios = [{"name": name} | keys for name, keys in layouts.items()]
        (folder / "scenarios.json").write_text(json.dumps(scenarios))
        launch_ranks(
            Path(__file__).with_name("probe_on_ranks.py"), [str(folder)], ranks=ranks, timeout=300
        ).check()
        found |= json.loads((folder / "results.json").read_text())
    return found


@pytest.mark.parametrize("layout", slow_but(QUICK, LAYOUTS | HYBRID))
def test_in_every_layout_a_sound_model_passes_and_a_leak_is_found(
    layout: str, checked: dict[str, Any]
) -> None:
    for found in checked[layout]:
        assert found["error"] is None
        assert "its layers do not keep documents apart" in found["leak"]


@pytest.mark.parametrize("layout", slow_but(QUICK, LAYOUTS | HYBRID))
def test_the_check_changes_neither_losses_nor_random_state_nor_graphs(
    layout: str, checked: dict[str, Any]
) -> None:
    for found in checked[layout]:
        assert found["is_random_state_kept"]
        assert found["gradients"] == 0 and found["graphs"] == 0
        assert found["with check"] == found["without"]
        assert found["graphs of training"] == found["graphs without check"]
    if layout == "compiled":
        assert checked["compiled"][0]["graphs of training"] > 0


@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("packing", [True, False])
def test_a_trained_model_is_let_in_in_every_precision(
    mixed_precision: Any, dtype: Any, packing: bool, shared: Path
) -> None:
    recipe = Model(model_name_or_path=str(shared / "models" / "stories260k"), dtype=dtype)
    world = join(Sharding(layout="single", mixed_precision=mixed_precision, use_cpu=True))
    try:
        check_training_forward(
            load_model(recipe, Lora(), 0, world)[0], recipe, Data(packing=packing), world
        )
    finally:
        leave(world)


def test_rounding_of_the_size_of_bf16s_is_a_fault_in_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bounds are those of the precision: what bf16 explains is not let pass where nothing is rounded to bf16."""
    build("llama").save_pretrained(tmp_path)
    recipe = Model(model_name_or_path=str(tmp_path))
    world = join(Sharding(layout="single", use_cpu=True))
    try:
        model: Any = load_model(recipe, Lora(), 0, world)[0]
        check_training_forward(model, recipe, Data(), world)
        model.model.layers[0].mlp.register_forward_hook(leak(0.05))
        with pytest.raises(UserError, match="do not keep documents apart"):
            check_training_forward(model, recipe, Data(), world)
    finally:
        leave(world)


@pytest.mark.parametrize("seed", [1, 5, 9])
def test_a_token_that_rounding_sends_to_other_experts_does_not_refuse_the_model(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quarter of such models are refused by one text alone; a forward that is another is refused by every text."""
    make_model(tmp_path, model_type="deepseek_v3", seed=seed, initializer_range=0.15, **MIXTURE)
    recipe = Model(model_name_or_path=str(tmp_path))
    world = join(Sharding(layout="single", mixed_precision="bf16", use_cpu=True))
    try:
        model: Any = load_model(recipe, Lora(), 0, world)[0]
        check_training_forward(model, recipe, Data(), world)
        with monkeypatch.context() as patched:
            patched.setattr(probe, "FIRST_IDS", probe.FIRST_IDS[:1])
            with pytest.raises(UserError, match="does not compute what the model's own forward"):
                check_training_forward(model, recipe, Data(), world)
        model.model.layers[0].mlp.register_forward_hook(leak(1))
        with pytest.raises(UserError, match="do not keep documents apart"):
            check_training_forward(model, recipe, Data(), world)
    finally:
        leave(world)


def leak(share: float) -> Callable[..., Any]:
    """A hook that adds to each token a share of the mean of those before it in the row."""

    def add_earlier(_module: Any, _args: Any, output: Any) -> Any:
        earlier = output.cumsum(1) - output
        return output + share * earlier / torch.arange(1, output.shape[1] + 1)[None, :, None]

    return add_earlier
