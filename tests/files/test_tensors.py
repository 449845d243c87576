"""Reading safetensors: what is right comes back bit for bit, what is wrong is reported with file and tensor."""

import cProfile
import json
import os
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from finetune.errors import UserError
from finetune.files.json_files import RepeatedName, _require_unique
from finetune.files.tensors import DTYPES, read, read_folder, read_slice

ROWS = torch.arange(24, dtype=torch.float32).reshape(6, 4)


def write_raw(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def write_parts(
    folder: Path, parts: list[tuple[torch.Tensor, list[int]]], name: str = "weight"
) -> None:
    """Files as DCP's HuggingFaceStorageWriter(save_distributed=True) writes them, one for each rank."""
    folder.mkdir(exist_ok=True)
    for rank, (part, offsets) in enumerate(parts, start=1):
        save_file(
            {name: part.contiguous()},
            folder / f"shard-{rank:05d}-model-00001-of-00001.safetensors",
            metadata={
                "DCP_SHARDING_INFO": json.dumps({name: {"saved_offsets": offsets}}),
                "format": "pt",
            },
        )


def entry(begin: int = 0, end: int = 8, shape: Any = (2,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_every_dtype_comes_back_bit_for_bit(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    noise = {
        name: torch.randint(
            0, 2, (5, 3, 2 * dtype.itemsize), generator=generator, dtype=torch.uint8
        ).view(dtype)
        for name, dtype in DTYPES.items()
    } | {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 7)}
    save_file(noise, tmp_path / "model.safetensors")
    tensors = read_folder(tmp_path)
    assert set(tensors) == set(noise)
    for name, expected in noise.items():
        result = read(tensors[name])
        assert (result.dtype, result.shape) == (expected.dtype, expected.shape)
        assert torch.equal(
            result.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8)
        ), name


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_slice_of_any_cut_is_the_slice_of_the_tensor(
    data: st.DataObject, tmp_path_factory: Any
) -> None:
    shape = data.draw(st.lists(st.integers(1, 9), min_size=0, max_size=3))
    shape += data.draw(
        st.sampled_from([[], [3], [5000]])
    )  # rows longer than a run are read one by one
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.int32).reshape(shape)
    parts = [(whole, [0] * len(shape))]
    for dimension in range(len(shape)):
        cut = data.draw(st.integers(0, shape[dimension]))
        parts = [
            (part, [*offsets[:dimension], start, *offsets[dimension + 1 :]])
            for part, offsets in parts
            for part, start in zip(part.tensor_split([cut], dimension), (0, cut), strict=True)
        ]
    folder = tmp_path_factory.mktemp("parts")
    write_parts(folder, data.draw(st.permutations(parts)))
    tensor = read_folder(folder)["weight"]
    bounds = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    slices = tuple(slice(*pair) for pair in bounds[: data.draw(st.integers(0, len(shape)))])
    assert tensor.shape == whole.shape
    assert torch.equal(read(tensor), whole)
    assert torch.equal(read_slice(tensor, slices), whole[slices])


def test_parts_that_ranks_wrote_through_dcp_are_joined(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    state = {"a": ROWS, "b": torch.tensor(3), "c": ROWS.bfloat16()}
    writer = dcp.HuggingFaceStorageWriter(str(tmp_path), save_distributed=True)
    dcp.save(state, storage_writer=writer, no_dist=True)
    tensors = read_folder(tmp_path)
    assert {name: read(tensor).tolist() for name, tensor in tensors.items()} == {
        n: t.tolist() for n, t in state.items()
    }


@pytest.mark.skipif(
    not Path("/proc/self/io").exists(), reason="only Linux counts the bytes that a process reads"
)
def test_a_slice_reads_only_its_bytes(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(1000, 1000)}, tmp_path / "model.safetensors")
    tensor = read_folder(tmp_path)["weight"]
    with Path("/proc/self/io").open() as counters:
        before = int(counters.readline().split()[1])
    part = read_slice(tensor, (slice(10, 12),))
    with Path("/proc/self/io").open() as counters:
        after = int(counters.readline().split()[1])
    assert after - before < part.numel() * 4 + 4096  # reading the counters counts too


def test_an_index_chooses_its_files_and_no_others(tmp_path: Path) -> None:
    save_file({"a": ROWS}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": ROWS + 1}, tmp_path / "model-00002-of-00002.safetensors")
    save_file({"a": ROWS - 1}, tmp_path / "consolidated.safetensors")
    index = {
        "weight_map": {
            "a": "model-00001-of-00002.safetensors",
            "b": "model-00002-of-00002.safetensors",
        }
    }
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(read(read_folder(tmp_path)["a"]), ROWS)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(
        UserError, match=r"index\.json: b: its file model-00002-of-00002\.safetensors is missing"
    ):
        read_folder(tmp_path)


HOSTILE_HEADERS: dict[str, tuple[Any, bytes, int | None, str]] = {
    "truncated in its data": ({"weight": entry()}, b"1234", None, "weight: truncated"),
    "truncated in its header": ({"weight": entry()}, b"", 60_000, "truncated"),
    "header of 100 GB": (
        {"weight": entry()},
        b"12345678",
        100_000_000_000,
        "header alone claims 100,000,000,000",
    ),
    "overlap": ({"a": entry(0, 8), "weight": entry(4, 12)}, b"0" * 12, None, "weight: overlaps a"),
    "hole": (
        {"a": entry(0, 8), "weight": entry(12, 20)},
        b"0" * 20,
        None,
        "weight: leaves a gap after a",
    ),
    "bytes of nobody": ({"a": entry(0, 8)}, b"0" * 12, None, "4 bytes after its last tensor"),
    "named twice": (b'{"weight": {}, "weight": {}}', b"", None, "weight: header: named twice"),
    "not JSON": (b'{"weight"', b"", None, "header: not JSON"),
    "not UTF-8": (b'{"\xff": 1}', b"", None, "header: not JSON"),
    "nested too deep": (b"[" * 100_000, b"", None, "header: not JSON"),
    "a list": ([1], b"", None, "a JSON object is expected"),
    "no entry": ({"weight": 3}, b"", None, "weight: no dtype"),
    "unknown dtype": (
        {"weight": entry(dtype="F4")},
        b"0" * 8,
        None,
        'weight: dtype "F4" is not one that torch knows',
    ),
    "negative length": ({"weight": entry(shape=[-2])}, b"0" * 8, None, r"weight: shape \[-2\]"),
    "length of true": ({"weight": entry(shape=[True, 2])}, b"0" * 8, None, "weight: shape"),
    "lengths that overflow": (
        {"weight": entry(shape=[2**62, 2**62])},
        b"0" * 8,
        None,
        "weight: F32 of shape",
    ),
    "too many dimensions": ({"weight": entry(shape=[1] * 99)}, b"0" * 8, None, "weight: shape"),
    "wrong size": (
        {"weight": entry(shape=[3])},
        b"0" * 8,
        None,
        "weight: F32 of shape .* takes 12 bytes",
    ),
    "backwards": ({"weight": entry(8, 0)}, b"0" * 8, None, "weight: .* claim -8"),
    "name that paints the terminal": (
        {"\x1b[31m": entry()},
        b"0" * 8,
        None,
        r"\\x1b\[31m: not a tensor name",
    ),
    "metadata of a list": ({"__metadata__": [], "weight": entry()}, b"0" * 8, None, "__metadata__"),
    "no offsets of a part": (
        {"__metadata__": {"DCP_SHARDING_INFO": "{}"}, "weight": entry()},
        b"0" * 8,
        None,
        "weight: DCP_SHARDING_INFO does not say",
    ),
    "offsets of other dimensions": (
        {
            "__metadata__": {"DCP_SHARDING_INFO": '{"weight": {"saved_offsets": [0, 0]}}'},
            "weight": entry(),
        },
        b"0" * 8,
        None,
        "weight: DCP_SHARDING_INFO does not say",
    ),
}


@pytest.mark.parametrize("case", HOSTILE_HEADERS)
def test_a_hostile_header_is_reported_with_file_and_tensor(case: str, tmp_path: Path) -> None:
    header, data, length, message = HOSTILE_HEADERS[case]
    write_raw(tmp_path / "model.safetensors", header, data, length)
    with pytest.raises(
        UserError, match=rf"model\.safetensors: .*{message}|model\.safetensors: {message}"
    ):
        read_folder(tmp_path)


def test_a_header_of_many_tensors_takes_linear_time_and_memory(tmp_path: Path) -> None:
    def measure(count: int) -> tuple[int, float]:
        write_raw(
            tmp_path / "model.safetensors",
            {f"a{number}": entry(0, 0, [0]) for number in range(count)},
        )
        profile = cProfile.Profile()
        tracemalloc.start()
        assert len(profile.runcall(read_folder, tmp_path)) == count
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        calls = sum(found.callcount for found in profile.getstats())
        return calls, peak / (tmp_path / "model.safetensors").stat().st_size

    (calls, _), (more_calls, share) = measure(2000), measure(4000)
    assert more_calls < 2.2 * calls
    assert share < 30


def test_a_repeated_name_is_found_in_linear_time() -> None:
    class Name(str):
        __slots__ = ()
        compared = 0

        def __eq__(self, other: object) -> bool:
            Name.compared += 1
            return str(self) == str(other)

        __hash__ = str.__hash__

    names = [Name(f"a{number}") for number in range(3000)]
    with pytest.raises(RepeatedName, match="a2999"):
        _require_unique([(name, 0) for name in [*names, Name("a2999")]])
    assert Name.compared < 10 * len(names)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("../secret.safetensors", "leads out of the folder"),
        ("/etc/secret.safetensors", "leads out of the folder"),
        ("a\\b.safetensors", "leads out of the folder"),
        ("pytorch_model.bin", "is not the name of a safetensors file"),
        (3, "is not the name of a safetensors file"),
        ("gone.safetensors", "gone.safetensors is missing"),
        ("other.safetensors", "other.safetensors does not hold it"),
    ],
)
def test_a_hostile_index_is_reported_with_file_and_tensor(
    file: Any, message: str, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for path in (tmp_path / "secret.safetensors", folder / "other.safetensors"):
        save_file({"secret": ROWS}, path)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"weight": file}})
    )
    with pytest.raises(UserError, match=rf"index\.json: weight: .*{message}"):
        read_folder(folder)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}'])
def test_an_index_of_nothing_is_reported(text: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(UserError, match=r"model\.safetensors\.index\.json: "):
        read_folder(tmp_path)


def test_the_same_name_in_two_files_is_reported(tmp_path: Path) -> None:
    save_file({"weight": ROWS}, tmp_path / "a.safetensors")
    save_file({"weight": ROWS}, tmp_path / "b.safetensors")
    with pytest.raises(
        UserError, match=r"weight: both .*a\.safetensors and .*b\.safetensors hold it"
    ):
        read_folder(tmp_path)


def test_parts_must_cover_their_tensor_once(tmp_path: Path) -> None:
    write_parts(tmp_path / "hole", [(ROWS[:2], [0, 0]), (ROWS[4:], [4, 0])])
    with pytest.raises(UserError, match=r"weight: 8 of 24 elements are in no file"):
        read_folder(tmp_path / "hole")
    write_parts(tmp_path / "overlap", [(ROWS[:4], [0, 0]), (ROWS[2:], [2, 0])])
    with pytest.raises(
        UserError, match=r"weight: both .*shard-00001.* and .*shard-00002.* hold it"
    ):
        read_folder(tmp_path / "overlap")
    write_parts(tmp_path / "dtypes", [(ROWS[:4], [0, 0]), (ROWS[4:].half(), [4, 0])])
    with pytest.raises(UserError, match=r"weight: .* differ in dtype"):
        read_folder(tmp_path / "dtypes")
    write_parts(tmp_path / "empty", [(ROWS, [0, 0]), (ROWS[6:], [6, 0])])
    assert torch.equal(read(read_folder(tmp_path / "empty")["weight"]), ROWS)


def test_a_folder_without_tensors_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no \*\.safetensors file is here"):
        read_folder(tmp_path)
    with pytest.raises(UserError, match="no such folder"):
        read_folder(tmp_path / "gone")
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"model\.safetensors: cannot be read: not a plain file"):
        read_folder(tmp_path)


def test_a_file_cut_after_its_header_was_read_is_reported(tmp_path: Path) -> None:
    save_file({"weight": ROWS}, tmp_path / "model.safetensors")
    tensor = read_folder(tmp_path)["weight"]
    os.truncate(tmp_path / "model.safetensors", 100)
    with pytest.raises(UserError, match=r"model\.safetensors: weight: the file has become shorter"):
        read(tensor)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*DTYPES, "F4"]) | json_values,
        "shape": st.lists(st.integers(-1, 3) | st.sampled_from([2**31, 2**62]), max_size=3)
        | json_values,
        "data_offsets": st.lists(st.integers(0, 24), min_size=2, max_size=2) | json_values,
    }
)
sharding_infos = st.builds(
    json.dumps,
    st.dictionaries(
        st.sampled_from("ab"),
        st.fixed_dictionaries({"saved_offsets": st.lists(st.integers(0, 3)) | json_values}),
    ),
)
headers = st.dictionaries(st.sampled_from("ab"), entries | json_values) | st.fixed_dictionaries(
    {
        "__metadata__": st.fixed_dictionaries({"DCP_SHARDING_INFO": sharding_infos | json_values}),
        "a": entries,
    }
)
FUZZ_EXAMPLES = int(os.environ.get("FINETUNE_FUZZ_EXAMPLES", "300"))
fuzz = settings(max_examples=FUZZ_EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))


def read_all(folder: Path) -> None:
    """Whatever the folder holds: tensors, or a `UserError` that names something in it; nothing else."""
    try:
        tensors = read_folder(folder)
    except UserError as error:
        assert str(folder) in str(error)
    else:
        for tensor in tensors.values():
            assert read(tensor).shape == tensor.shape


@fuzz
@given(
    header=headers | st.binary(max_size=50),
    data=st.integers(0, 24),
    length=st.none() | st.integers(0, 2**64 - 1),
)
def test_no_header_crashes_the_reader(
    header: Any, data: int, length: int | None, tmp_path_factory: Any
) -> None:
    folder = tmp_path_factory.mktemp("fuzz", numbered=True)
    write_raw(folder / "a.safetensors", header, b"\0" * data, length)
    write_raw(folder / "b.safetensors", {"b": entry()}, b"\0" * 8)
    read_all(folder)


@fuzz
@given(
    index=st.fixed_dictionaries({"weight_map": st.dictionaries(st.sampled_from("ab"), json_values)})
    | json_values
)
def test_no_index_crashes_the_reader(index: Any, tmp_path_factory: Any) -> None:
    folder = tmp_path_factory.mktemp("fuzz", numbered=True)
    save_file({"a": ROWS}, folder / "a.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    read_all(folder)


@fuzz
@given(position=st.integers(0, 10**9), value=st.integers(0, 255))
def test_no_changed_byte_crashes_the_reader(
    position: int, value: int, tmp_path_factory: Any
) -> None:
    folder = tmp_path_factory.mktemp("fuzz", numbered=True)
    write_parts(folder, [(ROWS[:4], [0, 0]), (ROWS[4:], [4, 0])])
    path = folder / "shard-00002-model-00001-of-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[position % len(content)] = value
    path.write_bytes(content)
    read_all(folder)


def test_a_pointer_of_git_lfs_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 9\n")
    with pytest.raises(UserError, match="a pointer of Git LFS in place of the file"):
        read_folder(tmp_path)
