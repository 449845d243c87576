"""Protocol buffers of the Tinker API: requests with tensors, and answers with many numbers.

The messages are described here by their numbers and names (tinker_public.proto of SDK 0.38), and
read and written by Google's library.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np

from finetune.errors import UserError
from finetune.rollout.engine import Ended, Sampled

PROTOBUF = "application/x-protobuf"

# Of each message its fields, "number name type"; "*": several, "map": by a name.
MESSAGES: Mapping[str, Sequence[str]] = {
    "SparseCsr": ("1 values bytes",),
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
    "SampleResponse": ("1 sequences SampledSequence*", "2 prompt_logprobs bytes"),
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
DTYPES: Mapping[int, "np.dtype[Any]"] = {1: np.dtype("<f4"), 2: np.dtype("<i8"), 3: np.dtype("<i4")}
FLOAT32 = 1


@cache
def _classes() -> dict[str, Callable[..., Any]]:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    field_type: Any = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="finetune_service.proto", package="service", syntax="proto3"
    )

    def add_field(message: Any, number: str, name: str, kind: str, *, is_several: bool) -> None:
        is_message = kind in MESSAGES or kind.startswith(message.name)
        field = message.field.add(name=name, number=int(number))
        field.label = field_type.LABEL_REPEATED if is_several else field_type.LABEL_OPTIONAL
        if is_message:
            field.type = field_type.TYPE_MESSAGE
            field.type_name = f".service.{kind}"
        else:
            field.type = getattr(field_type, f"TYPE_{kind.upper()}")

    for title, fields in MESSAGES.items():
        message = file.message_type.add(name=title)
        for text in fields:
            number, name, kind, *is_map = text.split()
            if is_map:
                entry_name = f"{name.title().replace('_', '')}Entry"
                entry = message.nested_type.add(name=entry_name)
                entry.options.map_entry = True
                add_field(entry, "1", "key", "string", is_several=False)
                add_field(entry, "2", "value", kind, is_several=False)
                kind = f"{title}.{entry_name}*"
            add_field(message, number, name, kind.rstrip("*"), is_several=kind.endswith("*"))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        title: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"service.{title}"))
        for title in MESSAGES
    }


def read_forward_backward(body: bytes) -> dict[str, Any]:
    """A request as JSON would say it. Raises `UserError` for one that cannot be read."""
    from google.protobuf.message import DecodeError

    message = _classes()["ForwardBackwardRequest"]()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise UserError(f"the body is no ForwardBackwardRequest: {error}") from None
    data = []
    problem = None
    try:
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
        "problem": problem,  # with the datums; whose request it is, is known
    }


def _read_datum(datum: Any, index: int) -> dict[str, Any]:
    chunks = [chunk.encoded_text for chunk in datum.model_input if chunk.HasField("encoded_text")]
    if len(chunks) != len(datum.model_input):
        raise UserError(f"data[{index}].model_input: images and sounds are not served; give tokens")
    tokens = [token for chunk in chunks for token in _numbers(chunk.tokens, np.dtype("<i4"))]
    inputs = {name: _read_tensor(each, name) for name, each in datum.loss_fn_inputs.items()}
    return {"tokens": tokens, "inputs": inputs}


def _read_tensor(tensor: Any, name: str) -> list[float]:
    is_row = len(tensor.shape) <= 1 or list(tensor.shape[1:]) == [1]
    if tensor.HasField("sparse_csr") or tensor.dtype not in DTYPES or not is_row:
        raise UserError(
            f"loss_fn_inputs: {name}: one number for each token is served, as a dense tensor of "
            "float32 or int64; several targets for a token are not"
        )
    return _numbers(tensor.dense, DTYPES[tensor.dtype])


def _numbers(raw: bytes, dtype: "np.dtype[Any]") -> list[Any]:
    if len(raw) % dtype.itemsize:
        raise UserError(f"{len(raw)} bytes are no whole number of {dtype.name}")
    numbers: list[Any] = np.frombuffer(raw, dtype).tolist()
    return numbers


def write_forward_backward(log_probabilities: Sequence[Sequence[float]], loss: float) -> bytes:
    """A ForwardBackwardOutput."""
    values = [np.array(each, np.float32) for each in log_probabilities]
    offsets = np.array([0, *accumulate(each.nbytes for each in values)], np.int64)
    tensor = _classes()["BatchedTensor"](
        data=b"".join(each.tobytes() for each in values), offsets=offsets.tobytes(), dtype=FLOAT32
    )
    record = _classes()["ArrayRecord"](
        type_tag="ArrayRecord", fields={"logprobs": tensor}, num_datums=len(values)
    )
    message = _classes()["ForwardBackwardOutput"](
        loss_fn_output_type="ArrayRecord", loss_fn_outputs=[record], metrics={"loss:sum": loss}
    )
    raw: bytes = message.SerializeToString()
    return raw


def write_samples(sampled: Sequence[Sampled], prompt: Sequence[float] | None) -> bytes:
    """A SampleResponse. `prompt`: the log-probabilities of its tokens after the first."""
    sequence = _classes()["SampledSequence"]
    message = _classes()["SampleResponse"](
        sequences=[
            sequence(
                stop_reason=int(each.ended is Ended.CUT),
                tokens=np.array(each.token_ids, np.int32).tobytes(),
                logprobs=np.array(each.log_probabilities, np.float32).tobytes(),
            )
            for each in sampled
        ]
    )
    if prompt is not None:
        message.prompt_logprobs = np.array([np.nan, *prompt], np.float32).tobytes()
    raw: bytes = message.SerializeToString()
    return raw
