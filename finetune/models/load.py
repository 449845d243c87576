"""Loads a recipe's model onto the ranks: builds it, adapts it, shards it, fills it with weights."""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from finetune.config.layout import compute_dtype, frozen_dtype
from finetune.config.methods import ScoreHead
from finetune.config.module_names import find_trained, is_adapter
from finetune.config.optimization import NOT_DECAYED
from finetune.config.pretrained import (
    Vocabulary,
    find_adapter,
    has_scores_class,
    is_vision_language,
    load_config,
    scores_tokens,
    set_head,
    text_config_of,
    trained_config,
)
from finetune.config.quantization import read_teacher_quantization
from finetune.config.schema import (
    Lora,
    Model,
    Optimization,
    Quantization,
    QuantizationAware,
    Recipe,
)
from finetune.constants import COMPUTE_DTYPE, PROCESSOR_FILES
from finetune.distributed.model_parts import (
    Values,
    find_float32,
    head_of,
    other_parts,
    set_buffer,
    take_language_model,
    text_names,
    unwrap,
)
from finetune.distributed.parallelize import NOTHING, gathered, parallelize
from finetune.distributed.world import World
from finetune.errors import UserError, on_one_line
from finetune.files.json_files import read_json_object
from finetune.files.network import download_folder, find_local_folder
from finetune.files.run_files import find_origin
from finetune.files.tensors import INDEX_FILE, StoredTensor, read_folder
from finetune.flops import forward_flop_per_token_of
from finetune.models.carried import find_carried, make_prediction_filter
from finetune.models.contrast import head_states
from finetune.models.cpu_products import multiply_in_fp32
from finetune.models.cross_entropy import HeadFunction, LossHead, install_loss
from finetune.models.decoder_layers import (
    ActivationOffload,
    CudaCopies,
    checkpoint_activations,
    compile_layers,
    use_liger_kernels,
)
from finetune.models.documents import install_attention
from finetune.models.embedding import (
    install_embedding_noise,
    refuse_frozen_tokens,
    train_new_tokens,
)
from finetune.models.experts import (
    count_active,
    divide_experts,
    install_experts,
    multiply_by_factors,
    quantize_experts,
    set_experts_implementation,
)
from finetune.models.fake_quantize import fake_quantize
from finetune.models.fused_lora import fuse_adapters
from finetune.models.gating import install_gating
from finetune.models.log_probabilities import (
    DivergenceOptions,
    TeacherScores,
    find_top,
    head_divergence,
)
from finetune.models.lora import add_adapters, names_of_parameters, read_adapter, with_adapters
from finetune.models.loss_chunks import TokenWeights
from finetune.models.quantized_layers import fill_quantized_layers, quantize_layers
from finetune.models.quantized_weights import StoredQuantized, dequantized_values, split_quantized
from finetune.models.reach import BlankDocument, find_unread, freeze_unreached
from finetune.models.routing import install_routing
from finetune.models.value_head import add_value_head, train_value_head
from finetune.models.vision import record_outputs
from finetune.models.weights import (
    convert_to_parameters,
    load_buffers,
    seeded_values,
    stored_values,
    untie_as_stored,
)

Scores = tuple[ScoreHead, int | None]
"""(the output head, the id of padding tokens)."""
VOCABULARY: Scores = (ScoreHead(), None)


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """What a run's tokenizer, method and data ask of the model."""

    vocabulary: Vocabulary | None = None  # where the recipe adds tokens
    scores: Scores = VOCABULARY  # what the output head computes
    # Whether the loss uses the head. Else the head is frozen, unless it is tied to the embedding.
    trains_head: bool = True
    blank_document: BlankDocument | None = None  # finds what an image reaches; None without images


PLAIN = BuildOptions()
UNQUANTIZED = Quantization()
UNROUNDED = QuantizationAware()
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Parameters of the whole model, over all ranks.

    Counted before sharding: FSDP1 shows only shards.
    """

    total: int
    trained: int
    active: int  # those that work on one text token: of routed experts the chosen ones
    multiplied: int  # active parameters in matrix products: without an untied input embedding
    frozen_multiplied: int  # `multiplied` without those trained; adapters are small, and counted
    unreached: tuple[str, ...] = ()  # parameters that the recipe trains, but no row reaches
    # tensors of the base's files that the model does not have, and an export keeps
    carried: Mapping[str, StoredTensor] = field(default_factory=dict)

    @property
    def carried_bytes(self) -> int:
        """The bytes of the carried tensors in an export."""
        return sum(tensor.byte_count for tensor in self.carried.values())


@dataclass(frozen=True, slots=True)
class BuiltModel:
    """A model on the meta device, adapted, before it is sharded. Returned by `build_model`."""

    model: nn.Module
    size: ModelSize
    values: Values  # of all parameters, with adapters
    base: Values  # of the base's parameters
    stored: Mapping[str, StoredQuantized]  # weights that the files hold quantized
    frozen_dtype: torch.dtype  # of a base under adapters
    offload: ActivationOffload | None
    misses_gradients: bool  # under DDP: some that are trained may get none in a step


def build_model(
    model: Model,
    lora: Lora,
    seed: int,
    world: World,
    quantization: Quantization = UNQUANTIZED,
    optimization: Optimization | None = None,
    options: BuildOptions = PLAIN,
) -> BuiltModel:
    """Builds the model on the meta device, grown to the vocabulary of `options`, and adapts it.

    Of the weights' files it reads the headers alone.

    Raises:
        UserError: The model cannot be reached, its files do not fit, or a key names nothing of it.
    """
    vocabulary = options.vocabulary
    config = trained_config(load_config(model, vocabulary), model)
    set_head(config, *options.scores)
    forget_quantization(config)  # files are dequantized here, and the export is not quantized
    built = build_on_meta(config, DTYPES[model.dtype], model.trust_remote_code)
    unread = find_unread(built) if world.sharding.layout in ("ddp", "fsdp1") else set()
    base, stored = read_base_values(built, config, model, seed, vocabulary)
    has_values = options.scores[0].has_values
    if has_values:
        base = add_value_head(built, base)
    frozen = DTYPES[frozen_dtype(world.sharding, lora)]
    experts_dtype = frozen if lora.use_peft else DTYPES[model.dtype]
    _install_forward(built, model, world, optimization, experts_dtype)
    values = base
    if lora.use_peft:
        lora = train_new_tokens(built, lora, vocabulary)
        values = _adapt(built, lora, quantization, base, stored, seed, frozen)
    else:
        _freeze(built, model, options)
    if has_values:
        train_value_head(built, torch.float32 if lora.use_peft else DTYPES[model.dtype])
    unreached: tuple[str, ...] = ()
    if options.blank_document is not None:
        unreached = freeze_unreached(built, options.blank_document)
    head_of(built).is_frozen = not head_of(built).weight.requires_grad
    offload = _checkpoint_activations(built, model, world)
    size = replace(count_parameters(built), unreached=unreached, carried=read_carried(model, built))
    if not options.trains_head:
        size = _without_head(size, head_of(built).weight)
    if stored and quantization.bits is None:
        raise UserError(
            f"{min(stored)} is stored quantized, but config.json does not say so; name the "
            "unquantized model"
        )
    if world.sharding.layout == "fsdp1" and optimization is not None and optimization.weight_decay:
        _refuse_decay(built, unread, world.sharding.source)
    misses_gradients = _trains_beside(built, unread)
    return BuiltModel(built, size, values, base, stored, frozen, offload, misses_gradients)


def _refuse_decay(model: nn.Module, unread: Set[str], source: str) -> None:
    """Raises `UserError` where a trained matrix of the language model is one of `unread`, to which
    FSDP1 gives zeros for a gradient, so that it decays; in other layouts it has none, and stays.
    """
    text = text_names(model)
    trained = {name for name, p in model.named_parameters() if p.requires_grad and p.dim() > 1}
    decayed = sorted(
        name for name in trained & unread if name.startswith(text) and not NOT_DECAYED.search(name)
    )
    if decayed:
        raise UserError(
            f"{source}: FSDP1 would decay weights that a short text does not reach, "
            f"{decayed[0]} the first; choose fsdp_full_shard.yaml, or set weight_decay: 0"
        )


def _trains_beside(model: nn.Module, names: Set[str]) -> bool:
    """Whether a module that holds one of these parameters is trained, by itself or by adapters."""
    modules = tuple(f"{name.rpartition('.')[0]}." for name in names)
    return any(p.requires_grad and name.startswith(modules) for name, p in model.named_parameters())


def _freeze(built: nn.Module, model: Model, options: BuildOptions) -> None:
    """Freezes what full training leaves out, and a head that the loss does not use."""
    freeze_modules(built, model)
    refuse_frozen_tokens(built, options.vocabulary)
    is_tied = head_of(built).weight is built.get_input_embeddings().weight  # type: ignore[operator]
    if not options.trains_head and not is_tied:
        head_of(built).requires_grad_(False)


def _checkpoint_activations(
    built: nn.Module, model: Model, world: World
) -> ActivationOffload | None:
    """Checkpoints the activations of layers as Accelerate's file and the recipe say."""
    if not world.sharding.activation_checkpointing:
        return None
    offload = ActivationOffload(CudaCopies()) if model.activation_offload else None
    checkpoint_activations(
        built,
        model.activation_checkpointing_every,
        model.activation_checkpointing_keeps,
        None if model.torch_compile else offload,  # compiled layers get it by `compile_layers`
    )
    return offload


def _without_head(size: ModelSize, head: nn.Parameter) -> ModelSize:
    """The size of a model whose loss does not multiply by the head."""
    frozen = 0 if head.requires_grad else head.numel()
    return replace(
        size,
        multiplied=size.multiplied - head.numel(),
        frozen_multiplied=size.frozen_multiplied - frozen,
    )


def load_model(
    model: Model,
    lora: Lora,
    seed: int,
    world: World,
    quantization: Quantization = UNQUANTIZED,
    optimization: Optimization | None = None,
    options: BuildOptions = PLAIN,
    *,
    quantization_aware: QuantizationAware = UNROUNDED,
    shared: Mapping[str, Tensor] = NOTHING,
) -> tuple[nn.Module, ModelSize]:
    """Builds the model by `build_model`, shards it, and reads each rank's slices of the weights.

    Args:
        shared: What `frozen_parts` returned of an earlier model. Its tensors are used in place of
            slices from the files.

    Raises:
        UserError: The model cannot be reached, or its files do not fit.
    """
    multiply_in_fp32(
        world.device, {DTYPES[model.dtype], DTYPES[COMPUTE_DTYPE[world.sharding.mixed_precision]]}
    )
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = model.tf32
    made = build_model(model, lora, seed, world, quantization, optimization, options)
    built = made.model
    unfilled = frozenset[str]()
    if quantization.bits is not None:
        assert lora.use_peft, "a quantized base is frozen: the recipe reader requires adapters"
        unfilled = _quantize(built, quantization, made.frozen_dtype, made.stored)
    if world.sharding.fp8 is not None:
        from finetune.models.fp8 import multiply_in_fp8  # imports torchao

        multiply_in_fp8(built, world.sharding)
    if quantization_aware.quantization_aware_training is not None:
        fake_quantize(built, quantization_aware)
    divide_experts(built, world)
    if lora.use_peft:
        multiply_by_factors(built)
    if lora.use_peft and world.sharding.layout != "fsdp1" and not world.sharding.divides_matrices:
        fuse_adapters(built)
    sharded = parallelize(
        built, made.values, world, unfilled, shared, misses_gradients=made.misses_gradients
    )
    record_outputs(unwrap(sharded))
    fill_quantized_layers(unwrap(sharded), made.base, made.stored, world, shared)
    if model.torch_compile:
        compile_layers(unwrap(sharded), offload=made.offload)
    return sharded, made.size


def _install_forward(
    built: nn.Module,
    model: Model,
    world: World,
    optimization: Optimization | None,
    experts_dtype: torch.dtype,
) -> None:
    """Installs what is computed in another way than by transformers: attention, loss, noise,
    experts, MLPs, and Liger's kernels.
    """
    install_attention(built, model.attn_implementation, world.sequence_group)
    install_loss(built, *_read_token_loss(optimization))
    if optimization is not None and optimization.neftune_noise_alpha is not None:
        install_embedding_noise(built, optimization.neftune_noise_alpha)
    install_experts(built, world, experts_dtype, model.torch_compile)
    install_routing(built, model.router_aux_loss_coef)
    if model.use_liger_kernel:
        use_liger_kernels(built)
    install_gating(built)


def _adapt(
    built: nn.Module,
    lora: Lora,
    quantization: Quantization,
    base: Values,
    stored: Mapping[str, StoredQuantized],
    seed: int,
    frozen: torch.dtype,
) -> Values:
    """Puts the recipe's adapters into `built`; returns the values of base and adapters.

    frozen: The dtype of the base.
    """
    try:
        add_adapters(built, lora, frozen)
    except UserError as error:
        if lora.adapter_name_or_path is None:
            raise
        raise UserError(
            f"adapter_name_or_path: {lora.adapter_name_or_path} does not fit the model: {error}"
        ) from None
    shapes = {name: p.shape for name, p in built.named_parameters() if is_adapter(name)}
    if quantization.bits is None:
        used = base
    else:
        used = dequantized_values(base, quantization, stored, frozen)
    values = with_adapters(base, shapes, seed, used)
    if lora.adapter_name_or_path is None:
        return values
    return read_adapter(built, find_adapter(lora.adapter_name_or_path), values)


def build_on_meta(config: Any, dtype: torch.dtype, trust_remote_code: bool = False) -> nn.Module:
    """Builds transformers' model of `config` on the meta device, with real buffers."""
    from accelerate import init_empty_weights
    from transformers.initialization import no_init_weights

    auto_class: Any = auto_class_of(config)
    if not trust_remote_code and type(config) not in auto_class._model_mapping:
        raise UserError(
            f"{config.model_type}: transformers has no causal language model of this type; name "
            "another model"
        )
    try:
        # Without no_init_weights, drawing random numbers on meta takes a second for 80 layers.
        with init_empty_weights(include_buffers=False), no_init_weights():
            # Every family has eager (Gemma 2 refuses sdpa). `install_attention` replaces it.
            model: Any = auto_class.from_config(
                config,
                dtype=dtype,
                attn_implementation="eager",
                trust_remote_code=trust_remote_code,
            )
        model.get_input_embeddings()  # raises for classes whose embedding transformers cannot find
    except Exception as error:  # each family reads its config in its own way
        reason = on_one_line(error)
        raise UserError(
            f"{config.model_type}: transformers cannot build the model of this config ({reason}); "
            "name another model"
        ) from error
    buffers = dict(model.named_buffers())
    for name in find_float32(model, buffers):  # which from_pretrained alone minds
        set_buffer(model, name, buffers[name].float())
    if not model.config.architectures:  # as in a recipe's model_config
        model.config.architectures = [type(model).__name__]
    set_experts_implementation(model, "eager")  # loops over experts; exact on every device
    model.tie_weights()
    model.train()
    return model  # type: ignore[no-any-return]


def auto_class_of(config: Any) -> Any:
    """The class of transformers that opens a checkpoint with `config`."""
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForSequenceClassification,
        AutoModelForTokenClassification,
    )

    if scores_tokens(config):
        return AutoModelForTokenClassification
    if has_scores_class(config):
        return AutoModelForSequenceClassification
    if is_vision_language(config):
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


def forget_quantization(config: Any) -> None:
    """Removes the quantization from `config`."""
    for part in (config, text_config_of(config)):
        if hasattr(part, "quantization_config"):
            del part.quantization_config


def freeze_modules(model: nn.Module, keys: Model) -> None:
    """Trains the parameters that `trainable_modules` and `frozen_modules` choose; freezes the rest.

    Raises `UserError` where a pattern names nothing, or nothing is left to train.
    """
    named = names_of_parameters(model)
    trained = find_trained(list(named.values()), keys, text_names(model))
    for parameter, names in named.items():
        parameter.requires_grad_(names[0] in trained)


def trains_tower(model: nn.Module) -> bool:
    """Whether a part of a vision-language model beside its language model is trained."""
    return any(p.requires_grad for part in other_parts(unwrap(model)) for p in part.parameters())


def count_parameters(model: Any) -> ModelSize:
    """Counts the parameters of an unsharded model, tied ones once."""
    parameters = dict(model.named_parameters())
    active = count_active(model)
    for part in other_parts(model):  # they work on images, not on text
        active |= dict.fromkeys(part.parameters(), 0)
    embedding = model.get_input_embeddings().weight
    multiplied = dict(parameters)
    if embedding is not head_of(model).weight:
        multiplied = {name: p for name, p in parameters.items() if p is not embedding}
    frozen = [p for name, p in multiplied.items() if is_adapter(name) or not p.requires_grad]
    return ModelSize(
        total=sum(p.numel() for p in parameters.values()),
        trained=sum(p.numel() for p in parameters.values() if p.requires_grad),
        active=sum(active.values()),
        multiplied=sum(active[p] for p in multiplied.values()),
        frozen_multiplied=sum(active[p] for p in frozen),
    )


def read_base_values(
    built: nn.Module, config: Any, model: Model, seed: int = 0, vocabulary: Vocabulary | None = None
) -> tuple[Values, Mapping[str, StoredQuantized]]:
    """Fills the saved buffers of `built`.

    Returns:
        (the values of its parameters, the weights that the files hold quantized).
    """
    if model.model_config is not None:
        twin = partial(build_on_meta, config, torch.float32, model.trust_remote_code)
        return seeded_values(twin, seed), {}
    folder = weights_folder(model)
    stored, quantized = split_quantized(read_folder(folder), str(folder))
    if model.drop_vision:
        stored = take_language_model(stored)
    stored = convert_to_parameters(built, stored, str(folder))
    untie_as_stored(built, stored)
    values = stored_values(built, stored, str(folder), quantized, vocabulary, seed)
    load_buffers(built, stored)
    return values, quantized


def read_carried(model: Model, built: nn.Module | None = None) -> dict[str, StoredTensor]:
    """The tensors of the recipe's base that an export carries over.

    built: The recipe's model, where the caller has it.
    """
    if model.model_name_or_path is None:
        return {}
    if built is None:
        config = trained_config(load_config(model), model)
        built = build_on_meta(config, torch.float32, model.trust_remote_code)
    carried, quantized = read_carried_of(built, weights_folder(model), model.drop_vision)
    return {
        name: quantized[name].codes if name in quantized else tensor
        for name, tensor in carried.items()
    }


def read_carried_of(
    built: nn.Module, folder: Path, drop_vision: bool = False
) -> tuple[dict[str, StoredTensor], dict[str, StoredQuantized]]:
    """Finds the tensors that an export of `built` carries over from its base.

    A checkpoint holds none of them; then they are those of the base from which it was trained.

    Returns:
        (the tensors, those of them that are quantized).
    """
    carried: dict[str, StoredTensor] = {}
    quantized: dict[str, StoredQuantized] = {}
    seen = set[Path]()
    origin: Path | None = folder
    while not carried and origin is not None and origin not in seen:
        seen.add(origin)
        stored, quantized = split_quantized(read_folder(origin), str(origin))
        own = take_language_model(stored) if drop_vision else stored
        carried = find_carried(built, convert_to_parameters(built, own, str(origin)))
        if drop_vision:
            predicts_tokens = make_prediction_filter(built)
            carried |= {
                name: tensor
                for name, tensor in stored.items()
                if name not in own and predicts_tokens(name)
            }
        origin = find_origin(origin)
    return carried, {name: quantized[name] for name in carried.keys() & quantized.keys()}


def weights_folder(model: Model) -> Path:
    """The folder with the model's safetensors; a hub name's is downloaded unless it is cached.

    Raises `UserError` where the hub is unreachable, or the model or the permission to read it is
    missing.
    """
    assert model.model_name_or_path is not None
    if Path(model.model_name_or_path).is_dir():
        return Path(model.model_name_or_path)
    # An export needs more than the weights: the tokens that end an answer, the license, processors.
    patterns = [
        "*.safetensors",
        "*.safetensors.index.json",
        "generation_config.json",
        "README.md",
        *PROCESSOR_FILES,
    ]
    return download_folder(
        model.model_name_or_path, patterns, "its safetensors", model.model_revision
    )


def _read_token_loss(keys: Optimization | None) -> tuple[float, TokenWeights | None]:
    """Reads the arguments of `install_loss` from the recipe; a model in inference has no keys."""
    if keys is None:
        return 0.0, None
    if keys.token_loss == "cross_entropy":
        return keys.label_smoothing, None
    return keys.label_smoothing, TokenWeights(keys.token_loss, keys.eaft_alpha)


@dataclass(frozen=True, slots=True)
class Teacher:
    """A frozen model from which a student learns. Returned by `load_teacher`."""

    model: nn.Module
    size: ModelSize
    options: DivergenceOptions

    def flop_per_token(self, length: float) -> float:
        """FLOP of a forward of one token in a document of `length` tokens."""
        config = text_config_of(self.model.config)
        return forward_flop_per_token_of(config, parameters=self.size.multiplied, length=length)

    @torch.no_grad()
    def compare(self, inputs: Mapping[str, Any]) -> HeadFunction:
        """Runs the teacher over a micro-batch.

        Returns:
            A function for the student's head over the same micro-batch. It computes the three sums
            of `linear_divergence`.

        inputs: The model's arguments, with `trained_positions`.
        """
        states = self._states(inputs)

        def diverge(
            head: LossHead, hidden: Tensor, labels: Tensor, positions: Tensor | None
        ) -> Tensor:
            own: Any = head_of(self.model)
            with gathered(own):
                scores = TeacherScores(states, own.weight, own.bias, own.logits)
                return head_divergence(scores, self.options)(head, hidden, labels, positions)

        return diverge

    @torch.no_grad()
    def find_top(self, inputs: Mapping[str, Any], rows: int, k: int) -> tuple[Tensor, Tensor]:
        """Finds `ids` and `scores` of `TopScores` among the vocabulary's first `rows` tokens."""
        own: Any = head_of(self.model)
        states = self._states(inputs)
        with gathered(own):
            scores = TeacherScores(states, own.weight, own.bias, own.logits)
            return find_top(scores, min(rows, scores.rows), k, self.options.temperature)

    def _states(self, inputs: Mapping[str, Any]) -> Tensor:
        """Returns the inputs of the teacher's head at the trained positions."""
        states: Tensor = self.model(**inputs, head_function=head_states)
        return states


def _quantize(
    model: nn.Module,
    quantization: Quantization,
    dtype: torch.dtype,
    stored: Mapping[str, StoredQuantized],
) -> frozenset[str]:
    """Quantizes the frozen layers of `model` on the meta device, experts too.

    Where the files hold quantized weights, it quantizes these alone.

    Returns:
        The names of the parameters that hold codes and scales.
    """
    of_experts = frozenset[str]()
    if not stored:
        of_experts = quantize_experts(model, quantization, dtype)
    return of_experts | quantize_layers(model, quantization, dtype, stored)


def build_teacher(
    recipe: Recipe, world: World
) -> tuple[nn.Module, torch.dtype, Quantization, Values, Mapping[str, StoredQuantized]]:
    """Builds the recipe's teacher on the meta device.

    Returns:
        (model, dtype, quantization, values, weights that the files hold quantized).

    Raises:
        UserError: The model cannot be reached, or its files do not fit its config.
    """
    keys = recipe.teacher
    dtype = DTYPES[compute_dtype(world.sharding, recipe.model, recipe.lora)]
    assert keys is not None
    config = load_config(keys)
    quantization = read_teacher_quantization(
        getattr(config, "quantization_config", None), recipe.method
    )
    forget_quantization(config)
    model = build_on_meta(config, dtype, keys.trust_remote_code).requires_grad_(False).eval()
    return model, dtype, quantization, *read_base_values(model, config, keys)


def is_here(model: Model) -> bool:
    """Whether all of the model's weights are on this machine, or are drawn from a seed."""
    name = model.model_name_or_path
    if name is None or Path(name).is_dir():
        return True
    folder = find_local_folder(name, model.model_revision)
    if folder is None:
        return False
    listed = read_json_object(folder / INDEX_FILE).get("weight_map", {"": "model.safetensors"})
    return all((folder / file).is_file() for file in set(listed.values()))


def load_teacher(recipe: Recipe, world: World) -> Teacher:
    """Builds the recipe's teacher, shards it, and reads each rank's slices of the weights.

    Raises `UserError` for a model that cannot be reached, or whose files do not fit its config.
    """
    keys = recipe.teacher
    assert keys is not None
    model, dtype, quantization, values, stored = build_teacher(recipe, world)
    install_attention(model, keys.attn_implementation, world.sequence_group)
    install_loss(model)
    install_experts(model, world, dtype, keys.torch_compile)
    size = count_parameters(model)
    unfilled = frozenset[str]()
    if quantization.bits:
        unfilled = _quantize(model, quantization, dtype, stored)
    # The Accelerate file names the student's layers, which a teacher may not have.
    own = replace(world, sharding=replace(world.sharding, wrap_classes=()))
    parallelize(model, values, own, unfilled)
    fill_quantized_layers(model, values, stored, world)
    if keys.torch_compile:
        compile_layers(model)
    method = recipe.method
    return Teacher(
        model,
        size,
        DivergenceOptions(method.distill_beta, method.temperature, method.distill_alpha),
    )
