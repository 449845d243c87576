"""What can be changed of a run that does not fit: each change with its cost, the cheapest first."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from math import gcd
from typing import Any

from finetune.plan.run_spec import RunSpec
from finetune.plan.support import is_supported

FP32_MOMENTS = ("adamw_torch_fused", "adamw_torch")
MIN_ROW_TOKENS = 512  # rows are not halved below this
GROUP_SIZES = (8, 4, 2)  # ranks of a node that divide what one rank had, the most first
DIVISIONS = {  # a key of an Accelerate file -> what it is here, and what it divides
    "cp_size": ("sequence_parallel_size", "the tokens of a row"),
    "tp_size": ("tensor_parallel_size", "the matrices of each layer"),
}
ROW_DIVIDING_RANKS = 8  # in accelerate_configs/fsdp_sequence_parallel.yaml


@dataclass(frozen=True, slots=True)
class Change:
    """One change: `text` is appended to the command, or set in the Accelerate file where it reads `fsdp_...: ...` or
    `parallelism_config: ...`."""

    text: str
    cost: str
    apply: Callable[[RunSpec], RunSpec]

    @property
    def is_in_recipe(self) -> bool:
        """Whether the change is of keys of the recipe alone."""
        return ": " not in self.text


def list_changes(spec: RunSpec) -> Iterator[Change]:
    """What can still be changed and is supported, the cheapest first: what costs almost no time, then time, then what is trained."""
    return (change for change in _list_candidates(spec) if is_supported(change.apply(spec), spec))


def apply_changes(spec: RunSpec, changes: Iterable[Change]) -> tuple[RunSpec, list[Change]]:
    """`spec` with one change after another, and the changes that are left out: they do not go with those before them."""
    left_out = []
    for change in changes:
        changed = change.apply(spec)
        if is_supported(changed, spec):
            spec = changed
        else:
            left_out.append(change)
    return spec, left_out


def _list_candidates(spec: RunSpec) -> Iterator[Change]:
    recipe = spec.recipe
    if spec.rows > 1:
        rows = spec.global_batch_size
        keep = "" if recipe.batch.global_batch_size else f" global_batch_size={rows}"
        batch = {"per_device_train_batch_size": 1, "global_batch_size": rows, "gradient_accumulation_steps": None}
        yield Change(
            f"per_device_train_batch_size=1{keep}", "more micro-batches, the same step", _set_keys("batch", **batch)
        )
    if recipe.optimization.optim in FP32_MOMENTS:
        in_bf16 = _set_keys("optimization", optim="adamw_bf16_moments")
        yield Change("optim=adamw_bf16_moments", "moments rounded to bf16, no more time", in_bf16)
    yield from _list_layouts(spec)
    if spec.device == "cuda" and not recipe.model.activation_offload:
        yield Change(
            "activation_offload=true",
            "what checkpointed layers keep is copied to the host and back, beside the computation",
            _set_keys("model", activation_offload=True),
        )
    if recipe.optimization.optim in (*FP32_MOMENTS, "adamw_bf16_moments") and spec.sharding.layout != "fsdp1":
        in_8_bits = _set_keys("optimization", optim="adamw_8bit")
        yield Change("optim=adamw_8bit", "moments in 8 bits; needs torchao", in_8_bits)
    if not recipe.optimization.optim_in_backward:
        yield Change(
            "optim_in_backward=true max_grad_norm=null",
            "no clipping of the gradient, which is freed in the backward",
            _set_keys("optimization", optim_in_backward=True, max_grad_norm=None),
        )
    if recipe.lora.use_peft:
        yield from _list_quantizations(spec)
    yield from _list_divisions(spec)
    if recipe.data.max_length >= 2 * MIN_ROW_TOKENS:
        half = recipe.data.max_length // 2
        yield Change(f"max_length={half}", "longer examples are cut", _set_keys("data", max_length=half))
    if recipe.optimization.optim_offload == "none" and not spec.sharding.cpu_offload:
        yield Change(
            "optim_offload=nvme offload_dir=A_FOLDER_ON_NVME",
            "moments and master weights are read from and written to a disk in every step",
            _set_keys("optimization", optim_offload="nvme", offload_dir="A_FOLDER_ON_NVME"),
        )
    if not spec.sharding.cpu_offload:
        is_own = spec.sharding.ranks_per_batch > 1  # by a file that no shipped one replaces
        yield Change(
            "fsdp_offload_params: true" if is_own else "accelerate_config=fsdp_cpu_offload",
            "several times the time",
            _offload if is_own else partial(_shard_fully, cpu_offload=True),
        )
    if not recipe.lora.use_peft:
        yield Change("use_peft=true", "adapters instead of all parameters", _set_keys("lora", use_peft=True))
        yield from _list_quantizations(spec)


def _list_layouts(spec: RunSpec) -> Iterator[Change]:
    """What makes a layout gather, or keep, less."""
    sharding, a = spec.sharding, spec.architecture
    if not sharding.activation_checkpointing:
        yield Change(
            "fsdp_activation_checkpointing: true" if sharding.is_fsdp else "accelerate_config=fsdp_full_shard",
            "about 30% more time",
            lambda spec: replace(spec, sharding=replace(spec.sharding, activation_checkpointing=True)),
        )
    if sharding.ranks_per_batch == 1 and (spec.shards < spec.ranks or sharding.strategy == "SHARD_GRAD_OP"):
        yield Change("accelerate_config=fsdp_full_shard", "more communication", _shard_fully)
    if a.mixture is not None:
        size = gcd(a.mixture.experts, spec.shards, spec.ranks_per_node)
        if size > sharding.expert_parallel_size:
            yield Change(
                f"expert_parallel_size={size}",
                f"{size} ranks exchange tokens, instead of gathering all experts of a layer",
                lambda spec: _divide_experts(spec, size),
            )


def _divide_experts(spec: RunSpec, size: int) -> RunSpec:
    changed = _set_keys("model", expert_parallel_size=size)(spec)
    return replace(changed, sharding=replace(changed.sharding, expert_parallel_size=size))


def _list_divisions(spec: RunSpec) -> Iterator[Change]:
    """Ranks of a node that divide a row's tokens between them, or a layer's matrices, where nothing is divided yet: as many as
    can. An Accelerate file has sizes of a mesh for FSDP2 only."""
    sharding = spec.sharding
    if sharding.ranks_per_batch > 1 or sharding.strategy == "HYBRID_SHARD":
        return
    sizes = [size for size in GROUP_SIZES if gcd(spec.ranks, spec.ranks_per_node) % size == 0]
    for key in ("cp_size", "tp_size"):
        usable = [size for size in sizes if sharding.layout == "fsdp2" or _is_shipped(key, size, spec)]
        changes = (_divide(spec, key, size) for size in usable)
        yield from islice((change for change in changes if is_supported(change.apply(spec), spec)), 1)


def _is_shipped(key: str, size: int, spec: RunSpec) -> bool:
    """Whether accelerate_configs/fsdp_sequence_parallel.yaml divides so."""
    return key == "cp_size" and size == spec.ranks == ROW_DIVIDING_RANKS


def _divide(spec: RunSpec, key: str, size: int) -> Change:
    """Groups of `size` ranks by this key of an Accelerate file; the rows of a step stay."""
    rows, groups = spec.global_batch_size, spec.ranks // size
    keep = "" if spec.recipe.batch.global_batch_size else f"global_batch_size={rows}"
    keep_rows = _set_keys("batch", global_batch_size=rows, gradient_accumulation_steps=None)
    field, what = DIVISIONS[key]
    sizes: dict[str, Any] = {field: size, "shard_size": groups}
    cost = f"{size} ranks divide {what}; more communication"
    if _is_shipped(key, size, spec):
        text = f"accelerate_config=fsdp_sequence_parallel {keep}".rstrip()
        return Change(text, cost, lambda spec: _shard_fully(keep_rows(spec), **sizes))
    text = f"parallelism_config: {{parallelism_config_{key}: {size}, parallelism_config_dp_shard_size: {groups}}}"
    cost += f"; {keep} keeps the step" if keep else ""
    return Change(text, cost, lambda spec: replace(keep_rows(spec), sharding=replace(spec.sharding, **sizes)))


def _list_quantizations(spec: RunSpec) -> Iterator[Change]:
    """A base in 8 bits, then in 4: fewer than it has now, and under adapters, which are added where there are none."""
    if spec.sharding.layout == "fsdp1":
        return
    adapters = "" if spec.recipe.lora.use_peft else "use_peft=true "
    for bits in (8, 4):
        if (spec.recipe.quantization.bits or 16) <= bits:
            continue
        keys = {"load_in_8bit": bits == 8, "load_in_4bit": bits == 4}
        quantize, adapt = _set_keys("quantization", **keys), _set_keys("lora", use_peft=True)
        yield Change(
            f"{adapters}load_in_{bits}bit=true",
            f"{'adapters on ' if adapters else ''}a frozen base in {bits} bits: more time, a slightly worse start; needs bitsandbytes",
            lambda spec, quantize=quantize, adapt=adapt: quantize(adapt(spec)),  # type: ignore[misc]
        )


def _offload(spec: RunSpec) -> RunSpec:
    return replace(spec, sharding=replace(spec.sharding, cpu_offload=True))


def _set_keys(section: str, **keys: Any) -> Callable[[RunSpec], RunSpec]:
    """A change of these keys in one section of the recipe."""

    def apply(spec: RunSpec) -> RunSpec:
        changed: dict[str, Any] = {section: replace(getattr(spec.recipe, section), **keys)}
        return replace(spec, recipe=replace(spec.recipe, **changed))

    return apply


def _shard_fully(spec: RunSpec, **keys: Any) -> RunSpec:
    """The layout of the shipped fsdp_full_shard.yaml, with these `keys`."""
    shipped: dict[str, Any] = {
        "layout": "fsdp2",
        "strategy": "FULL_SHARD",
        "wrapping": "TRANSFORMER_BASED_WRAP",
        "activation_checkpointing": True,
        "replicate_size": None,
        "shard_size": None,
        "sequence_parallel_size": 1,
        "tensor_parallel_size": 1,
    }
    return replace(spec, sharding=replace(spec.sharding, **shipped | keys))
