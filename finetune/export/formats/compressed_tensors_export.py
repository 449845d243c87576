"""compressed-tensors, which vLLM, SGLang and transformers open: linear layers in 8 or 4 bits, and
what that costs.

Codes and scales of whole numbers are torchao's, as in quantization-aware training; those of FP8,
and the layout of both in the files, are the compressed-tensors package's, whose own functions also
read the result back.
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
from finetune.config.quantization import EXPORTED, SCHEMES
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
SHAPE = "weight_shape"  # of a packed weight: the only part that is no row of it


@dataclass(frozen=True, slots=True)
class Quantizer:
    """How each weight is quantized, a few rows at a time."""

    keys: QuantizationAware
    scheme: QuantizationScheme  # the same in the package's terms
    compressor: Any  # the package's
    dtype: torch.dtype | None  # in which scales are found; None: that of the weight

    def parts(self, rows: Tensor, written: torch.dtype) -> dict[str, Tensor]:
        """Returns the stored tensors of `rows` [rows, in], by the ends of their names."""
        rows = rows.to(self.dtype or written)
        if self.keys.quantization_aware_training == "mxfp4":
            scale = quantize_to_mxfp4(rows)[0].float()
            given = {"weight": round_to_mxfp4(rows), "weight_scale": scale}
            return dict(self.compressor.compress(given, self.scheme))
        if self.scheme.weights.type == "float":
            scale, _ = calculate_qparams(
                *torch.aminmax(rows, dim=-1, keepdim=True), self.scheme.weights
            )
            values = rows
        else:
            codes, scale = self._round(rows)
            # The codes again, whatever the package's division rounds: an exact multiple of the
            # scale is no tie.
            values = codes.float() * scale.float().repeat_interleave(
                rows.shape[-1] // scale.shape[-1], -1
            )
            scale = scale.float()
        parts: dict[str, Tensor] = self.compressor.compress(
            {"weight": values, "weight_scale": scale}, self.scheme
        )
        return parts | {"weight_scale": scale.to(written)}

    def _round(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        from torchao.quantization import IntxUnpackedToInt8Tensor
        from torchao.quantization.quant_primitives import MappingType

        block = (1, self.keys.qat_group_size or rows.shape[-1])
        dtype = getattr(torch, f"int{self.scheme.weights.num_bits}")
        made = IntxUnpackedToInt8Tensor.from_hp(
            rows, block, dtype, mapping_type=MappingType.SYMMETRIC
        )
        return made.qdata, made.scale

    def restore(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The rows that a reader computes with, in float32, by the package."""
        wide = dict(parts)
        if parts["weight_scale"].is_floating_point():
            wide["weight_scale"] = parts["weight_scale"].float()
        restored: Tensor = self.compressor.decompress(wide, self.scheme)["weight"]
        return restored.float()

    def round_inputs(self, inputs: Tensor) -> Tensor:
        """Rounds a layer's inputs as a reader does, by the package."""
        args = self.scheme.input_activations
        if args is None:
            return inputs
        rounded: Tensor = fake_quantize(
            inputs, *compute_dynamic_scales_and_zp(inputs, args, nn.Identity()), args
        )
        return rounded


def make_quantizer(keys: QuantizationAware, dtype: torch.dtype | None) -> Quantizer:
    """The quantizer of a scheme in EXPORTED."""
    assert keys.quantization_aware_training is not None
    name = keys.quantization_aware_training
    if name == "mxfp4":
        made = preset_name_to_scheme("MXFP4", ["Linear"])
        return _quantize_by(keys, made, dtype)
    scheme = SCHEMES[name]
    group = keys.qat_group_size
    kind = "float" if scheme.is_float else "int"
    strategy = (
        {"strategy": "channel"} if group is None else {"strategy": "group", "group_size": group}
    )
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
    made = QuantizationScheme(targets=["Linear"], weights=weights, input_activations=inputs)
    return _quantize_by(keys, made, dtype)


def _quantize_by(
    keys: QuantizationAware, scheme: QuantizationScheme, dtype: torch.dtype | None
) -> Quantizer:
    name = infer_module_format(nn.Linear, scheme)
    return Quantizer(keys, scheme, BaseCompressor.get_value_from_registry(name.value), dtype)


@dataclass(frozen=True, slots=True)
class CompressedPlan:
    """The folder that is written. Returned by `plan_compressed`."""

    source: Source
    target: TargetModel  # with the quantization in its config
    weights: Weights
    plain: Mapping[str, Value]  # by the names of the model: what an unquantized export holds
    quantizer: Quantizer
    layers: frozenset[str]  # the quantized ones
    options: ExportOptions
    title: str

    @property
    def byte_count(self) -> int:
        return self.weights.byte_count

    def write(self, folder: Path, logits: CheckpointLogits | None) -> list[str]:
        """Writes the folder into `folder`, measures it beside the unquantized model, and returns a
        line on both.
        """
        if logits is not None:
            logits.result()  # computed on the same model
        if is_alone(COMPRESSED, self.options):
            where = folder
        else:
            where = folder / COMPRESSED
        where.mkdir(exist_ok=True)
        # that of an export of this format alone, without numbers
        (where / CARD_FILE).unlink(missing_ok=True)
        options = replace(self.options, formats=("safetensors",))
        write_metadata(where, self.source, self.target, self.weights, self.title, options)
        make_files(where, self.weights)
        written = write_weights(where, self.weights)
        files = WrittenFiles(where, tuple(shard.name for shard in self.weights.model))
        if self.options.verify:
            compare_values(where, self.weights, written, read_digests(files))
        cost = self._measure(files)
        files.close()
        name = self.quantizer.keys.quantization_aware_training
        text = f"The linear layers but the output head are quantized ({name}). {cost}"
        card = insert_section((where / CARD_FILE).read_text(encoding="utf-8"), "Quantization", text)
        replace_file(where / CARD_FILE, card)
        if self.options.verify:
            verdict = "verified: every value"
        else:
            verdict = "not verified"
        if where == folder:
            place = self.weights.model[0].name
        else:
            place = COMPRESSED
        return [f"{place}: {disk_size(self.byte_count)} in {name}, {verdict}. {cost}"]

    def _measure(self, files: WrittenFiles) -> str:
        """The loss beside the unquantized model's, on rows of the run.

        Raises `UserError` if it is far more.
        """
        model: Any = self.target.model
        parameters = sum(p.numel() for p in model.parameters())
        vocabulary = model.config.get_text_config().vocab_size
        rows = read_comparison_rows(self.source.run, parameters, vocabulary)
        most = self.options["max_loss_increase"]
        if rows is None:
            if most is not None:
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
        if most is not None and not quantized.loss - plain.loss <= most:
            raise UserError(
                f"not exported: quantized, the loss is {quantized.loss:.4f} instead of "
                f"{plain.loss:.4f}, more than --max-loss-increase {most:g} allows"
            )
        return describe_cost(plain, quantized, rows)

    def _read_back(self, files: WrittenFiles, name: str, start: int, stop: int) -> Tensor:
        name = self.target.tied.get(name, name)
        layer = name.removesuffix(".weight")
        if layer not in self.layers:
            return files.read(name, start, stop, torch.clone)
        ends = self.quantizer.compressor.compression_param_names(self.quantizer.scheme)
        parts = {
            end: files.read(f"{layer}.{end}", start, stop, torch.clone)
            for end in ends
            if end != SHAPE
        }
        if SHAPE in ends:
            parts[SHAPE] = torch.tensor([stop - start, self.target.shapes[name][1]])
        return self.quantizer.restore(parts)

    def _round_inputs(self, layer: str, inputs: Tensor) -> Tensor:
        if layer in self.layers:
            return self.quantizer.round_inputs(inputs)
        return inputs


def describe_cost(plain: MergedScore, quantized: MergedScore, rows: ComparisonRows) -> str:
    """Describes the measured cost in a sentence."""
    kind = "held-out" if rows.held_out else "training"
    return (
        f"On {len(rows)} {kind} rows ({rows.labeled_tokens:,} labeled tokens) its loss is "
        f"{quantized.loss:.4f}, beside {plain.loss:.4f} of the unquantized model; KL divergence "
        f"{quantized.divergence:.2g} a token."
    )


def plan_compressed(
    source: Source,
    target: TargetModel,
    weights: Weights,
    options: ExportOptions,
    title: str,
    log: Callable[[str], object],
) -> CompressedPlan:
    """Plans the files. Reads no values.

    Raises `UserError` where no scheme is named, or the model's layers cannot be quantized by it.
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
    group = quantizer.scheme.weights.group_size
    for name, layer in layers.items():
        if group is not None and layer.in_features % group:
            raise UserError(
                f"--group-size: {group} does not divide the {layer.in_features} inputs of {name}"
            )
    plain = {value.name: value for shard in weights.model for value in shard.values}
    shards = tuple(
        Shard(
            shard.name,
            tuple(part for value in shard.values for part in _split(value, layers, quantizer)),
        )
        for shard in weights.model
    )
    ignored = [
        name for name, module in target.model.named_modules() if isinstance(module, nn.Linear)
    ]
    ignored += [
        name.removesuffix(".weight") for name in weights.account.carried if name.endswith(".weight")
    ]
    config = QuantizationConfig(
        config_groups={"group_0": quantizer.scheme},
        format=infer_module_format(nn.Linear, quantizer.scheme).value,
        quantization_status="compressed",
        ignore=[name for name in ignored if name not in layers],
    )
    described = {
        "quant_method": "compressed-tensors",
        **config.model_dump(mode="json", exclude_none=True),
    }
    return CompressedPlan(
        source,
        replace(target, config_json=target.config_json | {"quantization_config": described}),
        replace(weights, model=shards, adapter=None),
        plain,
        quantizer,
        frozenset(layers),
        options,
        title,
    )


def _choose_scheme(source: Source, options: ExportOptions) -> tuple[QuantizationAware, bool]:
    """The scheme that was asked for, else that of the training; and whether the run was trained for
    it.
    """
    trained = {
        key: source.recipe[key]
        for key in ("quantization_aware_training", "qat_group_size")
        if key in source.recipe
    }
    own = QuantizationAware(**trained)
    name = options["quantization"] or own.quantization_aware_training
    if name is None:
        raise UserError(f"{FORMAT}: name how with --quantization: one of {', '.join(EXPORTED)}")
    if name == own.quantization_aware_training and options["group_size"] is None:
        return own, True
    return QuantizationAware(
        quantization_aware_training=name, qat_group_size=options["group_size"]
    ), False


def _split(value: Value, layers: Mapping[str, Any], quantizer: Quantizer) -> list[Value]:
    """Splits one tensor into those that the files hold."""
    layer, _, end = value.name.rpartition(".")
    if layer not in layers or end != "weight":
        return [value]
    height, width = value.shape
    sample = quantizer.parts(torch.zeros(1, width), value.dtype)

    def rows(part: str, start: int, stop: int) -> Tensor:
        return quantizer.parts(value.rows(start, stop), value.dtype)[part]

    made = [
        Value(f"{layer}.{part}", (height, *tensor.shape[1:]), tensor.dtype, partial(rows, part))
        for part, tensor in sample.items()
        if part != SHAPE
    ]
    if SHAPE in sample:
        shape = torch.tensor([height, width])
        made.append(
            Value(f"{layer}.{SHAPE}", (2,), shape.dtype, lambda start, stop: shape[start:stop])
        )
    return made
