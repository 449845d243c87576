"""Loads a recipe's model onto the ranks: builds, adapts and shards it, and reads its weights."""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from finetune.config.layout import find_compute_dtype, find_frozen_dtype
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
from finetune.config.quantization import read_stored_quantization
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
    set_tensor,
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
from finetune.models.lora import (
    add_adapters,
    find_saved_whole,
    names_of_parameters,
    read_adapter,
    with_adapters,
)
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
"""(what the output head computes, the id of padding tokens); see `set_head`."""
VOCABULARY: Scores = (ScoreHead(), None)  # the head of a language model


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """What a run's tokenizer, method and data require of the model."""

    vocabulary: Vocabulary | None = None  # the size with added tokens; None: the config's
    scores: Scores = VOCABULARY  # what the output head computes
    # Whether the loss uses the head. Else the head is frozen, unless it is tied to the embedding.
    trains_head: bool = True
    # Makes a document with an image, which shows what images reach; None if the run has no images.
    blank_document: BlankDocument | None = None


PLAIN = BuildOptions()  # the model as its config has it
UNQUANTIZED = Quantization()
UNROUNDED = QuantizationAware()
# The recipe's name of a dtype -> torch's.
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Numbers of parameters in the whole model, over all ranks.

    They are counted before sharding, because FSDP1 shows only shards.
    """

    total: int
    trained: int
    active: int  # those that work on one text token; of routed experts, the chosen ones
    multiplied: int  # the active ones in matrix products: all but an untied input embedding
    frozen_multiplied: int  # the frozen ones of `multiplied`, and the adapters, which are small
    unreached: tuple[str, ...] = ()  # names that the recipe would train, but no image reaches
    # Name -> a tensor in the base's files that has no place in the model, and that an export keeps.
    carried: Mapping[str, StoredTensor] = field(default_factory=dict)

    @property
    def carried_bytes(self) -> int:
        """The size of the carried tensors in an export."""
        return sum(tensor.byte_count for tensor in self.carried.values())


@dataclass(frozen=True, slots=True)
class BuiltModel:
    """A model on the meta device with its adapters, not sharded yet. Returned by `build_model`."""

    model: nn.Module
    size: ModelSize
    values: Values  # read or draw all parameters, adapters included
    base: Values  # read or draw the base's parameters
    stored: Mapping[str, StoredQuantized]  # name -> a weight that the files hold quantized
    frozen_dtype: torch.dtype  # of the base if it is frozen under adapters
    offload: ActivationOffload | None  # of checkpointed activations to host memory
    misses_gradients: bool  # whether a trained parameter may get no gradient in a step of DDP


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

    Of the weight files it reads the headers and the saved buffers, but no parameter.

    Args:
        model: The recipe's keys of the model.
        optimization: The recipe's keys of training; None for a model that is not trained.

    Raises:
        UserError: The model cannot be reached, its files do not match it, or a key names no part of
            it.
    """
    vocabulary = options.vocabulary
    score_head, pad_id = options.scores
    config = trained_config(load_config(model, vocabulary), model)
    set_head(config, score_head, pad_id)
    forget_quantization(config)  # files are dequantized here, and the export is not quantized
    built = build_on_meta(config, DTYPES[model.dtype], model.trust_remote_code)
    # Needs transformers' own forward, which `_install_forward` replaces.
    unread = find_unread(built) if world.sharding.layout in ("ddp", "fsdp1") else set()
    base, stored = read_base_values(built, config, model, seed, vocabulary)
    if score_head.has_values:
        base = add_value_head(built, base)
    base_dtype = DTYPES[find_frozen_dtype(world.sharding, lora)]
    experts_dtype = base_dtype if lora.use_peft else DTYPES[model.dtype]
    _install_forward(built, model, world, optimization, experts_dtype)
    values = base
    if lora.use_peft:
        lora = train_new_tokens(built, lora, vocabulary)
        values = _insert_adapters(built, lora, quantization, base, stored, seed, base_dtype)
    else:
        _freeze_untrained(built, model, options)
    if score_head.has_values:
        train_value_head(built, torch.float32 if lora.use_peft else DTYPES[model.dtype])
    unreached: tuple[str, ...] = ()
    if options.blank_document is not None:
        unreached = freeze_unreached(built, options.blank_document)
    head_of(built).is_frozen = not head_of(built).weight.requires_grad
    offload = _checkpoint_activations(built, model, world)
    size = replace(count_parameters(built), unreached=unreached, carried=read_carried(model, built))
    if not options.trains_head:
        size = _subtract_head(size, head_of(built).weight)
    if stored and quantization.bits is None:
        raise UserError(
            f"{min(stored)} is stored quantized, but config.json does not say so; name the "
            "unquantized model"
        )
    if world.sharding.layout == "fsdp1" and optimization is not None and optimization.weight_decay:
        _refuse_decay(built, unread, world.sharding.source)
    misses_gradients = _trains_modules_of(built, unread)
    return BuiltModel(built, size, values, base, stored, base_dtype, offload, misses_gradients)


def _refuse_decay(model: nn.Module, unread: Set[str], source: str) -> None:
    """Raises `UserError` if weight decay would shrink a matrix that a short text does not reach.

    FSDP1 gives such a matrix a gradient of zeros, so the optimizer decays it. In other layouts the
    matrix gets no gradient and stays as it is.

    Args:
        unread: Of `find_unread`: the names of the parameters that a short text does not reach.
        source: The Accelerate file, for the message.
    """
    text = text_names(model)
    trained = {name for name, p in model.named_parameters() if p.requires_grad and p.dim() > 1}
    decayed = sorted(
        name for name in trained & unread if name.startswith(text) and not NOT_DECAYED.search(name)
    )
    if decayed:
        raise UserError(
            f"{source}: FSDP1 would decay weights that a short text does not reach, "
            f"{decayed[0]} the first; choose fsdp_full_shard_auto.yaml, or set weight_decay: 0"
        )


def _trains_modules_of(model: nn.Module, names: Set[str]) -> bool:
    """Whether a module that holds one of the parameters `names` is trained, or has an adapter."""
    prefixes = tuple(f"{name.rpartition('.')[0]}." for name in names)
    return any(
        p.requires_grad and name.startswith(prefixes) for name, p in model.named_parameters()
    )


def _freeze_untrained(built: nn.Module, model: Model, options: BuildOptions) -> None:
    """Without adapters: freezes what the recipe does not train, and a head that no loss uses.

    Raises `UserError` if tokens are added whose embedding would be frozen.
    """
    freeze_modules(built, model)
    refuse_frozen_tokens(built, options.vocabulary)
    is_tied = head_of(built).weight is built.get_input_embeddings().weight  # type: ignore[operator]
    if not options.trains_head and not is_tied:
        head_of(built).requires_grad_(False)


def _checkpoint_activations(
    built: nn.Module, model: Model, world: World
) -> ActivationOffload | None:
    """Makes layers recompute their activations in the backward, if the Accelerate file says so.

    Returns the offload of what the layers keep, if the recipe wants one.
    """
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


def _subtract_head(size: ModelSize, head: nn.Parameter) -> ModelSize:
    """The size of a model whose loss does not multiply by the weight `head`."""
    frozen_elements = 0 if head.requires_grad else head.numel()
    return replace(
        size,
        multiplied=size.multiplied - head.numel(),
        frozen_multiplied=size.frozen_multiplied - frozen_elements,
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
        shared: The frozen tensors of an earlier model, as `frozen_parts` returned them. The model
            uses them in place of reading them from the files.

    Returns:
        (the model to train, its size before sharding).

    Raises:
        UserError: As `build_model` does, and if the layout does not fit the model.
    """
    multiply_in_fp32(
        world.device, {DTYPES[model.dtype], DTYPES[COMPUTE_DTYPE[world.sharding.mixed_precision]]}
    )
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = model.tf32
    built = build_model(model, lora, seed, world, quantization, optimization, options)
    unsharded = built.model
    quantized_names = frozenset[str]()
    if quantization.bits is not None:
        assert lora.use_peft, "a quantized base is frozen: the recipe reader requires adapters"
        quantized_names = _quantize(unsharded, quantization, built.frozen_dtype, built.stored)
    if world.sharding.fp8 is not None:
        from finetune.models.fp8 import multiply_in_fp8  # imports torchao

        multiply_in_fp8(unsharded, world.sharding)
    if quantization_aware.quantization_aware_training is not None:
        fake_quantize(unsharded, quantization_aware)
    divide_experts(unsharded, world)
    if lora.use_peft:
        multiply_by_factors(unsharded)
    if lora.use_peft and world.sharding.layout != "fsdp1" and not world.sharding.divides_matrices:
        fuse_adapters(unsharded)
    sharded = parallelize(
        unsharded,
        built.values,
        world,
        unfilled=quantized_names,
        shared=shared,
        misses_gradients=built.misses_gradients,
    )
    record_outputs(unwrap(sharded))
    fill_quantized_layers(unwrap(sharded), built.base, built.stored, world, shared)
    if model.torch_compile:
        compile_layers(unwrap(sharded), offload=built.offload)
    return sharded, built.size


def _install_forward(
    built: nn.Module,
    model: Model,
    world: World,
    optimization: Optimization | None,
    experts_dtype: torch.dtype,
) -> None:
    """Replaces what the model computes in another way than transformers' code.

    These are attention, loss, embedding noise, experts, routing, Liger's kernels and gated MLPs.
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


def _insert_adapters(
    built: nn.Module,
    lora: Lora,
    quantization: Quantization,
    base: Values,
    stored: Mapping[str, StoredQuantized],
    seed: int,
    base_dtype: torch.dtype,
) -> Values:
    """Puts the recipe's adapters into `built`, and returns the values of base and adapters.

    The adapters get the values of `adapter_name_or_path`, or else first values drawn from `seed`.

    Args:
        base: The values of the base.
        stored: Name -> a weight that the files hold quantized.
        base_dtype: The dtype of the frozen base.
    """
    try:
        add_adapters(built, lora, base_dtype)
    except UserError as error:
        if lora.adapter_name_or_path is None:
            raise
        raise UserError(
            f"adapter_name_or_path: {lora.adapter_name_or_path} does not fit the model: {error}"
        ) from None
    shapes = {name: p.shape for name, p in built.named_parameters() if is_adapter(name)}
    # The first values of DoRA depend on the weight that the forward multiplies by.
    if quantization.bits is None:
        multiplied = base
    else:
        multiplied = dequantized_values(base, quantization, stored, base_dtype)
    values = with_adapters(base, shapes, seed, multiplied)
    if lora.adapter_name_or_path is None:
        return values
    return read_adapter(built, find_adapter(lora.adapter_name_or_path), values)


def build_on_meta(config: Any, dtype: torch.dtype, trust_remote_code: bool = False) -> nn.Module:
    """Builds transformers' model of `config`: parameters on the meta device, buffers in memory.

    Raises `UserError` if transformers cannot build it.
    """
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
    # Routers' weights too, which some classes keep in fp32: FSDP requires one dtype in a unit.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    buffers = dict(model.named_buffers())
    for name in find_float32(model, buffers):  # from_config casts them, from_pretrained does not
        set_tensor(model, name, buffers[name].float())
    if not model.config.architectures:  # a recipe's model_config may not name its class
        model.config.architectures = [type(model).__name__]
    set_experts_implementation(model, "eager")  # loops over experts; exact on every device
    model.tie_weights()
    model.train()
    return model  # type: ignore[no-any-return]


def auto_class_of(config: Any) -> Any:
    """Transformers' auto class (AutoModelFor...) that opens a checkpoint with `config`."""
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
    """Removes the quantization from `config` and from its part for the language model."""
    for part in (config, text_config_of(config)):
        if hasattr(part, "quantization_config"):
            del part.quantization_config


def freeze_modules(model: nn.Module, keys: Model) -> None:
    """Trains the parameters that `trainable_modules` and `frozen_modules` choose; freezes the rest.

    Raises `UserError` if a pattern names nothing, or nothing is left to train.
    """
    names_by_parameter = names_of_parameters(model)
    trained = find_trained(list(names_by_parameter.values()), keys, text_names(model))
    for parameter, names in names_by_parameter.items():
        first_name = names[0]  # by which `find_trained` lists a tied parameter
        parameter.requires_grad_(first_name in trained)


def count_parameters(model: Any) -> ModelSize:
    """Counts the parameters of an unsharded model. A tied parameter counts once."""
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
    """Opens the weight files of `built`, and reads its saved buffers.

    Without files (`model_config`) the values are drawn from `seed`.

    Returns:
        (the values of the parameters, the weights that the files hold quantized).
    """
    if model.model_config is not None:
        make_twin = partial(build_on_meta, config, torch.float32, model.trust_remote_code)
        return seeded_values(make_twin, seed), {}
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
    """Finds the tensors of the recipe's base that an export carries over, by name.

    Of a quantized one it returns the codes. Empty if the recipe trains from a `model_config`.

    Args:
        built: The recipe's model if the caller has it; else it is built.
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

    A checkpoint holds none of them. So if `folder` has none and is a checkpoint, they are looked
    for in the base from which it was trained, and so on.

    Returns:
        (name -> tensor, name -> the quantized weight for those that are quantized).
    """
    carried: dict[str, StoredTensor] = {}
    quantized: dict[str, StoredQuantized] = {}
    searched = set[Path]()
    origin: Path | None = folder
    while not carried and origin is not None and origin not in searched:
        searched.add(origin)
        stored, quantized = split_quantized(read_folder(origin), str(origin))
        text_tensors = take_language_model(stored) if drop_vision else stored
        carried = find_carried(built, convert_to_parameters(built, text_tensors, str(origin)))
        if drop_vision:
            # The files may hold layers of multi-token prediction outside of the language model.
            predicts_tokens = make_prediction_filter(built)
            carried |= {
                name: tensor
                for name, tensor in stored.items()
                if name not in text_tensors and predicts_tokens(name)
            }
        origin = find_origin(origin)
    return carried, {name: quantized[name] for name in carried.keys() & quantized.keys()}


def weights_folder(model: Model) -> Path:
    """Finds the folder with the model's safetensors; downloads it if its hub name is not cached.

    Raises `UserError` if the hub is unreachable, or the model or the permission to read it is
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
    """Reads (label smoothing, weights of tokens), the arguments of `install_loss`, from the recipe.

    A model in inference has no keys: no smoothing, no weights.
    """
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
    options: DivergenceOptions  # how the divergence of a student is measured

    def flop_per_token(self, length: float) -> float:
        """Computes the FLOP of one token's forward in a document of `length` tokens."""
        config = text_config_of(self.model.config)
        return forward_flop_per_token_of(config, parameters=self.size.multiplied, length=length)

    @torch.no_grad()
    def compare(self, inputs: Mapping[str, Any]) -> HeadFunction:
        """Runs the teacher over a micro-batch.

        Args:
            inputs: The model's arguments, with `trained_positions`.

        Returns:
            A function for the student's head over the same micro-batch. It computes the three sums
            of `linear_divergence`.
        """
        states = self._compute_states(inputs)

        def diverge(
            student_head: LossHead, hidden: Tensor, labels: Tensor, positions: Tensor
        ) -> Tensor:
            head: Any = head_of(self.model)
            with gathered(head):
                scores = TeacherScores(states, head.weight, head.bias, head.logits)
                measure = head_divergence(scores, self.options)
                return measure(student_head, hidden, labels, positions)

        return diverge

    @torch.no_grad()
    def find_top(self, inputs: Mapping[str, Any], rows: int, k: int) -> tuple[Tensor, Tensor]:
        """Finds the teacher's k likeliest tokens at each trained position of a micro-batch.

        Returns `ids` and `scores` of `TopScores`, over the first `rows` tokens of the vocabulary.
        """
        head: Any = head_of(self.model)
        states = self._compute_states(inputs)
        with gathered(head):
            scores = TeacherScores(states, head.weight, head.bias, head.logits)
            return find_top(scores, min(rows, scores.rows), k, self.options.temperature)

    def _compute_states(self, inputs: Mapping[str, Any]) -> Tensor:
        """Computes the inputs of the teacher's head at the trained positions: [tokens, hidden]."""
        states: Tensor = self.model(**inputs, head_function=head_states)
        return states


def _quantize(
    model: nn.Module,
    quantization: Quantization,
    dtype: torch.dtype,
    stored: Mapping[str, StoredQuantized],
) -> frozenset[str]:
    """Puts quantized layers and experts into `model`, which is on the meta device.

    If the files hold some weights quantized (`stored`), only those layers are quantized.

    Returns:
        The names of the parameters that hold codes and scales.
    """
    experts_names = frozenset[str]()
    if not stored:
        experts_names = quantize_experts(model, quantization, dtype)
    return experts_names | quantize_layers(model, quantization, dtype, stored)


def build_teacher(
    recipe: Recipe, world: World
) -> tuple[nn.Module, torch.dtype, Quantization, Values, Mapping[str, StoredQuantized]]:
    """Builds the recipe's teacher on the meta device, frozen, and opens its weight files.

    Returns:
        (model, dtype, quantization, values, weights that the files hold quantized).

    Raises:
        UserError: The model cannot be reached, or its files do not match its config.
    """
    keys = recipe.teacher
    dtype = DTYPES[find_compute_dtype(world.sharding, recipe.model, recipe.lora)]
    assert keys is not None
    config = trained_config(load_config(keys), keys)
    settings = getattr(config, "quantization_config", None)
    stored_quantization = read_stored_quantization(settings, str(keys.model_name_or_path))
    quantization = stored_quantization or recipe.teacher_quantization
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
    # Without an index there is one file.
    file_of = read_json_object(folder / INDEX_FILE).get("weight_map", {"": "model.safetensors"})
    return all((folder / file).is_file() for file in set(file_of.values()))


def load_teacher(recipe: Recipe, world: World) -> Teacher:
    """Builds the recipe's teacher, shards it, and reads each rank's slices of the weights.

    Raises `UserError` if the model cannot be reached, or its files do not match its config.
    """
    keys = recipe.teacher
    assert keys is not None
    model, dtype, quantization, values, stored = build_teacher(recipe, world)
    install_attention(model, keys.attn_implementation, world.sequence_group)
    install_loss(model)
    install_experts(model, world, dtype, keys.torch_compile)
    size = count_parameters(model)
    if (
        recipe.has_reference
    ):  # what the recipe trains whole is not quantized in its reference either
        for parameter in find_saved_whole(model, recipe.lora):
            parameter.requires_grad_()
    quantized_names = frozenset[str]()
    if quantization.bits:
        quantized_names = _quantize(model, quantization, dtype, stored)
    model.requires_grad_(False)
    # The Accelerate file names the student's layers, which a teacher may not have.
    teacher_world = replace(world, sharding=replace(world.sharding, wrap_classes=()))
    parallelize(model, values, teacher_world, unfilled=quantized_names)
    fill_quantized_layers(model, values, stored, world)
    if keys.torch_compile:
        compile_layers(model)
    method = recipe.method
    return Teacher(
        model,
        size,
        DivergenceOptions(method.distill_beta, method.temperature, method.distill_alpha),
    )
