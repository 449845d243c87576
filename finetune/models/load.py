"""Loads a recipe's model onto the ranks: built, adapted, sharded, filled with weights, and compiled
where asked for.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from finetune.config.layout import compute_dtype, frozen_dtype
from finetune.config.methods import ScoreHead
from finetune.config.module_names import find_trained, is_adapter
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
    head_of,
    other_parts,
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
from finetune.models.carried import find_carried, predicts
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
from finetune.models.log_probabilities import (
    DivergenceOptions,
    TeacherScores,
    find_top,
    head_divergence,
)
from finetune.models.lora import (
    add_adapters,
    fuse_adapters,
    names_of_parameters,
    read_adapter,
    with_adapters,
)
from finetune.models.loss_chunks import TokenWeights
from finetune.models.quantized_layers import fill_quantized_layers, quantize_layers
from finetune.models.quantized_weights import StoredQuantized, dequantized_values, split_quantized
from finetune.models.reach import BlankDocument, freeze_unreached
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
"""The output head, and the id that fills up rows."""
VOCABULARY: Scores = (ScoreHead(), None)


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """What a run's tokenizer, method and data ask of the model that is built."""

    vocabulary: Vocabulary | None = None  # of the tokens that the recipe adds
    scores: Scores = VOCABULARY  # what its output head computes
    # whether anything is asked of the head; else it is frozen, unless it is the embedding
    trains_head: bool = True
    # of a vision-language model, to find what an image reaches; None where no row holds one
    blank_document: BlankDocument | None = None


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
    # those that work on one token: of a mixture's routed experts, the ones that it chooses
    active: int
    multiplied: int  # active ones in matrix products: all but an untied input embedding
    # those among them without a gradient of their own; adapters, which are small, count as such
    frozen_multiplied: int
    # names of parameters that the recipe would train, and that no image reaches
    unreached: tuple[str, ...] = ()
    # of the base's files, beside the parameters
    carried: Mapping[str, StoredTensor] = field(default_factory=dict)

    @property
    def carried_bytes(self) -> int:
        """The bytes that the export holds beside the parameters."""
        return sum(tensor.byte_count for tensor in self.carried.values())


@dataclass(frozen=True, slots=True)
class BuiltModel:
    """A model on meta, adapted, before it is sharded. Returned by `build_model`."""

    model: nn.Module
    size: ModelSize
    values: Values  # of its parameters, adapters included
    base: Values  # of the base's
    stored: Mapping[str, StoredQuantized]  # weights that the files hold quantized
    frozen_dtype: torch.dtype  # of a base under adapters
    offload: ActivationOffload | None


def build_model(
    model: Model,
    lora: Lora,
    seed: int,
    world: World,
    quantization: Quantization = UNQUANTIZED,
    optimization: Optimization | None = None,
    options: BuildOptions = PLAIN,
) -> BuiltModel:
    """Builds the model on meta, grown to the vocabulary of `options`, and adapts it.

    Of its files the headers are read.

    Raises:
        UserError: It cannot be reached, its files do not fit, or a key names nothing of it.
    """
    vocabulary = options.vocabulary
    config = trained_config(load_config(model, vocabulary), model)
    set_head(config, *options.scores)
    # how the files are quantized: they are read here, and the model exported is not
    forget_quantization(config)
    built = build_on_meta(config, DTYPES[model.dtype], model.trust_remote_code)
    base, stored = read_base_values(built, config, model, seed, vocabulary)
    has_values = options.scores[0].has_values
    if has_values:
        base = add_value_head(built, base)
    values = base
    if lora.use_peft:
        lora = train_new_tokens(built, lora, vocabulary)
    frozen = DTYPES[frozen_dtype(world.sharding, lora)]
    _install_forward(
        built, model, world, optimization, frozen if lora.use_peft else DTYPES[model.dtype]
    )
    if not lora.use_peft:
        freeze_modules(built, model)
        refuse_frozen_tokens(built, vocabulary)
        is_tied = head_of(built).weight is built.get_input_embeddings().weight  # type: ignore[operator]
        if not options.trains_head and not is_tied:
            head_of(built).requires_grad_(False)
    else:
        values = _adapt(built, lora, quantization, base, stored, seed, frozen)
    if has_values:
        train_value_head(built, torch.float32 if lora.use_peft else DTYPES[model.dtype])
    if options.blank_document is not None:
        unreached = freeze_unreached(built, options.blank_document)
    else:
        unreached = ()
    checkpoints = world.sharding.activation_checkpointing
    if checkpoints and model.activation_offload:
        offload = ActivationOffload(CudaCopies())
    else:
        offload = None
    if checkpoints:
        keys = model.activation_checkpointing_every, model.activation_checkpointing_keeps
        checkpoint_activations(built, *keys, None if model.torch_compile else offload)
    size = replace(count_parameters(built), unreached=unreached, carried=read_carried(model, built))
    if not options.trains_head:
        head = head_of(built).weight
        is_frozen = not head.requires_grad
        size = replace(
            size,
            multiplied=size.multiplied - head.numel(),
            frozen_multiplied=size.frozen_multiplied - (head.numel() if is_frozen else 0),
        )
    if stored and quantization.bits is None:
        raise UserError(
            f"{min(stored)} is stored quantized, but config.json does not say so; name the "
            "unquantized model"
        )
    return BuiltModel(built, size, values, base, stored, frozen, offload)


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
    """Builds the model as `build_model`, shards it, and reads every rank's slices.

    The rules have judged it before.

    Args:
        shared: What `frozen_parts` returned of an earlier model; taken in place of slices that
            would be read.

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
    sharded = parallelize(built, made.values, world, unfilled, shared)
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
    """Puts in what computes otherwise than transformers: attention, loss, noise, experts, and
    Liger's kernels.
    """
    install_attention(built, model.attn_implementation, world.sequence_group)
    install_loss(built, *_read_token_loss(optimization))
    if optimization is not None and optimization.neftune_noise_alpha is not None:
        install_embedding_noise(built, optimization.neftune_noise_alpha)
    install_experts(built, world, experts_dtype, model.torch_compile)
    install_routing(built, model.router_aux_loss_coef)
    if model.use_liger_kernel:
        use_liger_kernels(built)


def _adapt(
    built: nn.Module,
    lora: Lora,
    quantization: Quantization,
    base: Values,
    stored: Mapping[str, StoredQuantized],
    seed: int,
    frozen: torch.dtype,
) -> Values:
    """Puts the recipe's adapters into `built`, whose base is kept in `frozen`; returns the values
    of both.
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
    """`...ForCausalLM` of `config`, or the vision-language model, with parameters on meta and real
    buffers.
    """
    from accelerate import init_empty_weights
    from transformers.initialization import no_init_weights

    auto_class: Any = auto_class_of(config)
    # of scores `set_head` has looked
    if not trust_remote_code and type(config) not in auto_class._model_mapping:
        raise UserError(
            f"{config.model_type}: transformers has no causal language model of this type; name "
            "another model"
        )
    try:
        # Random numbers on meta are no numbers, and take a second for 80 layers.
        with init_empty_weights(include_buffers=False), no_init_weights():
            # eager, since every family has it (Gemma 2 refuses sdpa); attention.py then installs
            # the one that is used.
            model: Any = auto_class.from_config(
                config,
                dtype=dtype,
                attn_implementation="eager",
                trust_remote_code=trust_remote_code,
            )
        # of some classes transformers does not know which module it is
        model.get_input_embeddings()
    except Exception as error:  # each family reads its config in its own way
        reason = on_one_line(error)
        raise UserError(
            f"{config.model_type}: transformers cannot build the model of this config ({reason}); "
            "name another model"
        ) from error
    model.config.architectures = model.config.architectures or [
        type(model).__name__
    ]  # an inline model_config names none
    # a loop over the experts of a mixture, exact on every device
    set_experts_implementation(model, "eager")
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
    """Removes what `config` says of quantized files."""
    for part in (config, text_config_of(config)):
        if hasattr(part, "quantization_config"):
            del part.quantization_config


def freeze_modules(model: nn.Module, keys: Model) -> None:
    """Freezes what `trainable_modules` and `frozen_modules` leave out, or text does not reach, in
    one dtype.

    Raises `UserError` where a pattern names nothing, or nothing is left to train.
    """
    names = names_of_parameters(model)
    trained = find_trained(list(names.values()), keys, text_names(model))
    for parameter, its in names.items():
        parameter.requires_grad_(its[0] in trained)


def trains_tower(model: nn.Module) -> bool:
    """Whether anything is trained beside the language model of a vision-language one."""
    return any(p.requires_grad for part in other_parts(unwrap(model)) for p in part.parameters())


def count_parameters(model: Any) -> ModelSize:
    """The parameters of an unsharded model, tied ones once."""
    parameters = dict(model.named_parameters())
    active = count_active(model)
    # they work on images
    active |= {p: 0 for part in other_parts(model) for p in part.parameters()}
    embedding = model.get_input_embeddings().weight
    head = head_of(model).weight
    multiplied = {
        name: p for name, p in parameters.items() if embedding is head or p is not embedding
    }
    return ModelSize(
        total=sum(p.numel() for p in parameters.values()),
        trained=sum(p.numel() for p in parameters.values() if p.requires_grad),
        active=sum(active.values()),
        multiplied=sum(active[p] for p in multiplied.values()),
        frozen_multiplied=sum(
            active[p] for name, p in multiplied.items() if is_adapter(name) or not p.requires_grad
        ),
    )


def read_base_values(
    built: nn.Module, config: Any, model: Model, seed: int = 0, vocabulary: Vocabulary | None = None
) -> tuple[Values, Mapping[str, StoredQuantized]]:
    """Fills the saved buffers of `built`; returns its parameters' values, and its quantized weights
    by name.
    """
    if model.model_config is not None:
        return seeded_values(
            lambda: build_on_meta(config, torch.float32, model.trust_remote_code), seed
        ), {}
    folder = weights_folder(model)
    stored, quantized = split_quantized(read_folder(folder), str(folder))
    if model.drop_vision:
        stored = take_language_model(stored)
    else:
        stored = stored
    stored = convert_to_parameters(built, stored, str(folder))
    untie_as_stored(built, stored)
    values = stored_values(built, stored, str(folder), quantized, vocabulary, seed)
    load_buffers(built, stored)
    return values, quantized


def read_carried(model: Model, built: nn.Module | None = None) -> dict[str, StoredTensor]:
    """The tensors of the recipe's base that an export carries over.

    `built`: its model, where that is at hand.
    """
    if model.model_name_or_path is None:
        return {}
    if built is None:
        built = build_on_meta(
            trained_config(load_config(model), model), torch.float32, model.trust_remote_code
        )
    carried, quantized = read_carried_of(built, weights_folder(model), model.drop_vision)
    return {
        name: quantized[name].codes if name in quantized else tensor
        for name, tensor in carried.items()
    }


def read_carried_of(
    built: nn.Module, folder: Path, drop_vision: bool = False
) -> tuple[dict[str, StoredTensor], dict[str, StoredQuantized]]:
    """The tensors of the base in `folder` that an export of `built` carries over, and the quantized
    ones of them.

    A checkpoint holds what is trained alone: what is carried over are the tensors of the base that
    it was trained from.
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
            predicts_tokens = predicts(built)
            carried |= {
                name: tensor
                for name, tensor in stored.items()
                if name not in own and predicts_tokens(name)
            }
        origin = find_origin(origin)
    return carried, {name: quantized[name] for name in carried.keys() & quantized.keys()}


def weights_folder(model: Model) -> Path:
    """The local folder with the model's safetensors: a folder as it is, a hub name from the cache
    or the hub.

    Raises `UserError` where the hub is unreachable, or the model or the permission to read it is
    missing.
    """
    assert model.model_name_or_path is not None
    if Path(model.model_name_or_path).is_dir():
        return Path(model.model_name_or_path)
    # Beside the weights, what an export says of its base: the tokens that end an answer, and the
    # license; processors.
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
    """Reads the arguments of `install_loss`; None for a model that is not trained."""
    if keys is None:
        return 0.0, None
    weighs = keys.token_loss != "cross_entropy"
    return keys.label_smoothing, TokenWeights(keys.token_loss, keys.eaft_alpha) if weighs else None  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Teacher:
    """A frozen model, and how a student learns from it. Returned by `load_teacher`."""

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

        What it returns, at the head of a student over the same micro-batch, computes the three sums
        of `linear_divergence`.

        inputs: the model's keyword arguments, with `trained_positions`.
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
        """`ids` and `scores` of `TopScores`, over the first `rows` of the vocabulary."""
        own: Any = head_of(self.model)
        states = self._states(inputs)
        with gathered(own):
            scores = TeacherScores(states, own.weight, own.bias, own.logits)
            return find_top(scores, min(rows, scores.rows), k, self.options.temperature)

    def _states(self, inputs: Mapping[str, Any]) -> Tensor:
        """Returns the inputs of the teacher's head at the trained positions."""
        select = lambda _head, hidden, _labels, at: hidden if at is None else hidden[at]  # noqa: E731
        states: Tensor = self.model(**inputs, head_function=select)
        return states


def _quantize(
    model: nn.Module,
    quantization: Quantization,
    dtype: torch.dtype,
    stored: Mapping[str, StoredQuantized],
) -> frozenset[str]:
    """Quantizes what is frozen of `model` on meta: layers that are stored so, else all, experts
    too.
    """
    if stored:
        of_experts = frozenset[str]()
    else:
        of_experts = quantize_experts(model, quantization, dtype)
    return of_experts | quantize_layers(model, quantization, dtype, stored)


def build_teacher(
    recipe: Recipe, world: World
) -> tuple[nn.Module, torch.dtype, Quantization, Values, Mapping[str, StoredQuantized]]:
    """Returns (the recipe's teacher on meta, its dtype, how it is quantized, its values, its
    weights that the files hold quantized).

    Raises `UserError` for a model that cannot be reached, or whose files do not fit its config.
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
    """Whether all of the model's weights are on this machine, or come from a seed."""
    name = model.model_name_or_path
    if name is None or Path(name).is_dir():
        return True
    folder = find_local_folder(name, model.model_revision)
    if folder is None:
        return False
    listed = read_json_object(folder / INDEX_FILE).get("weight_map", {"": "model.safetensors"})
    return all((folder / file).is_file() for file in set(listed.values()))


def load_teacher(recipe: Recipe, world: World) -> Teacher:
    """Builds the recipe's teacher on meta, shards it over the ranks, and reads every rank's own
    slices.

    Whether it can teach, the rules on `read_teacher_facts` answer first. Raises `UserError` for a
    model that cannot be reached, or whose files do not fit its config.
    """
    keys = recipe.teacher
    assert keys is not None
    model, dtype, quantization, values, stored = build_teacher(recipe, world)
    install_attention(model, keys.attn_implementation, world.sequence_group)
    install_loss(model)
    install_experts(model, world, dtype, keys.torch_compile)
    size = count_parameters(model)
    if quantization.bits:
        unfilled = _quantize(model, quantization, dtype, stored)
    else:
        unfilled = frozenset[str]()
    # The Accelerate file names the student's layers; a teacher of another family has its own.
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
