"""The planned activations and loss against what torch really keeps and allocates, over families and recipes."""

from dataclasses import replace
from functools import partial
from itertools import accumulate, product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from finetune.config.families import FAMILIES, PLANNED
from finetune.config.layout import Fp8, MixedPrecision, Sharding
from finetune.config.methods import Method
from finetune.config.schema import Lora, Optimization, QuantizationAware
from finetune.distributed.model_parts import expert_modules, local_part
from finetune.models import attention_kernels
from finetune.models.attention_kernels import RowDocuments, ScoreOptions, attend_documents
from finetune.models.cross_entropy import install_loss, linear_cross_entropy
from finetune.models.decoder_layers import checkpoint_activations
from finetune.models.documents import install_attention
from finetune.models.experts import (
    GROUPED,
    divide_layer,
    multiply_by_factors,
    register_grouped,
    set_experts_implementation,
)
from finetune.models.fused_lora import fuse_adapters
from finetune.models.gating import install_gating
from finetune.models.lora import add_adapters
from finetune.models.loss_chunks import HeadProduct
from finetune.plan.activations import (
    Computation,
    evaluation_bytes,
    kept_bytes,
    layer_bytes,
    mask_bytes,
)
from finetune.plan.architecture import read_architecture
from finetune.plan.loss_memory import head_adapter_bytes, loss_backward_bytes, loss_bytes
from finetune.plan.peaks import plan_phases
from finetune.plan.temporary_memory import (
    expert_factor_bytes,
    fp8_bytes,
    plan_layout_memory,
    rounded_bytes,
)
from tests.conftest import slow_but
from tests.cuda_without_gpu.flex_on_cpu import patch_flex
from tests.plan.run_specs import make_spec
from tests.plan.small_steps import SMALL, planned_share
from tests.plan.traced import allocated_after, allocated_peak, saved_for_backward

CONFIG = {
    "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
HEAD = {
    name: {"head_dim": 16}
    for name in PLANNED
    if name
    not in ("phi3", "granite", "smollm3", "olmo2", "olmo3", "olmoe", "qwen2_moe", "deepseek_v3")
}
LATENT = {
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
EXPERTS = {
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "shared_expert_intermediate_size": 128,
}
DOCUMENTS = (100, 60, 96)  # tokens of the packed row
TOLERANCE = 0.10
QUICK = ["qwen3_moe", "gemma3_text"]
DIVIDED = [name for name in PLANNED if FAMILIES[name].has_expert_parallelism]
RECIPES: dict[str, dict[str, Any]] = {
    "bf16": {"dtype": torch.bfloat16},
    "fp32": {"dtype": torch.float32},
    "autocast": {"dtype": torch.float32, "autocast": True},
    "lora": {"dtype": torch.bfloat16, "lora": Lora(use_peft=True, lora_r=8)},
    "lora, autocast": {
        "dtype": torch.bfloat16,
        "autocast": True,
        "lora": Lora(use_peft=True, lora_r=8),
    },
    "lora with dropout": {
        "dtype": torch.bfloat16,
        "lora": Lora(use_peft=True, lora_r=8, lora_dropout=0.1),
    },
    "lora on experts": {
        "dtype": torch.bfloat16,
        "lora": Lora(
            use_peft=True,
            lora_r=8,
            lora_target_parameters=("experts.gate_up_proj", "experts.down_proj"),
        ),
    },
    "checkpointing": {"dtype": torch.bfloat16, "every": 1},
    "checkpointing every second": {"dtype": torch.bfloat16, "every": 2},
}


def packed_inputs() -> dict[str, Any]:
    """A packed row of DOCUMENTS."""
    return {
        "input_ids": torch.randint(
            3, 256, (1, sum(DOCUMENTS)), generator=torch.Generator().manual_seed(0)
        ),
        "position_ids": torch.cat([torch.arange(n) for n in DOCUMENTS])[None],
        "cu_seq_lens": torch.tensor(
            [0, *torch.tensor(DOCUMENTS).cumsum(0).tolist()], dtype=torch.int32
        ),
        "max_document_length": max(DOCUMENTS),
    }


@pytest.mark.parametrize("family", slow_but(QUICK, PLANNED))
def test_activations_of_every_family_are_planned_within_a_tenth(family: str) -> None:
    mixture = FAMILIES[family].mixture
    for name, recipe in RECIPES.items():
        if mixture or name != "lora on experts":
            measured, planned = _measured_and_planned(family, **recipe)
            assert abs(planned / measured - 1) < TOLERANCE, (name, planned / measured)


@pytest.mark.parametrize("family", slow_but(QUICK, DIVIDED))
def test_activations_of_divided_experts_are_planned_within_a_tenth(family: str) -> None:
    """As a rank computes them to which as many tokens come as it sends."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for name in ("bf16", "fp32", "lora", "lora on experts", "checkpointing"):
            measured, planned = _measured_and_planned(family, **RECIPES[name], divided=True)
            assert abs(planned / measured - 1) < TOLERANCE, (name, planned / measured)
    finally:
        dist.destroy_process_group()


def test_activations_in_fp32_on_a_gpu_are_planned_within_a_hundredth(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No kernel there takes several documents in fp32: a CPU too runs one after another."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)  # keys are repeated
    measured, planned = _measured_and_planned("llama", torch.float32, cpu=False)
    assert abs(planned / measured - 1) < 0.01, planned / measured


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_activations_of_flex_attention_are_planned_within_a_hundredth(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the graph that torch.compile makes of it. In fp32, which a CPU does not cast for attention."""
    patch_flex(monkeypatch, "aot_eager")
    measured, planned = _measured_and_planned(family, torch.float32, cpu=False)
    assert abs(planned / measured - 1) < 0.01, planned / measured


def _measured_and_planned(
    family: str,
    dtype: torch.dtype,
    autocast: bool = False,
    lora: Lora | None = None,
    every: int | None = None,
    divided: bool = False,
    cpu: bool = True,
) -> tuple[int, int]:
    """Bytes that the trunk keeps for the backward of one packed row."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    config = CONFIG | HEAD.get(family, {}) | (EXPERTS if FAMILIES[family].mixture else {})
    config |= (
        LATENT | {"num_key_value_heads": 4, "n_group": 1, "topk_group": 1}
        if FAMILIES[family].latent_attention
        else {}
    )
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**config), dtype=dtype)
    register_grouped()
    set_experts_implementation(model, GROUPED)  # as choose_experts_implementation does on a GPU
    install_attention(model)
    install_loss(model)
    install_gating(model)
    if lora is not None:
        add_adapters(model, lora, dtype)
        fuse_adapters(model)
        if not autocast:
            model.to(dtype)  # as FSDP's mixed precision computes with the fp32 adapters
    if every is not None:
        checkpoint_activations(model, every)
    model.train()
    if divided:
        for module in expert_modules(model):
            divide_layer(model, module, init_device_mesh("cpu", (1,)))
    multiply_by_factors(model)
    tokens, inputs = sum(DOCUMENTS), packed_inputs()
    weights = [*map(local_part, model.parameters()), *model.buffers()]
    with (
        saved_for_backward(iter(weights)) as kept,
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
    ):
        model.model(**inputs, use_cache=False)
    itemsize = 2 if autocast else dtype.itemsize
    length = (
        sum(n * n for n in DOCUMENTS) // tokens
    )  # what a token sees on average of its own document
    # Under LoRA the base is in the compute dtype, so that nothing is cast but the adapters.
    casts_base = autocast and lora is None
    run = Computation(
        itemsize=itemsize, autocast=casts_base, checkpoint_every=every, lora=lora, cpu=cpu, document_length=length,
    )  # fmt: skip
    a = read_architecture({"model_type": family, **config}, "config.json")
    parts = kept_bytes(a, run)
    # Not autograd's: the output goes to the loss; under checkpointing cos and sin are held by the layers' arguments.
    elsewhere = a.hidden * run.residual_itemsize + (
        2 * a.rotated_size * run.residual_itemsize if every == 1 else 0
    )
    casts = 0
    if casts_base:  # held_by_layout counts them as gathered weights
        weights_of = (
            weight for layer in range(a.layers) for weight in (*a.linears(layer), *a.experts(layer))
        )
        casts = run.itemsize * sum(weight.numel for weight in weights_of)
    casts += expert_factor_bytes(a, run).kept + mask_bytes(a, run, tokens)
    return sum(kept.values()), tokens * (sum(parts.values()) - elsewhere) + casts


@pytest.mark.parametrize("family", slow_but(["gemma2"], ["llama", "phi3", "gemma2"]))
def test_what_checkpointed_layers_keep_is_planned_to_the_byte(family: str) -> None:
    """Beyond their inputs; and the gradients are those of a layer that is computed again whole, bit for bit."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    config = CONFIG | HEAD.get(family, {})
    a = read_architecture({"model_type": family, **config}, "config.json")
    inputs = packed_inputs()

    def measure(keeps: Any, lora: Lora | None) -> tuple[int, int, torch.Tensor]:
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(
            CONFIG_MAPPING[family](**config), dtype=torch.bfloat16
        )
        install_attention(model)
        install_loss(model)
        install_gating(model)
        if lora is not None:
            add_adapters(model, lora, torch.bfloat16)
            fuse_adapters(model)
            model.to(torch.bfloat16)
        checkpoint_activations(model, 1, keeps)
        model.train()
        held = allocated_after(lambda: model.model(**inputs, use_cache=False))
        model.model(**inputs, use_cache=False).last_hidden_state.float().square().sum().backward()
        gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        run = Computation(itemsize=2, checkpoint_every=1, keeps=keeps, lora=lora, cpu=True)
        return held, sum(DOCUMENTS) * sum(kept_bytes(a, run).values()), gradients

    for lora in (None, Lora(use_peft=True, lora_r=8)):
        plain, planned_plain, gradients = measure("nothing", lora)
        for keeps in ("attention", "attention_and_projections"):
            held, planned, same = measure(keeps, lora)
            assert held - plain == planned - planned_plain >= (0 if family == "gemma2" else 1)
            assert torch.equal(same, gradients)


LORAS = {
    "full": Lora(),
    "lora": Lora(use_peft=True),
    "adapted head": Lora(use_peft=True, lora_target_modules=("all-linear", "lm_head")),
}
HIGH_RANK = replace(LORAS["adapted head"], lora_r=256)


def make_adapted_head(weight: torch.Tensor, lora: Lora = LORAS["adapted head"]) -> torch.nn.Module:
    """peft's layer around an output head, its matrices in the type of `weight`, as FSDP2 gathers them."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    config = {**CONFIG, "vocab_size": weight.shape[0], "hidden_size": weight.shape[1]}
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(CONFIG_MAPPING["llama"](**config))
    install_loss(model)
    add_adapters(model, lora, weight.dtype)
    head: Any = model.lm_head.to_empty(device="cpu").to(weight.dtype)
    head.base_layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    return head  # type: ignore[no-any-return]


# (vocabulary, hidden size, tokens): one chunk of logits, and several; the last is Llama 3's vocabulary, in two chunks of the
# fewest tokens.
LOSSES = ((4096, 64, 1024), (32768, 64, 1536), (1000, 128, 4096), (128_256, 64, 320))


@pytest.mark.parametrize(
    ("mixed_precision", "kind", "sizes"),
    slow_but(
        # a CPU without AVX-512 multiplies bf16 slowly
        [
            *product(["no"], ["full"], LOSSES),
            *product(["no"], LORAS, LOSSES[:2]),
            ("bf16", "full", LOSSES[0]),
            # B has more columns than a chunk has tokens
            ("bf16", "high rank", (4096, 64, 64)),
        ],
        product(("bf16", "no"), LORAS, LOSSES),
    ),
)
def test_the_loss_allocates_what_is_planned(
    mixed_precision: MixedPrecision, kind: str, sizes: tuple[int, int, int]
) -> None:
    dtype = {"bf16": torch.bfloat16, "no": torch.float32}[mixed_precision]
    vocabulary, hidden, tokens = sizes
    weight = torch.randn(vocabulary, hidden, dtype=dtype).requires_grad_(kind == "full")
    states = torch.randn(tokens, hidden, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, vocabulary, (tokens,))
    config = {"model_type": "llama", **CONFIG, "vocab_size": vocabulary, "hidden_size": hidden}
    sharding = Sharding(layout="fsdp2", mixed_precision=mixed_precision)
    spec = make_spec(config, ranks=1, sharding=sharding, max_length=tokens)
    lora = LORAS.get(kind, HIGH_RANK)
    spec = replace(spec, recipe=replace(spec.recipe, lora=lora), device="cpu")
    if kind in ("adapted head", "high rank"):
        compute = partial(make_adapted_head(weight, lora), states, labels)
    else:
        compute = partial(linear_cross_entropy, HeadProduct(states, weight), labels)
    assert loss_bytes(spec) == pytest.approx(allocated_peak(compute), rel=0.02)
    measured = allocated_after(compute) + allocated_peak(compute().backward)
    assert 0.99 < loss_backward_bytes(spec) / measured < 1.5


def test_autocast_leaves_one_copy_of_the_trained_positions() -> None:
    """That in the compute dtype. `weight` and `states` are fp32, as they are under DDP."""
    weight = torch.randn(512, 256, requires_grad=True)
    states, labels = torch.randn(2048, 256, requires_grad=True), torch.randint(0, 512, (2048,))
    config = {"model_type": "llama", **CONFIG, "vocab_size": 512, "hidden_size": 256}
    sharding = Sharding(layout="ddp", mixed_precision="bf16")
    spec = replace(make_spec(config, ranks=1, sharding=sharding, max_length=2048), device="cpu")

    def compute() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            linear_cross_entropy(HeadProduct(states, weight), labels)

    assert loss_bytes(spec) == pytest.approx(allocated_peak(compute), rel=0.02)


def test_an_adapted_head_is_planned_for_each_output_that_it_scores() -> None:
    """Early exits are joined with the last layer's states before the adapter reads them."""
    config = {"model_type": "llama", **CONFIG}

    def plan_adapter(method: Method, tokens: int) -> int:
        spec = make_spec(config, ranks=1, sharding=Sharding(layout="ddp"), max_length=tokens)
        recipe = replace(spec.recipe, lora=LORAS["adapted head"], method=method)
        return head_adapter_bytes(replace(spec, recipe=recipe))

    exits = Method(method="early_exit", exit_layers=(0,), exit_curriculum="none")
    outputs_of_one_layer = plan_adapter(Method(), 256) - plan_adapter(Method(), 128)
    outputs_of_two_layers = plan_adapter(exits, 256) - plan_adapter(exits, 128)
    assert outputs_of_two_layers == 2 * outputs_of_one_layer > 0


def test_an_adapter_has_the_largest_rank_of_any_layer() -> None:
    """Also where the first layer is dense, so that the widest one is another."""
    config = {
        "model_type": "deepseek_v3",
        **CONFIG,
        **EXPERTS,
        **LATENT,
        "first_k_dense_replace": 1,
    }
    architecture = read_architecture(config, "config.json")
    assert architecture.widest_layer == 1
    adapters = {
        layer: layer_bytes(
            architecture,
            Computation(
                itemsize=2,
                lora=Lora(
                    use_peft=True,
                    lora_target_modules=("o_proj",),
                    rank_pattern={f"layers.{layer}.self_attn.o_proj": 64},
                ),
            ),
        )["adapters"]
        for layer in range(4)
    }
    assert adapters == dict.fromkeys(range(4), 2 * 64)


class OnGpu(torch.Tensor):
    is_cuda = True


def test_a_gpu_in_fp32_keeps_no_scores_but_keys_and_values_for_each_head(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch's memory-efficient kernel, whose own operator says what it saves; it takes no grouped heads."""

    def run_kernel(q: Any, k: Any, v: Any, attn_mask: Any = None, **keys: Any) -> Any:
        assert q.shape[1] == k.shape[1] == v.shape[1]
        del keys["enable_gqa"]
        attend = torch.ops.aten._scaled_dot_product_efficient_attention
        return attend(q, k, v, attn_mask, True, **keys)[0]

    monkeypatch.setattr(attention_kernels.F, "scaled_dot_product_attention", run_kernel)
    tokens = sum(DOCUMENTS)
    states = [
        torch.empty(1, heads, tokens, 16, device="meta", requires_grad=True).as_subclass(OnGpu)
        for heads in (4, 2, 2)
    ]
    boundaries = torch.tensor([0, *accumulate(DOCUMENTS)], dtype=torch.int32)
    documents = RowDocuments(boundaries, max(DOCUMENTS), DOCUMENTS)
    saved: dict[Any, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        attended = attend_documents(*states, documents, ScoreOptions())
    taken = sum(each.untyped_storage().nbytes() for each in saved.values()) + attended.nbytes
    architecture = read_architecture(CONFIG | {"model_type": "llama"}, "config.json")
    computation = Computation(itemsize=4, document_length=max(DOCUMENTS))
    planned = tokens * layer_bytes(architecture, computation)["attention"]
    assert planned == pytest.approx(taken, rel=0.01)  # the kernel rounds the log-sum-exp up


@pytest.mark.parametrize("recomputes", [False, True])
def test_evaluation_holds_a_cast_copy_of_each_layer(recomputes: bool) -> None:
    """Autocast keeps the copies until the forward ends, with activation checkpointing too."""
    sharding = Sharding(layout="ddp", mixed_precision="bf16", activation_checkpointing=recomputes)
    spec = make_spec({"model_type": "llama", **CONFIG}, ranks=2, sharding=sharding)
    peaks = {phase.name: phase.peak for phase in plan_phases(spec)}
    numbers = sum(linear.numel for layer in range(4) for linear in spec.architecture.linears(layer))
    assert peaks["evaluation"].gathered == 2 * numbers


def test_evaluation_holds_a_cast_copy_of_the_head() -> None:
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    config, tokens = CONFIG | {"vocab_size": 16384, "hidden_size": 256}, 64
    model: Any = AutoModelForCausalLM.from_config(CONFIG_MAPPING["llama"](**config)).eval()
    install_attention(model)
    install_loss(model)
    ids, positions = torch.randint(3, 1000, (1, tokens)), torch.arange(tokens)[None]

    def run() -> None:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            model(input_ids=ids, labels=ids, position_ids=positions)

    run()  # what is allocated once, such as the rotary embedding
    sharding = Sharding(layout="single", mixed_precision="bf16")
    spec = make_spec(
        {"model_type": "llama", **config}, ranks=1, sharding=sharding, max_length=tokens
    )
    phases = plan_phases(replace(spec, device="cpu"))
    peak = next(phase.peak for phase in phases if phase.name == "evaluation")
    planned = peak.activations + peak.loss + peak.temporaries + peak.gathered
    assert planned == pytest.approx(allocated_peak(run), rel=0.05)


def test_an_evaluation_holds_embeddings_beside_the_tensors_of_a_layer() -> None:
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    # a vocabulary so small that the layers have the peak
    config = {"model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "vocab_size": 32}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4}
    model: Any = AutoModelForCausalLM.from_config(CONFIG_MAPPING["llama"](**config)).eval()
    install_attention(model)
    ids, positions = torch.randint(3, 32, (1, 512)), torch.arange(512)[None]
    rotary_bytes = 2 * 32 * 4  # of a token

    @torch.no_grad()
    def run() -> None:
        model.model(input_ids=ids, position_ids=positions, use_cache=False)

    planned = evaluation_bytes(
        read_architecture(config, "config.json"), Computation(itemsize=4, cpu=True)
    )
    assert 512 * (planned + rotary_bytes) == pytest.approx(allocated_peak(run), rel=0.01)


@pytest.mark.parametrize(
    ("vocabulary", "tied"),
    [(512, False), (512, True), (8192, True)],
    ids=["a layer", "a tied head", "a large tied head"],
)
def test_the_gradients_of_a_later_micro_batch_stand_beside_the_earlier_ones(
    vocabulary: int, tied: bool
) -> None:
    """Each of them until it is added, and that of a tied head until the embedding's."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    sizes = {"hidden_size": 256, "intermediate_size": 1024, "vocab_size": vocabulary}
    config, tokens = CONFIG | sizes | {"tie_word_embeddings": tied}, 64
    model: Any = AutoModelForCausalLM.from_config(CONFIG_MAPPING["llama"](**config))
    install_attention(model)
    install_gating(model)
    install_loss(model)
    checkpoint_activations(model, 1, "nothing")
    model.train()
    ids, positions = torch.randint(3, 500, (1, tokens)), torch.arange(tokens)[None]

    def run() -> None:
        model(input_ids=ids, labels=ids, position_ids=positions).backward()

    run()  # the first micro-batch
    sharding = Sharding(layout="single", mixed_precision="no", activation_checkpointing=True)
    keys = {"ranks": 1, "sharding": sharding, "max_length": tokens, "global_batch_size": 2}
    spec = replace(make_spec({"model_type": "llama", **config}, **keys), device="cpu")
    recipe = replace(spec.recipe, optimization=Optimization(optim="sgd"))
    state = spec.state()
    phases = plan_phases(replace(spec, recipe=recipe))
    peak = next(phase.peak for phase in phases if phase.name == "steady step")
    planned = peak.allocated - peak.optimizer - state.trained - state.gradients
    assert 1 <= planned / allocated_peak(run) < 1.1


@pytest.mark.parametrize("every", [1, 2, 3])
def test_layers_that_are_not_recomputed_hold_their_cast_copies_for_the_backward(every: int) -> None:
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    def held(every: int) -> int:
        model: Any = AutoModelForCausalLM.from_config(CONFIG_MAPPING["llama"](**CONFIG))
        checkpoint_activations(model, every, "nothing")
        model.train()

        def forward() -> Any:
            with torch.autocast("cpu", torch.bfloat16):
                return model.model(torch.zeros(1, 1, dtype=torch.long), use_cache=False)

        return allocated_after(forward)

    sharding = Sharding(layout="ddp", mixed_precision="bf16", activation_checkpointing=True)
    spec = make_spec({"model_type": "llama", **CONFIG}, ranks=2, sharding=sharding)
    model = replace(spec.recipe.model, activation_checkpointing_every=every)
    layout = plan_layout_memory(replace(spec, recipe=replace(spec.recipe, model=model)))
    planned = layout.bytes_until_backward(layout.layers)
    # the activations of one token, and the states of random numbers, are small beside the weights
    assert abs(held(every) - held(1) - planned) <= 0.05 * planned
    assert (planned > 0) == (every > 1)


def test_what_a_dense_layer_holds_is_planned_beside_layers_of_experts() -> None:
    """Its MLP is wider than the shared expert: in FP8, and while it is rounded."""
    config = {"model_type": "deepseek_v3", **CONFIG, **EXPERTS, **LATENT, "intermediate_size": 4096}
    sharding = Sharding(layout="fsdp2", mixed_precision="bf16", fp8=Fp8())
    aware = QuantizationAware(quantization_aware_training="int4")
    planned = {}
    for dense_layers in (1, 4):
        spec = make_spec(
            config | {"first_k_dense_replace": dense_layers}, ranks=1, sharding=sharding
        )
        rounded = replace(spec, recipe=replace(spec.recipe, quantization_aware=aware))
        planned[dense_layers] = fp8_bytes(spec, 64), rounded_bytes(rounded, 64)
    assert planned[1] == planned[4]


@pytest.mark.parametrize("lora", [None, Lora(use_peft=True)], ids=["whole", "adapters"])
def test_experts_that_are_computed_one_after_another_are_planned(lora: Lora | None) -> None:
    """As on a CPU: each gradient of one expert is a tensor of all experts."""
    config = SMALL | {"model_type": "mixtral", "num_local_experts": 4, "num_hidden_layers": 1}
    assert 1 <= planned_share(config, lora=lora, tokens=128) < 1.4


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_the_copies_that_attention_reads_are_planned(family: str) -> None:
    """In an evaluation in bf16 on a CPU, whose kernels compute in fp32."""
    config = SMALL | {"model_type": family, "num_attention_heads": 16, "pad_token_id": 0}
    assert 1 <= planned_share(config, dtype="bfloat16", evaluates=True) < 1.2


@pytest.mark.parametrize("keys", [{"lora_dropout": 0.1}, {"use_dora": True}], ids=str)
def test_an_evaluation_holds_the_outputs_of_layer_and_adapter(keys: dict[str, Any]) -> None:
    """If they are not fused: beside the gate, those of up, and their sum."""
    lora = Lora(use_peft=True, lora_r=8, **keys)
    assert 1 <= planned_share(SMALL, lora=lora, tokens=1024, evaluates=True) < 1.2


@pytest.mark.parametrize(
    ("family", "mlp_width"),
    [("llama", 1408), ("gemma2", 1408), ("gemma2", 352), ("gpt_oss", 352)],
    ids=lambda value: str(value),
)
def test_the_scores_and_masks_of_an_evaluation_are_planned(family: str, mlp_width: int) -> None:
    """transformers' eager attention makes them, and a layer holds its scores during a wide MLP."""
    sizes = {"num_attention_heads": 2 if mlp_width == 1408 else 4, "intermediate_size": mlp_width}
    config = SMALL | sizes | {"model_type": family, "sliding_window": 64, "num_local_experts": 4}
    assert 1 <= planned_share(config, attention="eager", evaluates=True) < 1.2


@pytest.mark.parametrize("token_loss", ["dft", "eaft"])
def test_a_cpu_copies_the_gradients_that_it_weighs(token_loss: str) -> None:
    """In bf16: to fp32, and the product back."""
    config = SMALL | {"vocab_size": 16384, "num_hidden_layers": 1}
    lora = Lora(use_peft=True)
    share = planned_share(config, lora=lora, autocast=True, token_loss=token_loss)
    assert 1 <= share < 1.1


@pytest.mark.parametrize("family", ["llama", "apertus"])
def test_the_backward_of_the_final_norm_is_planned(family: str) -> None:
    """It computes in fp32 while nothing of the layers is freed, whose MLPs are narrow here."""
    sizes = {"hidden_size": 512, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    config = SMALL | sizes | {"model_type": family, "num_key_value_heads": 4}
    assert 1 <= planned_share(config, dtype="bfloat16", tokens=4096, documents=16) < 1.2
