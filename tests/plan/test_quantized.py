"""The plan of a base in 4 or 8 bits: its bytes against what bitsandbytes allocates, and quantization among the suggestions."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from finetune.config.compatibility import refuse_problems
from finetune.config.quantization import quantized_bytes
from finetune.config.schema import Quantization
from finetune.errors import UserError
from finetune.plan.advice import Room, advise, list_changes
from finetune.plan.forward_memory import dequantized_bytes
from finetune.plan.peaks import plan_phases
from finetune.plan.plan import make_plan
from finetune.plan.run_spec import RunSpec
from tests.plan.run_specs import FULL_SHARD, LLAMA_31_8B, QWEN3_235B, make_spec, recipe

GIB = 2**30
KINDS: dict[str, Quantization] = {
    "nf4": Quantization(load_in_4bit=True),
    "double": Quantization(load_in_4bit=True, bnb_4bit_use_double_quant=True),
    "int8": Quantization(load_in_8bit=True),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_takes_the_bytes_that_bitsandbytes_allocates(
    kind: str, tiny_llama: Callable[..., Path]
) -> None:
    """The plain library's own model, with sizes that no block of 64 numbers divides."""
    bnb = pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    quantization = KINDS[kind]
    config: Any = BitsAndBytesConfig(
        load_in_4bit=quantization.load_in_4bit,
        load_in_8bit=quantization.load_in_8bit,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=quantization.bnb_4bit_use_double_quant,
    )
    folder = tiny_llama(
        hidden_size=72,
        intermediate_size=101,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=12,
    )
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, device_map="cpu"
    )
    linears = [m for m in model.modules() if isinstance(m, bnb.nn.Linear4bit | bnb.nn.Linear8bitLt)]
    assert len(linears) == 7 * model.config.num_hidden_layers
    for linear in linears:
        planned = quantized_bytes(linear.out_features, linear.in_features, quantization)
        if kind == "int8":
            state = linear.weight if linear.weight.SCB is not None else linear.state
            assert (planned.codes, planned.scales) == (linear.weight.data.nbytes, state.SCB.nbytes)
            continue
        state = linear.weight.quant_state
        scales = state.absmax.nbytes
        if kind == "double":  # filled up so that the scales' own scales are aligned
            scales += -scales % 4 + state.state2.absmax.nbytes + state.offset.nbytes
        assert (planned.codes, planned.scales) == (linear.weight.data.nbytes, scales)


def _quantized(spec: RunSpec, quantization: Quantization) -> RunSpec:
    return replace(spec, recipe=replace(spec.recipe, quantization=quantization))


def test_the_base_of_8_billion_parameters_by_hand() -> None:
    """6.98 billion of them in linear layers: half a byte and a scale each; embedding, head and norms in bf16."""
    lora = make_spec(LLAMA_31_8B, ranks=1, lora=True, max_length=2048)
    linear, other = (
        32 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 4096 * 14336),
        2 * 128256 * 4096 + 65 * 4096,
    )
    for kind, per_block in (("nf4", 4.0), ("double", 1 + 4 / 256)):
        frozen = _quantized(lora, KINDS[kind]).state().frozen
        expected = (
            linear / 2
            + linear / 64 * per_block
            + 2 * other
            + (4 * 7 * 32 if kind == "double" else 0)
        )
        assert frozen == expected, kind
    assert (
        _quantized(lora, KINDS["int8"]).state().frozen
        == linear + 4 * 32 * (3 * 4096 + 2 * 1024 + 2 * 14336) + 2 * other
    )


def test_a_layer_in_flight_is_dequantized_whole_where_it_is_recomputed() -> None:
    """Nothing else of a step is a temporary, so that the peak moves by what is dequantized where that layer is the peak."""
    layer, largest = 2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 4096 * 14336, 4096 * 14336
    recomputed = _quantized(
        make_spec(LLAMA_31_8B, ranks=1, lora=True, max_length=512), KINDS["nf4"]
    )
    kept = replace(
        recomputed, sharding=replace(recomputed.sharding, activation_checkpointing=False)
    )
    assert dequantized_bytes(recomputed, recomputes_layer=True) == 2 * layer
    assert dequantized_bytes(kept) == 2 * largest
    (evaluation,) = (phase.peak for phase in plan_phases(recomputed) if phase.name == "evaluation")
    assert evaluation.temporaries == 2 * largest


def test_a_base_that_is_stored_quantized_is_planned_as_it_is(tmp_path: Path) -> None:
    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    planned = {}
    for name, config in {
        "stored": LLAMA_31_8B | {"quantization_config": settings},
        "plain": LLAMA_31_8B,
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        given = recipe(lora=True)
        given = replace(given, model=replace(given.model, model_name_or_path=str(tmp_path / name)))
        given = given if name == "stored" else replace(given, quantization=KINDS["nf4"])
        planned[name] = make_plan(given, FULL_SHARD, 2)
    assert planned["stored"].peak_bytes == planned["plain"].peak_bytes
    with pytest.raises(UserError, match="FSDP1 flattens"):
        make_plan(given, replace(FULL_SHARD, layout="fsdp1"), 2)


def test_fewer_bits_are_suggested_before_a_shorter_row_and_to_full_fine_tuning_last() -> None:
    lora = make_spec(LLAMA_31_8B, ranks=1, lora=True, max_length=2048)
    texts = [change.text for change in list_changes(lora)]
    assert (
        texts.index("load_in_8bit=true")
        < texts.index("load_in_4bit=true")
        < texts.index("max_length=1024")
    )
    for limit, expected in ((16 * GIB, "load_in_8bit=true"), (10 * GIB, "load_in_4bit=true")):
        advice = advise(lora, Room(limit))
        assert advice.changes is not None and [change.text for change in advice.changes] == [
            expected
        ]
        assert advice.after is not None and advice.after.device <= limit
    full = [change.text for change in list_changes(make_spec(LLAMA_31_8B, ranks=1))]
    assert full[-3:] == [
        "use_peft=true",
        "use_peft=true load_in_8bit=true",
        "use_peft=true load_in_4bit=true",
    ]


def test_what_is_in_four_bits_already_or_under_fsdp1_gets_no_such_suggestion() -> None:
    lora = make_spec(LLAMA_31_8B, ranks=1, lora=True)
    fsdp1 = replace(lora, sharding=replace(lora.sharding, layout="fsdp1"))
    for spec in (_quantized(lora, KINDS["double"]), fsdp1):
        assert not any("load_in" in change.text for change in list_changes(spec))
    eight = [change.text for change in list_changes(_quantized(lora, KINDS["int8"]))]
    assert "load_in_4bit=true" in eight and "load_in_8bit=true" not in eight


def test_the_experts_of_a_mixture_by_hand() -> None:
    """Half a byte and a 64th of four for each number of attention and of experts; routers, norms and embeddings in bf16."""
    spec = _quantized(make_spec(QWEN3_235B, ranks=8, lora=True), KINDS["nf4"])
    refuse_problems(spec.find_problems())
    a, layers = spec.architecture, 94
    attention, experts = 2 * 8192 * 4096 + 2 * 512 * 4096, 128 * 3 * 4096 * 1536
    other = a.parameters - layers * (attention + experts)
    state = sum(t.numel * t.itemsize for t in spec.tensors if not t.trainable)
    assert state == layers * (attention + experts) * (1 / 2 + 4 / 64) + 2 * other
    assert dequantized_bytes(spec) == 2 * experts
    assert dequantized_bytes(spec, recomputes_layer=True) == 2 * (experts + attention)


def test_experts_that_are_stored_quantized_are_planned_as_plain_numbers(tmp_path: Path) -> None:
    """A run reads them so: half a byte and a scale for attention alone, two bytes for an expert's number."""
    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    config = QWEN3_235B | {"num_hidden_layers": 2, "quantization_config": settings}
    (tmp_path / "config.json").write_text(json.dumps(config))
    given = recipe(lora=True)
    given = replace(given, model=replace(given.model, model_name_or_path=str(tmp_path)))
    spec = make_plan(given, FULL_SHARD, 2).spec
    attention, experts = 2 * 8192 * 4096 + 2 * 512 * 4096, 128 * 3 * 4096 * 1536
    other = spec.architecture.parameters - 2 * (attention + experts)
    state = sum(t.numel * t.itemsize for t in spec.tensors if not t.trainable)
    assert state == 2 * attention * (1 / 2 + 4 / 64) + 2 * 2 * experts + 2 * other


def test_a_mixture_whose_experts_are_not_quantized_is_refused_as_the_run_refuses_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = _quantized(make_spec(QWEN3_235B, ranks=8, lora=True), KINDS["nf4"])
    monkeypatch.setattr("finetune.config.model_rules.has_fused_experts", lambda model_type: False)
    with pytest.raises(
        UserError, match=r"load_in_4bit: model_config is a mixture of experts \(qwen3_moe\)"
    ):
        refuse_problems(spec.find_problems())
