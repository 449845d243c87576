"""The format compressed-tensors: linear layers in 8 or 4 bits, and what that costs.

vLLM, SGLang and transformers open such folders. torchao computes the codes and scales of integer
schemes, as in quantization-aware training. The package compressed-tensors computes those of FP8,
lays out codes and scales in the files, and reads the result back to measure the loss.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams, compute_dynamic_scales_and_zp
from torch import Tensor, nn

from finetune.config.export_formats import COMPRESSED, is_installed
from finetune.config.quantization import EXPORTED, SCHEMES, Scheme
from finetune.config.schema import QuantizationAware
from finetune.distributed.model_parts import expert_modules
from finetune.errors import UserError
from finetune.export.card import CARD_FILE, insert_section
from finetune.export.logits import CheckpointLogits
from finetune.export.merge_choice import (
    ComparisonRows,
    MergedScore,
    make_reader,
    measure,
    read_comparison_rows,
)
from finetune.export.metadata import write_metadata
from finetune.export.publish import ExportOptions, is_alone
from finetune.export.source import Source
from finetune.export.target import TargetModel, Value
from finetune.export.verify import WrittenFiles, compare_values, read_digests
from finetune.export.write import Shard, Weights, make_files, write_weights
from finetune.files.durable import replace_file
from finetune.models.fake_quantize import find_quantizable, quantize_to_mxfp4, round_to_mxfp4
from finetune.units import disk_size

FORMAT = f"--format {COMPRESSED}"
# The stored tensor with the shape of a packed weight. All other stored tensors have a row for each
# row of the weight.
SHAPE = "weight_shape"


@dataclass(frozen=True, slots=True)
class Quantizer:
    """Quantizes the weights of linear layers by one scheme, a few rows at a time."""

    keys: QuantizationAware  # the scheme in the recipe's terms
    scheme: QuantizationScheme  # the scheme in the package's terms
    compressor: Any  # the package's; it packs codes as the files hold them
    dtype: torch.dtype | None  # the dtype in which scales are computed; None: the weight's

    def quantize(self, rows: Tensor, written_dtype: torch.dtype) -> dict[str, Tensor]:
        """Quantizes rows of a weight, [rows, in_features].

        Returns:
            What the files hold of these rows, such as codes and scales, by the last part of the
            tensors' names. Scales have `written_dtype`, except under mxfp4.
        """
        rows = rows.to(self.dtype or written_dtype)
        if self.keys.quantization_aware_training == "mxfp4":
            scale, _ = quantize_to_mxfp4(rows)
            rounded = {"weight": round_to_mxfp4(rows), "weight_scale": scale.float()}
            return dict(self.compressor.compress(rounded, self.scheme))
        if self.scheme.weights.type == "float":
            lowest, highest = torch.aminmax(rows, dim=-1, keepdim=True)
            scale, _ = calculate_qparams(lowest, highest, self.scheme.weights)
            values = rows
        else:
            codes, scale = self._round_to_integers(rows)
            # The package divides by the scale and rounds again. These values are exact multiples of
            # the scale, so that it finds the same codes.
            group_size = rows.shape[-1] // scale.shape[-1]
            values = codes.float() * scale.float().repeat_interleave(group_size, dim=-1)
            scale = scale.float()
        stored: dict[str, Tensor] = self.compressor.compress(
            {"weight": values, "weight_scale": scale}, self.scheme
        )
        return stored | {"weight_scale": scale.to(written_dtype)}

    def _round_to_integers(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Rounds rows by torchao: (codes int8[rows, in_features], scales [rows, groups])."""
        from torchao.quantization import IntxUnpackedToInt8Tensor
        from torchao.quantization.quant_primitives import MappingType

        group_size = self.keys.qat_group_size or rows.shape[-1]
        dtype = getattr(torch, f"int{self.scheme.weights.num_bits}")
        rounded = IntxUnpackedToInt8Tensor.from_hp(
            rows, (1, group_size), dtype, mapping_type=MappingType.SYMMETRIC
        )
        return rounded.qdata, rounded.scale

    def dequantize(self, stored: Mapping[str, Tensor]) -> Tensor:
        """Returns the rows that a reader of the files computes with, in float32.

        `stored`: what `quantize` returned.
        """
        widened = dict(stored)
        if stored["weight_scale"].is_floating_point():
            widened["weight_scale"] = stored["weight_scale"].float()
        rows: Tensor = self.compressor.decompress(widened, self.scheme)["weight"]
        return rows.float()

    def round_inputs(self, inputs: Tensor) -> Tensor:
        """Rounds a layer's inputs as a reader of the files does; some schemes leave them as they
        are.
        """
        args = self.scheme.input_activations
        if args is None:
            return inputs
        rounded: Tensor = fake_quantize(
            inputs, *compute_dynamic_scales_and_zp(inputs, args, nn.Identity()), args
        )
        return rounded


def make_quantizer(keys: QuantizationAware, dtype: torch.dtype | None) -> Quantizer:
    """Makes the quantizer of a scheme in EXPORTED.

    Args:
        keys: Names the scheme and its group size.
        dtype: The dtype in which scales are computed; None: the weight's.
    """
    name = keys.quantization_aware_training
    assert name is not None
    if name == "mxfp4":
        scheme = preset_name_to_scheme("MXFP4", ["Linear"])
    else:
        scheme = _make_scheme(SCHEMES[name], keys.qat_group_size)
    file_format = infer_module_format(nn.Linear, scheme).value
    compressor = BaseCompressor.get_value_from_registry(file_format)
    return Quantizer(keys, scheme, compressor, dtype)


def _make_scheme(scheme: Scheme, group_size: int | None) -> QuantizationScheme:
    """Returns a scheme of config/quantization.py in the terms of compressed-tensors.

    `group_size`: how many numbers of a row share a scale; None: the whole row.
    """
    kind = "float" if scheme.is_float else "int"
    if group_size is None:
        strategy: dict[str, Any] = {"strategy": "channel"}
    else:
        strategy = {"strategy": "group", "group_size": group_size}
    weights = QuantizationArgs(num_bits=scheme.weight_bits, type=kind, symmetric=True, **strategy)
    inputs = None
    if scheme.input_bits is not None:
        inputs = QuantizationArgs(
            num_bits=scheme.input_bits,
            type=kind,
            strategy="token",
            dynamic=True,
            symmetric=scheme.is_float,
        )
    return QuantizationScheme(targets=["Linear"], weights=weights, input_activations=inputs)


@dataclass(frozen=True, slots=True)
class CompressedPlan:
    """The folder that will be written. Returned by `plan_compressed`."""

    source: Source
    target: TargetModel  # its config has the quantization
    weights: Weights  # the tensors as the files hold them, such as codes and scales
    plain: Mapping[str, Value]  # by name: the tensors of an unquantized export
    quantizer: Quantizer
    layers: frozenset[str]  # names of the layers that are quantized
    options: ExportOptions
    title: str  # of the model card

    @property
    def byte_count(self) -> int:
        """The bytes of the weights' files."""
        return self.weights.byte_count

    def write(self, folder: Path, logits: CheckpointLogits | None) -> list[str]:
        """Writes the folder, verifies it, and measures it beside the unquantized model.

        Args:
            folder: The folder of the export. The files go into it if this format is the only one,
                else into a folder in it.
            logits: The checkpoint's logits, which are only waited for: they are computed on the
                model that is measured here.

        Returns:
            One line, with the size and the cost.
        """
        if logits is not None:
            logits.result()
        if is_alone(COMPRESSED, self.options):
            own_folder = folder
        else:
            own_folder = folder / COMPRESSED
        own_folder.mkdir(exist_ok=True)
        # If this format is the only one, `export_source` has written its card already.
        # `write_metadata` writes the card of a Hugging Face folder in its place.
        (own_folder / CARD_FILE).unlink(missing_ok=True)
        options = replace(self.options, formats=("safetensors",))
        write_metadata(own_folder, self.source, self.target, self.weights, self.title, options)
        make_files(own_folder, self.weights)
        written = write_weights(own_folder, self.weights)
        files = WrittenFiles(own_folder, tuple(shard.name for shard in self.weights.model))
        if self.options.verify:
            compare_values(own_folder, self.weights, written, read_digests(files))
        cost = self._measure_cost(files)
        files.close()
        scheme = self.quantizer.keys.quantization_aware_training
        text = f"The linear layers but the output head are quantized ({scheme}). {cost}"
        card = (own_folder / CARD_FILE).read_text(encoding="utf-8")
        replace_file(own_folder / CARD_FILE, insert_section(card, "Quantization", text))
        verdict = "verified: every value" if self.options.verify else "not verified"
        name = self.weights.model[0].name if own_folder == folder else COMPRESSED
        return [f"{name}: {disk_size(self.byte_count)} in {scheme}, {verdict}. {cost}"]

    def _measure_cost(self, files: WrittenFiles) -> str:
        """Compares the losses of the written and the unquantized model on rows of the run.

        Returns a sentence with both, or one that nothing was measured. Raises `UserError` if the
        loss rises by more than the user allows.
        """
        model: Any = self.target.model
        parameters = sum(p.numel() for p in model.parameters())
        vocabulary = model.config.get_text_config().vocab_size
        rows = read_comparison_rows(self.source.run, parameters, vocabulary)
        max_increase = self.options["max_loss_increase"]  # None: any increase is allowed
        if rows is None:
            if max_increase is not None:
                raise UserError(
                    f"{self.source.path}: --max-loss-increase: the run kept no rows to measure on; "
                    "omit it"
                )
            return "What it costs was not measured: no rows of a run are at hand."
        plain, quantized = measure(
            model,
            [make_reader(self.plain, self.target), partial(self._read_back, files)],
            rows,
            [None, self._round_inputs],
        )
        # `not <=` also refuses a loss that is NaN.
        if max_increase is not None and not quantized.loss - plain.loss <= max_increase:
            raise UserError(
                f"not exported: quantized, the loss is {quantized.loss:.4f} instead of "
                f"{plain.loss:.4f}, more than --max-loss-increase {max_increase:g} allows"
            )
        return describe_cost(plain, quantized, rows)

    def _read_back(self, files: WrittenFiles, name: str, start: int, stop: int) -> Tensor:
        """Reads rows of a parameter from the written files, dequantized if they are quantized."""
        name = self.target.tied.get(name, name)
        layer = name.removesuffix(".weight")
        if layer not in self.layers:
            return files.read(name, start, stop, torch.clone)
        ends = self.quantizer.compressor.compression_param_names(self.quantizer.scheme)
        stored = {
            end: files.read(f"{layer}.{end}", start, stop, torch.clone)
            for end in ends
            if end != SHAPE
        }
        if SHAPE in ends:  # the shape of these rows, not of the whole weight
            _, width = self.target.shapes[name]
            stored[SHAPE] = torch.tensor([stop - start, width])
        return self.quantizer.dequantize(stored)

    def _round_inputs(self, layer: str, inputs: Tensor) -> Tensor:
        """Rounds the inputs of a quantized layer; of any other layer, returns them."""
        if layer in self.layers:
            return self.quantizer.round_inputs(inputs)
        return inputs


def describe_cost(plain: MergedScore, quantized: MergedScore, rows: ComparisonRows) -> str:
    """Describes in a sentence how much worse the quantized model is on `rows`."""
    return (
        f"On {rows.description} its loss is {quantized.loss:.4f}, beside {plain.loss:.4f} of "
        f"the unquantized model; KL divergence {quantized.divergence:.2g} a token."
    )


def plan_compressed(
    source: Source,
    target: TargetModel,
    weights: Weights,
    options: ExportOptions,
    title: str,
    log: Callable[[str], object],
) -> CompressedPlan:
    """Plans a folder in which the linear layers, except the output head, are quantized.

    It reads no values. `weights` are those of the unquantized model.

    Raises:
        UserError: No scheme is named, or the model's layers cannot be quantized by it.
    """
    where = str(source.description)
    if target.beside:
        raise UserError(
            f"{where}: {FORMAT}: a vision-language model; its language model alone can be quantized"
        )
    if expert_modules(target.model):
        raise UserError(
            f"{where}: {FORMAT}: a mixture, whose experts are no linear layers in transformers 5"
        )
    keys, is_trained = _choose_scheme(source, options)
    quantizer = make_quantizer(keys, source.compute_dtype if is_trained else None)
    if keys.quantization_aware_training != "fp8-fp8" and not is_installed("torchao"):
        raise UserError(
            f"--quantization: {keys.quantization_aware_training} needs torchao: pip install torchao"
        )
    layers = find_quantizable(target.model)
    group_size = quantizer.scheme.weights.group_size
    for name, layer in layers.items():
        if group_size is not None and layer.in_features % group_size:
            raise UserError(
                f"--group-size: {group_size} does not divide the {layer.in_features} inputs of "
                f"{name}"
            )
    plain = {value.name: value for shard in weights.model for value in shard.values}
    shards = tuple(
        Shard(
            shard.name,
            tuple(
                stored
                for value in shard.values
                for stored in _plan_stored_tensors(value, layers, quantizer)
            ),
        )
        for shard in weights.model
    )
    linear_names = [
        name for name, module in target.model.named_modules() if isinstance(module, nn.Linear)
    ]
    # The layers that are carried over from the base are not quantized either.
    linear_names += [
        name.removesuffix(".weight") for name in weights.account.carried if name.endswith(".weight")
    ]
    config = QuantizationConfig(
        config_groups={"group_0": quantizer.scheme},
        format=infer_module_format(nn.Linear, quantizer.scheme).value,
        quantization_status="compressed",
        ignore=[name for name in linear_names if name not in layers],
    )
    config_json = {
        "quant_method": "compressed-tensors",
        **config.model_dump(mode="json", exclude_none=True),
    }
    return CompressedPlan(
        source,
        replace(target, config_json=target.config_json | {"quantization_config": config_json}),
        replace(weights, model=shards, adapter=None),
        plain,
        quantizer,
        frozenset(layers),
        options,
        title,
    )


def _choose_scheme(source: Source, options: ExportOptions) -> tuple[QuantizationAware, bool]:
    """Chooses the scheme that the user names, else the one that the run was trained for.

    Returns:
        (the scheme, whether the run was trained for it). The second is False if the user sets a
        group size.

    Raises:
        UserError: The user names none, and the run was trained for none.
    """
    trained_keys = {
        key: source.recipe[key]
        for key in ("quantization_aware_training", "qat_group_size")
        if key in source.recipe
    }
    trained = QuantizationAware(**trained_keys)
    name = options["quantization"] or trained.quantization_aware_training
    if name is None:
        raise UserError(f"{FORMAT}: name how with --quantization: one of {', '.join(EXPORTED)}")
    if name == trained.quantization_aware_training and options["group_size"] is None:
        return trained, True
    return QuantizationAware(
        quantization_aware_training=name, qat_group_size=options["group_size"]
    ), False


def _plan_stored_tensors(
    value: Value, layers: Mapping[str, Any], quantizer: Quantizer
) -> list[Value]:
    """Plans the tensors that the files hold of a parameter: codes and scales if it is quantized,
    else `value`.

    `layers`: the quantized layers, by name.
    """
    layer, _, attribute = value.name.rpartition(".")
    if layer not in layers or attribute != "weight":
        return [value]
    height, width = value.shape
    # One row is enough to learn the names, widths and dtypes of the stored tensors.
    sample = quantizer.quantize(torch.zeros(1, width), value.dtype)

    def read_rows(end: str, start: int, stop: int) -> Tensor:
        return quantizer.quantize(value.rows(start, stop), value.dtype)[end]

    planned = [
        Value(f"{layer}.{end}", (height, *tensor.shape[1:]), tensor.dtype, partial(read_rows, end))
        for end, tensor in sample.items()
        if end != SHAPE
    ]
    if SHAPE in sample:
        shape = torch.tensor([height, width])
        planned.append(
            Value(f"{layer}.{SHAPE}", (2,), shape.dtype, lambda start, stop: shape[start:stop])
        )
    return planned
