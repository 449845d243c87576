"""Tensors of requests and answers in the API's protocol buffers."""

from typing import Any

import numpy as np
import pytest
import torch

from finetune.service import wire

pytest.importorskip("google.protobuf")
FLOAT32, INT64 = 1, 2


def send(name: str, **tensor: Any) -> dict[str, Any]:
    """What is read of a request whose one datum has one tensor."""
    request = wire._classes()["ForwardBackwardRequest"](model_id="m", seq_id=1)
    message = request.data.add()
    message.model_input.add().encoded_text.tokens = np.array([1, 2, 3], "<i4").tobytes()
    own = message.loss_fn_inputs[name]
    own.dtype = tensor["dtype"]
    own.shape.extend(tensor["shape"])
    if "dense" in tensor:
        own.dense = tensor["dense"]
    else:
        for part, values in tensor["sparse"].items():
            setattr(own.sparse_csr, part, values)
    return wire.read_forward_backward(request.SerializeToString())


def as_sparse(table: torch.Tensor) -> dict[str, bytes]:
    """Compressed rows as torch makes them."""
    rows = table.to_sparse_csr()
    return {
        "values": rows.values().numpy().tobytes(),
        "crow_indices": rows.crow_indices().numpy().tobytes(),
        "col_indices": rows.col_indices().numpy().tobytes(),
    }


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_a_tensor_is_read_as_it_was_sent() -> None:
    row = torch.tensor([0.5, -1.0, 2.0])
    table = torch.tensor([[0, 7, 0, 9], [0, 0, 0, 0], [4, 0, 0, 1]])
    cases = [
        (row, {"dense": row.numpy().tobytes()}),
        (row[:, None], {"dense": row.numpy().tobytes()}),
        (table, {"dense": table.numpy().tobytes()}),
        (table, {"sparse": as_sparse(table)}),
        (table.float() / 2, {"sparse": as_sparse(table.float() / 2)}),
    ]
    for sent, encoded in cases:
        dtype = FLOAT32 if sent.is_floating_point() else INT64
        read = send("weights", shape=sent.shape, dtype=dtype, **encoded)
        assert read["problem"] is None
        assert read["data"] == [{"tokens": [1, 2, 3], "inputs": {"weights": sent.tolist()}}]


def sparse(values: list[float], crow: list[int], col: list[int], shape: list[int]) -> Any:
    encoded = {
        "values": np.array(values, "<f4").tobytes(),
        "crow_indices": np.array(crow, "<i8").tobytes(),
        "col_indices": np.array(col, "<i8").tobytes(),
    }
    return {"sparse": encoded, "shape": shape, "dtype": FLOAT32}


WRONG = {
    "three dimensions": {"dense": b"", "shape": [1, 1, 1], "dtype": FLOAT32},
    "another type": {"dense": b"", "shape": [0], "dtype": 4},
    "too few numbers": {"dense": bytes(12), "shape": [2, 2], "dtype": FLOAT32},
    "a column too far": sparse([1.0], [0, 1], [2], [1, 2]),
    "a column before the first": sparse([1.0], [0, 1], [-1], [1, 2]),
    "rows that go back": sparse([1.0], [0, 2, 1], [0], [2, 2]),
    "rows without an end": sparse([1.0], [0], [0], [1, 2]),
    "fewer values than places": sparse([1.0], [0, 2], [0, 1], [1, 2]),
    "no rows": sparse([], [], [], [-1, 2]),
    "one dimension": sparse([1.0], [0, 1], [0], [1]),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_tensor_that_is_none_is_a_problem_of_its_request(case: str) -> None:
    read = send("weights", **WRONG[case])
    assert read["problem"].startswith("loss_fn_inputs: weights: ")
    assert (read["model_id"], read["seq_id"]) == ("m", 1)


def test_a_sparse_tensor_cannot_ask_for_more_memory_than_a_dense_one() -> None:
    for shape in ([1, 2**40], [-1, 2**40], [2**40, 2**40]):
        read = send("weights", **sparse([1.0], [0, 1], [0], shape))
        assert "numbers, zeros included" in read["problem"]
