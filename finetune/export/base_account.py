"""Accounts for every tensor in the base's files: no export loses one without a word.

A tensor of the base is part of a tensor of the model (maybe converted or tied), or carried over
unchanged since the model has no parameter for it, or left out and named in the card.
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
from finetune.distributed.model_parts import name_of, take_language_model
from finetune.errors import UserError
from finetune.export.source import Source
from finetune.export.target import TargetModel, Value, stored_value
from finetune.export.values import dequantized_rows, make_dequantizer
from finetune.files.tensors import StoredTensor, hash_weights, read_folder
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

LISTED = 10  # the most tensors that an error names


@dataclass(frozen=True, slots=True)
class BaseAccount:
    """The base's tensors, and what an export makes of each. Returned by `account_for_base`."""

    where: str = ""  # the base's folder, as errors name it
    # name of a tensor of the base -> names of the exported tensors that hold its values
    exported_of: Mapping[str, frozenset[str]] = field(default_factory=dict)
    # the base's tensors that the model has no parameter for, and the export copies
    carried: Mapping[str, StoredTensor] = field(default_factory=dict)
    # the tensors of `carried` that are stored quantized
    quantized: Mapping[str, StoredQuantized] = field(default_factory=dict)
    # pattern of names of the base's tensors that are not exported -> why not
    left_out: Mapping[str, str] = field(default_factory=dict)
    sentences: tuple[str, ...] = ()  # for the last lines and the model card
    # the target with the names and the config that suit the account; None in NOTHING_CARRIED
    target: TargetModel | None = None

    def refuse_lost(self, exported: Collection[str], card: str) -> None:
        """Raises `UserError` if a tensor of the base is neither exported nor named in the card.

        Args:
            exported: The names of the exported tensors.
            card: The model card's text, which must hold the patterns of `left_out`.
        """
        patterns_in_card = [pattern for pattern in self.left_out if pattern in card]
        present = set(exported)
        lost = []
        for name, holders in self.exported_of.items():
            is_exported = bool(holders) and holders <= present
            if not is_exported and not any(
                fnmatchcase(name, pattern) for pattern in patterns_in_card
            ):
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

    It reads values only to compare them with a checkpoint's fingerprint of the base.
    """
    account, reason = _open_base(source, target)
    target = account.target or target
    rows = [EXPORT_FORMATS[name] for name in formats]
    if account.carried and not any(row.holds_base for row in rows):
        account = _leave_out(account, f"as {rows[0].title} has no place for it")
    old_head = [name for name in account.exported_of if is_left_out(target.model, name)]
    reasons = dict.fromkeys(old_head, "as a head of scores stands in its place")
    account = replace(account, left_out={**account.left_out, **reasons})
    class_name = target.class_name
    config = target.config_json
    sentences = list(account.sentences)
    if account.carried:
        sentences.append(describe_carried(account.carried, class_name))
    for why in dict.fromkeys(account.left_out.values()):
        patterns = ", ".join(
            pattern for pattern, reason_of in account.left_out.items() if reason_of == why
        )
        sentences.append(f"left out of the base, {why}: {patterns}")
    is_predicting = make_prediction_filter(target.model)
    # The config promises layers for multi-token prediction, and none is carried over.
    if count_predicting_layers(config) and not any(map(is_predicting, account.carried)):
        keys = " and ".join(list_promising_keys(config))
        why = next(iter(account.left_out.values()), reason)
        if _is_same_without_promise(target):
            target = replace(target, config_json=promise_no_layers(config))
            sentences.append(f"{keys} is 0 in config.json: {why}")
        else:
            sentences.append(
                f"{keys} stays in config.json, as {class_name} has other layers without it, but "
                f"{why}"
            )
    return replace(account, sentences=tuple(sentences), target=target)


def _open_base(source: Source, target: TargetModel) -> tuple[BaseAccount, str]:
    """Makes the account of `source` with the base's files, if they are known and on this machine.

    Returns:
        (the account, why it carries over no layers for multi-token prediction). The second means
        nothing if the account does carry some.
    """
    no_layers = "the base's files hold no layers for multi-token prediction"
    drop_vision = bool(source.recipe.get("drop_vision"))
    if source.adapter is not None:
        assert source.base is not None, "an adapter is opened with its base"
        carried, quantized = read_carried_of(target.model, source.base, drop_vision)
        account = _make_account(
            source.tensors, str(source.base), target, carried, quantized, drop_vision
        )
        return account, no_layers
    # A plain Hugging Face folder: it may hold the tensors to carry over, else its base may.
    if not (source.state or source.names_may_be_prefixed):
        carried = find_carried(
            target.model, convert_to_parameters(target.model, source.tensors, str(source.path))
        )
        if carried or source.base_model is None:
            account = _make_account(
                source.tensors, str(source.path), target, carried, {}, drop_vision
            )
            return account, no_layers
    if source.base_model is None:
        if source.recipe.get("model_config"):
            return BaseAccount(), "the model was trained from random weights"
        return BaseAccount(), "its base is not known"
    if source.base is None or not any(source.base.glob("*.safetensors")):
        missing = f"the weights of {source.base_model} are not on this machine"
        reason = f"{missing}; name their folder with --base-model"
        return BaseAccount(sentences=(f"its list of tensors was not compared: {reason}",)), reason
    carried, quantized = read_carried_of(target.model, source.base, drop_vision)
    stored, _ = split_quantized(read_folder(source.base), str(source.base))
    account = _make_account(stored, str(source.base), target, carried, quantized, drop_vision)
    if not carried or _is_the_trained_one(source, source.base, carried):
        return account, no_layers
    if source.base_is_named:
        warning = f"warning: {source.base} is not the base that the run began with"
        return replace(account, sentences=(warning,)), no_layers
    reason = (
        f"{source.base} holds other values than when the run began; name that base with "
        "--base-model"
    )
    return _leave_out(account, reason), reason


def plan_carried(
    account: BaseAccount,
    source: Source,
    target: TargetModel,
    dtype: torch.dtype,
    *,
    dtype_is_given: bool,
) -> list[Value]:
    """Plans the carried tensors of `account` as values to write.

    A tensor keeps the dtype of the base's files. It gets `dtype` if the user named one
    (`dtype_is_given`), or if it is computed from what the files hold, such as by dequantizing.
    """
    read_dequantized = make_dequantizer(replace(source, quantized=account.quantized))
    values = []
    for name, stored in account.carried.items():
        is_computed = name in account.quantized or stored.compute is not None
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


def _make_account(
    stored: Mapping[str, StoredTensor],
    where: str,
    target: TargetModel,
    carried: Mapping[str, StoredTensor],
    quantized: Mapping[str, StoredQuantized],
    drop_vision: bool,
) -> BaseAccount:
    """Finds for each tensor of the base's files the tensors of the export that hold its values.

    Args:
        stored: The tensors of the base's files.
        where: The base's folder, as errors name it.
        target: The model to write.
        carried: The tensors that the export carries over.
        quantized: The tensors of `carried` that are stored quantized.
        drop_vision: Whether the model is the language model of a vision-language base.
    """
    # By the names that the model's class knows; each tensor keeps its name in the files.
    model_tensors = take_language_model(stored) if drop_vision else stored
    boxes = boxes_of_parameters(
        target.model, {name: tensor.shape for name, tensor in model_tensors.items()}, where
    )
    target = _name_tower_as_published(target, boxes)
    holders_of: dict[str, set[str]] = {}  # parameter -> exported tensors that hold its values
    for name, box in target.files.items():
        for part in box.parts:
            holders_of.setdefault(part.name, set()).add(name)
    exported_of = {tensor.name: frozenset[str]() for tensor in stored.values()}
    for parameter, box in boxes.items():
        first = target.tied.get(parameter, parameter)
        for part in box.parts:
            exported_of[model_tensors[part.name].name] |= holders_of.get(first, frozenset())
    exported_of |= {tensor.name: frozenset({name}) for name, tensor in carried.items()}
    left_out = []
    if drop_vision:
        left_out = sorted(name for name, holders in exported_of.items() if not holders)
    reasons = dict.fromkeys(list_patterns(left_out), "as drop_vision asks")
    account = BaseAccount(where, exported_of, carried, quantized, reasons, target=target)
    misfit = _find_vocabulary_misfit(target, boxes, carried)
    if misfit is None:
        return account
    return _leave_out(account, misfit)


def _name_tower_as_published(target: TargetModel, boxes: Mapping[str, BoxedTensor]) -> TargetModel:
    """Returns `target` with the names of the base's files for the tensors of a vision tower.

    A newer transformers may write other names (5.23 does for Gemma 3), which servers do not know.
    Only a tensor that is a whole tensor of the base gets the base's name.

    Args:
        target: The model to write.
        boxes: For each parameter, the tensors of the base's files that fill it.
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
            files[name] = box  # keeps the name that transformers writes
    return replace(target, files=files)


def _is_the_trained_one(source: Source, base: Path, carried: Mapping[str, StoredTensor]) -> bool:
    """Whether `base` still holds the values that a full run began with.

    The checkpoint has a hash of all weights, or only of the carried tensors; True if it has none.
    """
    inputs = source.state.get("inputs") or {}
    if "base" in inputs:
        return bool(hash_weights(base) == inputs["base"])
    return "carried" not in inputs or bool(hash_tensors(carried) == inputs["carried"])


def _find_vocabulary_misfit(
    target: TargetModel, boxes: Mapping[str, BoxedTensor], carried: Mapping[str, StoredTensor]
) -> str | None:
    """Finds out whether the carried tensors fit another number of tokens than the model has.

    That is so if the model's embedding has not as many rows as the base's, and a carried tensor has
    as many rows as the base's. Returns why nothing can be carried over then; None if all fits.
    """
    embedding: Any = target.model.get_input_embeddings()  # type: ignore[operator]
    embedding_name = f"{name_of(target.model, embedding)}.weight"
    name = target.tied.get(embedding_name, embedding_name)  # of the stored tensor
    base_tokens = boxes[name].shape[0] if name in boxes else 0
    model_tokens = target.shapes[name][0]
    is_by_token = any(tensor.shape[:1] == (base_tokens,) for tensor in carried.values())
    if base_tokens == model_tokens or not is_by_token:
        return None
    return (
        f"it has a row for each of the base's {base_tokens:,} tokens, and the model "
        f"{model_tokens:,}"
    )


def _leave_out(account: BaseAccount, why: str) -> BaseAccount:
    """Returns `account` with nothing carried over: the carried tensors are left out for `why`."""
    names = [tensor.name for tensor in account.carried.values()]
    reasons = {**account.left_out, **dict.fromkeys(list_patterns(names), why)}
    return replace(account, carried={}, quantized={}, left_out=reasons)


def _is_same_without_promise(target: TargetModel) -> bool:
    """Whether the class has the same tensors with a config that promises no layers for multi-token
    prediction. False if the class rejects such a config.
    """
    config: Any = target.model.config
    try:
        model = build_on_meta(
            type(config).from_dict(promise_no_layers(target.config_json)), torch.float32
        )
    except Exception:  # each family reads its config in its own way
        return False
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    target_shapes = {name: tensor.shape for name, tensor in target.model.state_dict().items()}
    return shapes == target_shapes
