"""Whether a run fits the device, and if not, the cheapest changes that make it fit."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from math import lcm
from typing import Any

from finetune.errors import UserError
from finetune.plan.memory import find_peak
from finetune.plan.run_spec import RunSpec
from finetune.recipe.memory_keys import check_memory_keys, find_in_backward_problems
from finetune.recipe.optim_offload import check_offload_layout, find_offload_problems

FP32_MOMENTS = ("adamw_torch_fused", "adamw_torch")
MIN_ROW_TOKENS = 512  # rows are not halved below this
ROW_DIVIDING_RANKS = 8  # in accelerate_configs/fsdp_sequence_parallel.yaml
RANKS_TO_TRY = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)  # where no change is enough


@dataclass(frozen=True, slots=True)
class Change:
    """One change: `text` is appended to the command, or set in the Accelerate file where it reads `fsdp_...: ...`."""

    text: str
    cost: str
    apply: Callable[[RunSpec], RunSpec]


@dataclass(frozen=True, slots=True)
class Advice:
    """`changes` make the run fit, with `peak` bytes; None: none do, but `ranks` ranks would (None: no number would)."""

    fits: bool
    changes: tuple[Change, ...] | None
    peak: int
    ranks: int | None = None


def advise(spec: RunSpec, device_bytes: int) -> Advice:
    """The cheapest changes that make `spec` fit: the first that fits alone, or together with those before it.

    In the second case the changes that turn out to be unnecessary are dropped, the most expensive first.
    """
    needed = find_peak(spec).total
    if needed <= device_bytes:
        return Advice(True, (), needed)
    taken: list[Change] = []
    for change in list_changes(spec):
        if (alone := _peak_after(spec, [change])) <= device_bytes:
            return Advice(False, (change,), alone)
        taken.append(change)
        if _peak_after(spec, taken) <= device_bytes:
            break
    else:
        changed = _apply(spec, taken)
        together = lcm(spec.sharding.ranks_per_batch, spec.sharding.expert_parallel_size)
        wider = (ranks for ranks in RANKS_TO_TRY if ranks > spec.ranks and ranks % together == 0)
        more_ranks = (replace(changed, ranks=ranks) for ranks in wider)
        enough = next((each.ranks for each in more_ranks if find_peak(each).total <= device_bytes), None)
        return Advice(False, None, find_peak(changed).total, enough)
    for change in reversed(list(taken)):
        fewer = [other for other in taken if other is not change]
        if _peak_after(spec, fewer) <= device_bytes:
            taken = fewer
    return Advice(False, tuple(taken), _peak_after(spec, taken))


def list_changes(spec: RunSpec) -> Iterator[Change]:
    """What can still be changed, the cheapest first: what costs almost no time, then time, then what is trained."""
    sharding, recipe = spec.sharding, spec.recipe
    is_divided = sharding.tensor_parallel_size > 1  # which 8-bit moments and quantized bases do not work with
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
    if not sharding.activation_checkpointing:
        yield Change(
            "fsdp_activation_checkpointing: true" if sharding.is_fsdp else "accelerate_config=fsdp_full_shard",
            "about 30% more time",
            lambda spec: replace(spec, sharding=replace(spec.sharding, activation_checkpointing=True)),
        )
    if spec.state_ranks < spec.ranks or sharding.strategy == "SHARD_GRAD_OP":
        yield Change("accelerate_config=fsdp_full_shard", "more communication", _shard_fully)
    if _can_offload_activations(spec):
        yield Change(
            "activation_offload=true",
            "what checkpointed layers keep is copied to the host and back, beside the computation",
            _set_keys("model", activation_offload=True),
        )
    if (
        recipe.optimization.optim in (*FP32_MOMENTS, "adamw_bf16_moments")
        and sharding.layout != "fsdp1"
        and not is_divided
        and recipe.optimization.optim_offload == "none"
    ):
        in_8_bits = _set_keys("optimization", optim="adamw_8bit")
        yield Change("optim=adamw_8bit", "moments in 8 bits; needs torchao", in_8_bits)
    if _can_update_in_backward(spec):
        yield Change(
            "optim_in_backward=true max_grad_norm=null",
            "no clipping of the gradient, which is freed in the backward",
            lambda spec: _update_in_backward(spec) if _can_update_in_backward(spec) else spec,
        )
    if recipe.lora.use_peft and not is_divided:
        yield from _list_quantizations(spec)
    yield from _list_divisions(spec)
    if recipe.data.max_length >= 2 * MIN_ROW_TOKENS:
        half = recipe.data.max_length // 2
        yield Change(f"max_length={half}", "longer examples are cut", _set_keys("data", max_length=half))
    if _can_offload_moments(spec):
        yield Change(
            "optim_offload=nvme offload_dir=A_FOLDER_ON_NVME",
            "moments and master weights are read from and written to a disk in every step",
            _set_keys("optimization", optim_offload="nvme", offload_dir="A_FOLDER_ON_NVME"),
        )
    if not sharding.cpu_offload:
        yield Change(
            "fsdp_offload_params: true" if sharding.ranks_per_batch > 1 else "accelerate_config=fsdp_cpu_offload",
            "several times the time",
            lambda spec: _shard_fully(spec, cpu_offload=True),
        )
    if not recipe.lora.use_peft:
        yield Change("use_peft=true", "adapters instead of all parameters", _set_keys("lora", use_peft=True))
        if not is_divided:
            yield from _list_quantizations(spec)


def _can_offload_moments(spec: RunSpec) -> bool:
    keys = replace(spec.recipe.optimization, optim_offload="nvme", offload_dir="")
    is_offloaded = spec.recipe.optimization.optim_offload != "none" or spec.sharding.cpu_offload
    if is_offloaded or any(find_offload_problems(asdict(keys) | {"async_save": spec.recipe.checkpoint.async_save})):
        return False
    try:
        check_offload_layout(keys, spec.sharding)
    except UserError:
        return False
    return True


def _can_offload_activations(spec: RunSpec) -> bool:
    model, sharding = spec.recipe.model, spec.sharding
    is_divided = sharding.ranks_per_batch > 1 or sharding.expert_parallel_size > 1
    works = sharding.activation_checkpointing and not is_divided and spec.device == "cuda"
    return works and not (model.activation_offload or model.torch_compile)


def _can_update_in_backward(spec: RunSpec) -> bool:
    changed = _update_in_backward(spec)
    keys = changed.recipe.optimization
    if spec.recipe.optimization.optim_in_backward or any(find_in_backward_problems(asdict(keys))):
        return False
    try:
        check_memory_keys(changed.recipe, spec.sharding, spec.ranks)
    except UserError:
        return False
    return True


def _update_in_backward(spec: RunSpec) -> RunSpec:
    return _set_keys("optimization", optim_in_backward=True, max_grad_norm=None)(spec)


def _list_divisions(spec: RunSpec) -> Iterator[Change]:
    """The shipped file whose ranks divide rows, where these are as many and nothing is divided yet; the step's rows stay."""
    recipe, ranks = spec.recipe, ROW_DIVIDING_RANKS
    divides = spec.architecture.heads % ranks == 0 and recipe.model.attn_implementation == "auto"
    if spec.ranks == ranks and spec.sharding.ranks_per_batch == 1 and divides:
        rows = spec.global_batch_size
        keep = "" if recipe.batch.global_batch_size else f" global_batch_size={rows}"
        keep_rows = _set_keys("batch", global_batch_size=rows, gradient_accumulation_steps=None)
        yield Change(
            f"accelerate_config=fsdp_sequence_parallel{keep}",
            f"{ranks} ranks divide the tokens of a row; more communication",
            lambda spec: _shard_fully(
                keep_rows(spec), sequence_parallel_size=ranks, replicate_size=None, shard_size=None
            ),
        )


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


def _set_keys(section: str, **keys: Any) -> Callable[[RunSpec], RunSpec]:
    """A change of these keys in one section of the recipe."""

    def apply(spec: RunSpec) -> RunSpec:
        changed: dict[str, Any] = {section: replace(getattr(spec.recipe, section), **keys)}
        return replace(spec, recipe=replace(spec.recipe, **changed))

    return apply


def _shard_fully(spec: RunSpec, **keys: Any) -> RunSpec:
    """The layout of the shipped fsdp_full_shard.yaml, with these `keys`."""
    sharding = replace(
        spec.sharding,
        layout="fsdp2",
        strategy="FULL_SHARD",
        wrapping="TRANSFORMER_BASED_WRAP",
        activation_checkpointing=True,
        **keys,
    )
    return replace(spec, sharding=sharding)


def _apply(spec: RunSpec, changes: Sequence[Change]) -> RunSpec:
    for change in changes:
        spec = change.apply(spec)
    return spec


def _peak_after(spec: RunSpec, changes: Sequence[Change]) -> int:
    return find_peak(_apply(spec, changes)).total
