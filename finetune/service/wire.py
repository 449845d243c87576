"""The protocol buffers of the Tinker API: requests with tensors, and answers with many numbers.

`MESSAGES` describes the messages (tinker_public.proto of SDK 0.38). Google's library reads and
writes them.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import accumulate, groupby
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from finetune.errors import UserError
from finetune.rollout.engine import Ended, Sampled

PROTOBUF = "application/x-protobuf"

# Message -> its fields as "number name type". "*" marks a repeated field. "map" marks a map from
# strings to the type.
MESSAGES: Mapping[str, Sequence[str]] = {
    "SparseCsr": ("1 values bytes", "2 crow_indices bytes", "3 col_indices bytes"),
    "Tensor": ("1 dense bytes", "2 sparse_csr SparseCsr", "3 dtype int32", "4 shape int64*"),
    "BatchedTensor": (
        "1 data bytes",
        "2 offsets bytes",
        "3 dtype int32",
        "4 trailing_shape int64*",
    ),
    "ArrayRecord": ("1 type_tag string", "2 fields BatchedTensor map", "3 num_datums int64"),
    "ForwardBackwardOutput": (
        "1 loss_fn_output_type string",
        "2 loss_fn_outputs ArrayRecord*",
        "3 metrics double map",
    ),
    "SampledSequence": ("1 stop_reason int32", "2 tokens bytes", "3 logprobs bytes"),
    "TopkLogprobs": ("1 token_ids bytes", "2 logprobs bytes", "3 k uint32", "4 length uint32"),
    "SampleResponse": (
        "1 sequences SampledSequence*",
        "2 prompt_logprobs bytes",
        "3 topk_prompt_logprobs TopkLogprobs",
    ),
    "EncodedTextChunk": ("1 tokens bytes",),
    "Chunk": ("1 encoded_text EncodedTextChunk",),
    "Datum": ("1 model_input Chunk*", "2 loss_fn_inputs Tensor map"),
    "LossConfigValue": ("1 number double", "2 text string"),
    "ForwardBackwardRequest": (
        "1 model_id string",
        "2 seq_id int32",
        "3 data Datum*",
        "4 loss_fn string",
        "6 forward_only bool",
        "7 loss_fn_config_v2 LossConfigValue map",
    ),
}
# The protocol's numbers of dtypes.
FLOAT32 = 1
INT64 = 2
INT32 = 3
DTYPES: Mapping[int, "np.dtype[Any]"] = {
    FLOAT32: np.dtype("<f4"),
    INT64: np.dtype("<i8"),
    INT32: np.dtype("<i4"),
}
MOST_SPARSE_NUMBERS = 2**24  # in a request's sparse tensors, zeros included; 64 MiB if dense
NO_TOKEN = (
    0.0,
    -99999.0,
)  # (id, log-probability) at a prompt's first token, which has no likeliest


class TopTokens(NamedTuple):
    """The likeliest tokens at each token of a prompt after the first, for one prompt."""

    rows: Sequence[Sequence[Sequence[float]]]  # [tokens][width]: (id, log-probability)
    width: int


@cache
def _classes() -> dict[str, Callable[..., Any]]:
    """Makes a class for each message of MESSAGES: name -> class.

    protobuf makes classes from a file descriptor, which is otherwise compiled from a .proto file.
    """
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    field_type: Any = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="finetune_service.proto", package="service", syntax="proto3"
    )

    def add_field(message: Any, number: str, name: str, kind: str, *, is_repeated: bool) -> None:
        is_entry = kind.startswith(message.name)  # the type of a map's entries, below
        is_message = kind in MESSAGES or is_entry
        field = message.field.add(name=name, number=int(number))
        field.label = field_type.LABEL_REPEATED if is_repeated else field_type.LABEL_OPTIONAL
        if is_message:
            field.type = field_type.TYPE_MESSAGE
            field.type_name = f".service.{kind}"
        else:
            field.type = getattr(field_type, f"TYPE_{kind.upper()}")

    for title, fields in MESSAGES.items():
        message = file.message_type.add(name=title)
        for text in fields:
            number, name, kind, *is_map = text.split()
            if is_map:  # protobuf's form of a map: a repeated field of entries with key and value
                entry_name = f"{name.title().replace('_', '')}Entry"
                entry = message.nested_type.add(name=entry_name)
                entry.options.map_entry = True
                add_field(entry, "1", "key", "string", is_repeated=False)
                add_field(entry, "2", "value", kind, is_repeated=False)
                kind = f"{title}.{entry_name}*"
            add_field(message, number, name, kind.rstrip("*"), is_repeated=kind.endswith("*"))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        title: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"service.{title}"))
        for title in MESSAGES
    }


def read_forward_backward(body: bytes) -> dict[str, Any]:
    """Reads a ForwardBackwardRequest as the fields of `endpoints.ForwardBackward`.

    If datums cannot be read, `problem` says why, and `data` is empty. The request is read all the
    same, because the model's next request waits for it.

    Raises `UserError` for a body that is no such message.
    """
    from google.protobuf.message import DecodeError

    message = _classes()["ForwardBackwardRequest"]()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise UserError(f"the body is no ForwardBackwardRequest: {error}") from None
    data = []
    problem = None
    try:
        _check_sparse_size(message.data)
        data = [_read_datum(datum, index) for index, datum in enumerate(message.data)]
    except UserError as error:
        problem = str(error)
    return {
        "model_id": message.model_id,
        "seq_id": message.seq_id,
        "forward_only": message.forward_only,
        "loss_fn": message.loss_fn,
        "options": {
            name: value.text or value.number for name, value in message.loss_fn_config_v2.items()
        },
        "data": data,
        "problem": problem,
    }


def _check_sparse_size(data: Sequence[Any]) -> None:
    """Raises `UserError` if the sparse tensors of a request need too much memory as dense ones."""
    numbers = 0
    for datum in data:
        for tensor in datum.loss_fn_inputs.values():
            if tensor.HasField("sparse_csr"):
                numbers += abs(prod(tensor.shape))
    if numbers > MOST_SPARSE_NUMBERS:
        raise UserError(
            f"data: the sparse tensors have {numbers} numbers, zeros included, where "
            f"{MOST_SPARSE_NUMBERS} are served; send fewer datums at once"
        )


def _read_datum(datum: Any, index: int) -> dict[str, Any]:
    """Reads a Datum message as a dict: `tokens`, and `inputs` by name.

    index: The index of the datum in the request, for messages.
    """
    tokens: list[int] = []
    for chunk in datum.model_input:
        if not chunk.HasField("encoded_text"):
            raise UserError(
                f"data[{index}].model_input: images and sounds are not served; give tokens"
            )
        tokens += _read_numbers(chunk.encoded_text.tokens, DTYPES[INT32]).tolist()
    inputs = {name: _read_tensor(each, name) for name, each in datum.loss_fn_inputs.items()}
    return {"tokens": tokens, "inputs": inputs}


def _read_tensor(tensor: Any, name: str) -> list[Any]:
    """Reads an input of the loss: for each token a number, or a list of numbers."""
    if tensor.dtype not in DTYPES or len(tensor.shape) > 2:
        raise UserError(
            f"loss_fn_inputs: {name}: give a number for each token, or a row of several, as "
            "float32 or int64"
        )
    if tensor.HasField("sparse_csr"):
        numbers = _read_sparse(tensor, name)
    else:
        numbers = _read_numbers(tensor.dense, DTYPES[tensor.dtype])
    if len(tensor.shape) == 2:
        try:
            numbers = numbers.reshape(tensor.shape)
        except ValueError:
            raise UserError(
                f"loss_fn_inputs: {name}: {numbers.size} numbers do not have the shape "
                f"{[*tensor.shape]}"
            ) from None
    listed: list[Any] = numbers.tolist()
    return listed


def _read_sparse(tensor: Any, name: str) -> NDArray[Any]:
    """Reads a tensor of compressed rows (CSR) as a dense array: [rows, columns].

    Raises `UserError` for indices that do not fit the shape.
    """
    values = _read_numbers(tensor.sparse_csr.values, DTYPES[tensor.dtype])
    # of each row: where its values begin and end in `values`
    borders = _read_numbers(tensor.sparse_csr.crow_indices, DTYPES[INT64])
    value_columns = _read_numbers(tensor.sparse_csr.col_indices, DTYPES[INT64])
    rows, columns = tensor.shape if len(tensor.shape) == 2 else (0, 0)
    has_borders = 0 < rows == len(borders) - 1 and borders[0] == 0
    if has_borders:
        has_borders = bool((np.diff(borders) >= 0).all())
        has_borders &= borders[-1] == len(value_columns) == len(values)
    has_columns = bool(((value_columns >= 0) & (value_columns < columns)).all())
    if not (has_borders and has_columns):
        raise UserError(f"loss_fn_inputs: {name}: is no sparse tensor of compressed rows")
    dense = np.zeros((rows, columns), values.dtype)
    value_rows = np.repeat(np.arange(rows), np.diff(borders))
    dense[value_rows, value_columns] = values
    return dense


def _read_numbers(raw: bytes, dtype: "np.dtype[Any]") -> NDArray[Any]:
    """Reads bytes as an array of `dtype`. Raises `UserError` for a remainder of bytes."""
    if len(raw) % dtype.itemsize:
        raise UserError(f"{len(raw)} bytes are no whole number of {dtype.name}")
    return np.frombuffer(raw, dtype)


def write_forward_backward(log_probabilities: Sequence[Sequence[Any]], loss: float) -> bytes:
    """Writes a ForwardBackwardOutput.

    Args:
        log_probabilities: For each datum [tokens] or [tokens, targets].
        loss: The loss, summed over all datums.
    """
    values = [np.array(each, np.float32) for each in log_probabilities]
    # A record has one shape for all tokens: adjacent datums with as many targets share a record.
    by_targets = groupby(values, lambda each: each.shape[1:])
    records = [_make_record([*datums]) for _, datums in by_targets]
    message = _classes()["ForwardBackwardOutput"](
        loss_fn_output_type="ArrayRecord", loss_fn_outputs=records, metrics={"loss:sum": loss}
    )
    raw: bytes = message.SerializeToString()
    return raw


def _make_record(values: Sequence[NDArray[np.float32]]) -> Any:
    """Makes an ArrayRecord of datums whose tokens have the same number of targets.

    values: The log-probabilities of each datum: [tokens] or [tokens, targets].
    """
    offsets = np.array([0, *accumulate(each.nbytes for each in values)], np.int64)
    tensor = _classes()["BatchedTensor"](
        data=b"".join(each.tobytes() for each in values),
        offsets=offsets.tobytes(),
        dtype=FLOAT32,
        trailing_shape=values[0].shape[1:],
    )
    return _classes()["ArrayRecord"](
        type_tag="ArrayRecord", fields={"logprobs": tensor}, num_datums=len(values)
    )


def write_samples(
    sampled: Sequence[Sampled], prompt: Sequence[float] | None, top: TopTokens | None
) -> bytes:
    """Writes a SampleResponse.

    Args:
        sampled: The completions.
        prompt: The log-probabilities of the prompt's tokens after the first; None: not asked for.
        top: The likeliest tokens at the same tokens; None: not asked for.
    """
    sequence = _classes()["SampledSequence"]
    message = _classes()["SampleResponse"](
        sequences=[
            sequence(
                stop_reason=int(each.ended is Ended.CUT),  # 1: at its length
                tokens=np.array(each.token_ids, np.int32).tobytes(),
                logprobs=np.array(each.log_probabilities, np.float32).tobytes(),
            )
            for each in sampled
        ]
    )
    if prompt is not None:  # the API has a number at the first token too: nan
        message.prompt_logprobs = np.array([np.nan, *prompt], np.float32).tobytes()
    if top is not None:
        table = np.array([[NO_TOKEN] * top.width, *top.rows])
        message.topk_prompt_logprobs.token_ids = table[..., 0].astype(np.int32).tobytes()
        message.topk_prompt_logprobs.logprobs = table[..., 1].astype(np.float32).tobytes()
        message.topk_prompt_logprobs.k = top.width
        message.topk_prompt_logprobs.length = len(table)
    raw: bytes = message.SerializeToString()
    return raw
