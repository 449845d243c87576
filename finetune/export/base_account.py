"""What becomes of each tensor in the base's files: exported, converted, tied, carried over, or
named in the card.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from finetune.config.export_formats import EXPORT_FORMATS
from finetune.config.multi_token import (
    count_predicting_layers,
    list_promising_keys,
    promise_no_layers,
)
from finetune.distributed.model_parts import take_language_model
from finetune.errors import UserError
from finetune.export.source import Source
from finetune.export.target import TargetModel, Value, stored_value
from finetune.export.values import dequantized_rows, make_dequantizer
from finetune.files.tensors import ComputedPart, StoredTensor, hash_weights, read_folder
from finetune.models.carried import (
    describe_carried,
    find_carried,
    hash_tensors,
    list_patterns,
    make_prediction_filter,
)
from finetune.models.head_scores import is_left_out
from finetune.models.load import build_on_meta, read_carried_of
from finetune.models.quantized_weights import StoredQuantized, split_quantized
from finetune.models.weights import BoxedTensor, boxes_of_parameters, convert_to_parameters

LISTED = 10  # tensors in an error


@dataclass(frozen=True, slots=True)
class BaseAccount:
    """The base's tensors, and what an export makes of each. Returned by `account_for_base`."""

    where: str = ""  # the base's folder, as errors name it
    # tensor of the base -> those that hold it
    files_of: Mapping[str, frozenset[str]] = field(default_factory=dict)
    carried: Mapping[str, StoredTensor] = field(default_factory=dict)
    quantized: Mapping[str, StoredQuantized] = field(default_factory=dict)  # of `carried`
    left_out: Mapping[str, str] = field(default_factory=dict)  # pattern of names -> why
    sentences: tuple[str, ...] = ()  # for the last lines and the model card
    target: TargetModel | None = None  # with a config that promises what is there

    def refuse_lost(self, exported: Collection[str], card: str) -> None:
        """Raises `UserError` where the `exported` tensors lack one that holds a tensor of the base,
        and the card does not name the latter as left out.
        """
        named = [pattern for pattern in self.left_out if pattern in card]
        present = set(exported)
        lost = []
        for name, holders in self.files_of.items():
            is_exported = bool(holders) and holders <= present
            if not is_exported and not any(fnmatchcase(name, pattern) for pattern in named):
                lost.append(name)
        if lost:
            more = ""
            if len(lost) > LISTED:
                more = f" and {len(lost) - LISTED} more"
            raise UserError(
                f"{self.where}: not exported: the result lacks "
                f"{', '.join(sorted(lost)[:LISTED])}{more}, which the base has; this is a fault of "
                "the export: please report it"
            )


NOTHING_CARRIED = BaseAccount()


def account_for_base(source: Source, target: TargetModel, formats: Collection[str]) -> BaseAccount:
    """Finds what an export of `source` carries over from its base, and what it leaves out.

    Reads no value, but those of which a checkpoint has a fingerprint.
    """
    account, reason = _open_base(source, target)
    target = account.target or target
    rows = [EXPORT_FORMATS[name] for name in formats]
    if account.carried and not any(row.holds_base for row in rows):
        account = _leave_out(account, f"as {rows[0].title} has no place for it")
    replaced = [name for name in account.files_of if is_left_out(target.model, name)]
    reasons = dict.fromkeys(replaced, "as a head of scores stands in its place")
    account = replace(account, left_out={**account.left_out, **reasons})
    class_name = target.class_name
    config = target.config_json
    sentences = list(account.sentences)
    if account.carried:
        sentences.append(describe_carried(account.carried, class_name))
    for why in dict.fromkeys(account.left_out.values()):
        patterns = ", ".join(pattern for pattern, its in account.left_out.items() if its == why)
        sentences.append(f"left out of the base, {why}: {patterns}")
    is_predicting = make_prediction_filter(target.model)
    if count_predicting_layers(config) and not any(map(is_predicting, account.carried)):
        keys = " and ".join(list_promising_keys(config))
        why = next(iter(account.left_out.values()), reason)
        if _keeps_its_layers(target):
            target = replace(target, config_json=promise_no_layers(config))
            sentences.append(f"{keys} is 0 in config.json: {why}")
        else:
            sentences.append(
                f"{keys} stays in config.json, as {class_name} has other layers without it, but "
                f"{why}"
            )
    return replace(account, sentences=tuple(sentences), target=target)


def _open_base(source: Source, target: TargetModel) -> tuple[BaseAccount, str]:
    """The account of `source`, and why it carries nothing over, where that is so."""
    nothing = "the base's files hold no layers for multi-token prediction"
    drop_vision = bool(source.recipe.get("drop_vision"))
    if source.adapter is not None:
        assert source.base is not None, "an adapter is opened with its base"
        carried, quantized = read_carried_of(target.model, source.base, drop_vision)
        return _account(
            source.tensors, str(source.base), target, carried, quantized, drop_vision
        ), nothing
    if not (source.state or source.names_may_be_prefixed):
        carried = find_carried(
            target.model, convert_to_parameters(target.model, source.tensors, str(source.path))
        )
        if carried or source.base_model is None:
            return _account(
                source.tensors, str(source.path), target, carried, {}, drop_vision
            ), nothing
    if source.base_model is None:
        is_random = bool(source.recipe.get("model_config"))
        return (
            BaseAccount(),
            "the model was trained from random weights" if is_random else "its base is not known",
        )
    if source.base is None or not any(source.base.glob("*.safetensors")):
        missing = f"the weights of {source.base_model} are not on this machine"
        gone = f"{missing}; name their folder with --base-model"
        return BaseAccount(sentences=(f"its list of tensors was not compared: {gone}",)), gone
    carried, quantized = read_carried_of(target.model, source.base, drop_vision)
    stored = split_quantized(read_folder(source.base), str(source.base))[0]
    account = _account(stored, str(source.base), target, carried, quantized, drop_vision)
    if not carried or _is_the_trained_one(source, source.base, carried):
        return account, nothing
    other = (
        f"{source.base} holds other values than when the run began; name that base with "
        "--base-model"
    )
    if source.base_is_named:
        return replace(
            account, sentences=(f"warning: {source.base} is not the base that the run began with",)
        ), nothing
    return _leave_out(account, other), other


def plan_carried(
    account: BaseAccount,
    source: Source,
    target: TargetModel,
    dtype: torch.dtype,
    *,
    dtype_is_given: bool,
) -> list[Value]:
    """Plans the tensors of the base that training never touched, as values to write.

    Their dtype is that of the base's files; it is `dtype` where the user named one
    (`dtype_is_given`), or where the files hold them quantized or in parts.
    """
    read_dequantized = make_dequantizer(replace(source, quantized=account.quantized))
    values = []
    for name, stored in account.carried.items():
        is_computed = name in account.quantized or any(
            isinstance(part, ComputedPart) for part in stored.parts
        )
        if name in account.quantized:
            stored_dtype = source.compute_dtype
        else:
            stored_dtype = stored.dtype
        usual_dtype = dtype if dtype_is_given or is_computed else stored_dtype
        written = target.written_dtype(name, stored_dtype, usual_dtype)
        value = stored_value(stored, name, written)
        if name in account.quantized:
            value = replace(value, rows=dequantized_rows(stored, read_dequantized))
        values.append(value)
    return values


def _account(
    stored: Mapping[str, StoredTensor],
    where: str,
    target: TargetModel,
    carried: Mapping[str, StoredTensor],
    quantized: Mapping[str, StoredQuantized],
    drop_vision: bool,
) -> BaseAccount:
    """Finds for each tensor of the base's files the tensors of the export that hold its values."""
    own = take_language_model(stored) if drop_vision else stored
    boxes = boxes_of_parameters(
        target.model, {name: tensor.shape for name, tensor in own.items()}, where
    )
    target = _name_tower_as_published(target, boxes)
    holders: dict[str, set[str]] = {}
    for name, box in target.files.items():
        for part in box.parts:
            holders.setdefault(part.name, set()).add(name)
    files_of = {tensor.name: frozenset[str]() for tensor in stored.values()}
    for parameter, box in boxes.items():
        first = target.tied.get(parameter, parameter)
        for part in box.parts:
            files_of[own[part.name].name] |= holders.get(first, frozenset())
    files_of |= {tensor.name: frozenset({name}) for name, tensor in carried.items()}
    left_out = []
    if drop_vision:
        left_out = sorted(name for name, its in files_of.items() if not its)
    reasons = dict.fromkeys(list_patterns(left_out), "as drop_vision asks")
    account = BaseAccount(where, files_of, carried, quantized, reasons, target=target)
    other_rows = _find_other_rows(target, boxes, carried)
    if other_rows is None:
        return account
    return _leave_out(account, other_rows)


def _name_tower_as_published(target: TargetModel, boxes: Mapping[str, BoxedTensor]) -> TargetModel:
    """`target` with the names of the base's files for the tensors of a tower, which is never
    trained.

    transformers may write others since the base was published (5.23 does for Gemma 3), which
    servers do not know.

    boxes: For each parameter the tensors of the base's files that it is made of.
    """
    files = {}
    for name, box in target.files.items():
        parameter = box.parts[0].name
        origin = boxes.get(parameter)
        if (
            parameter in target.beside
            and origin is not None
            and len(box.parts) == len(origin.parts) == 1
            and box.shape == origin.shape
        ):
            files[origin.parts[0].name] = box
        else:
            files[name] = box
    return replace(target, files=files)


def _is_the_trained_one(source: Source, base: Path, carried: Mapping[str, StoredTensor]) -> bool:
    """Whether `base` still holds what a full run began with, as far as its checkpoint knows."""
    inputs = source.state.get("inputs") or {}
    if "base" in inputs:
        return bool(hash_weights(base) == inputs["base"])
    return "carried" not in inputs or bool(hash_tensors(carried) == inputs["carried"])


def _find_other_rows(
    target: TargetModel, boxes: Mapping[str, BoxedTensor], carried: Mapping[str, StoredTensor]
) -> str | None:
    """Why nothing is carried over where some of it has a row for each token of the base, and the
    model has more.
    """
    embedding: Any = target.model.get_input_embeddings()  # type: ignore[operator]
    name = next(
        f"{name}.weight" for name, module in target.model.named_modules() if module is embedding
    )
    name = target.tied.get(name, name)
    before = boxes[name].shape[0] if name in boxes else 0
    after = target.shapes[name][0]
    if before == after or not any(tensor.shape[:1] == (before,) for tensor in carried.values()):
        return None
    return f"it has a row for each of the base's {before:,} tokens, and the model {after:,}"


def _leave_out(account: BaseAccount, why: str) -> BaseAccount:
    names = [tensor.name for tensor in account.carried.values()]
    reasons = {**account.left_out, **dict.fromkeys(list_patterns(names), why)}
    return replace(account, carried={}, quantized={}, left_out=reasons)


def _keeps_its_layers(target: TargetModel) -> bool:
    """Whether the class has the same tensors where the config promises no layers for multi-token
    prediction.
    """
    config: Any = target.model.config
    try:
        other = build_on_meta(
            type(config).from_dict(promise_no_layers(target.config_json)), torch.float32
        )
    except Exception:  # each family reads its config in its own way
        return False
    return {name: tensor.shape for name, tensor in other.state_dict().items()} == {
        name: tensor.shape for name, tensor in target.model.state_dict().items()
    }
