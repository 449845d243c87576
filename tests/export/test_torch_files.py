"""Folders that torch wrote with pickle: their tensors are found without running code in them, and damage is reported."""

import json
import os
import pickle
import shutil
import struct
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from finetune.cli import main
from finetune.errors import UserError
from finetune.export import torch_files
from finetune.export.torch_files import (
    find_places,
    read_dcp_folder,
    read_metadata,
    read_torch_files,
)
from finetune.files.tensors import read

TENSORS = {
    "a": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "b": torch.tensor(7),
    "c": torch.arange(6).bfloat16()[2:5],  # a part of a storage
    "d": torch.zeros(0, 3),
}
FUZZ_EXAMPLES = int(os.environ.get("FINETUNE_FUZZ_EXAMPLES", "150"))


@pytest.fixture
def in_this_process() -> Iterator[None]:
    """Reads in this process: one of its own takes seconds to start and would hide a crash."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            torch_files,
            "_run_find_places",
            lambda *paths: json.loads(json.dumps(find_places(list(paths)))),
        )
        yield


class Hostile:
    """A pickle of this runs a command when it is read as pickles are."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.target}",)


def save_dcp(folder: Path, state: dict[str, Any]) -> Path:
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def change_metadata(folder: Path, change: Callable[[Any], object]) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())  # noqa: S301  # written a line above
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def test_a_dcp_folder_and_a_torch_file_read_back(tmp_path: Path) -> None:
    torch.save(TENSORS | {"note": "text"}, tmp_path / "model.bin")
    folder = save_dcp(
        tmp_path / "dcp", {"model": TENSORS, "step": 3, "lists": [1, {"x": torch.ones(2)}]}
    )
    found = read_torch_files([tmp_path / "model.bin"])
    stored = read_dcp_folder(folder)
    for name, tensor in TENSORS.items():
        assert torch.equal(read(found[name]), tensor)
        assert torch.equal(read(stored[f"model.{name}"]), tensor)


def test_a_folder_of_python_3_11_0_whose_enumerations_are_written_by_getattr(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_getattr: Any = lambda member, _: (getattr, (type(member), member.name))  # noqa: E731
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", by_getattr)
    folder = save_dcp(tmp_path / "dcp", {"a": TENSORS["a"]})
    assert b"getattr" in (folder / ".metadata").read_bytes()
    assert torch.equal(read(read_dcp_folder(folder)["a"]), TENSORS["a"])

    class Reaching:
        def __reduce__(self) -> tuple[Any, ...]:
            return getattr, (_MEM_FORMAT_ENCODING.__base__, "__subclasses__")

    (folder / ".metadata").write_bytes(pickle.dumps(Reaching()))
    with pytest.raises(UserError, match=r"\.metadata: wants to import"):
        read_dcp_folder(folder)


def repack(
    source: Path,
    target: Path,
    change: Callable[[str, bytes], bytes] = lambda _, content: content,
    compression: int = zipfile.ZIP_STORED,
    added: str | None = None,
) -> None:
    """Writes the records of a torch file by Python's zipfile, in the opposite order, and `added` as another."""
    with zipfile.ZipFile(source) as before, zipfile.ZipFile(target, "w", compression) as after:
        folder = before.namelist()[0].partition("/")[0]
        for name in reversed(before.namelist()):
            after.writestr(name, change(name.removeprefix(f"{folder}/"), before.read(name)))
        if added:
            after.writestr(f"{folder}/{added}", b"")


def test_a_torch_file_that_a_zip_program_wrote_again_reads_back(tmp_path: Path) -> None:
    torch.save({f"t{i}": torch.full((16,), float(i)) for i in range(8)}, tmp_path / "saved.bin")
    repack(tmp_path / "saved.bin", tmp_path / "model.bin")
    found = read_torch_files([tmp_path / "model.bin"])
    assert [read(found[f"t{i}"]).unique().tolist() for i in range(8)] == [
        [float(i)] for i in range(8)
    ]


REPACKED: dict[str, tuple[dict[str, Any], str]] = {
    "compressed": (
        {"compression": zipfile.ZIP_DEFLATED},
        r"its record data/1 is compressed or encrypted; save it again",
    ),
    "other byte order": (
        {"change": lambda name, content: b"big" if name == "byteorder" else content},
        r"written on a machine of another byte order",
    ),
    "size beyond its record": (
        {"change": lambda name, content: content[:16] if name == "data/0" else content},
        r"a: claims more bytes than the 16 of its record",
    ),
    "TorchScript": ({"added": "constants.pkl"}, r"a TorchScript archive; save its state_dict"),
}


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("case", REPACKED)
def test_a_torch_file_that_cannot_be_read_exactly_is_refused(case: str, tmp_path: Path) -> None:
    torch.save({"a": torch.ones(16), "b": torch.zeros(16)}, tmp_path / "saved.bin")
    changes, message = REPACKED[case]
    repack(tmp_path / "saved.bin", tmp_path / "model.bin", **changes)
    with pytest.raises(UserError, match=rf"model\.bin: {message}"):
        read_torch_files([tmp_path / "model.bin"])


def test_a_view_that_conjugates_is_no_plain_value(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2, dtype=torch.complex64).conj()}, tmp_path / "model.bin")
    with pytest.raises(UserError, match=r"a: is a conjugated or negated view"):
        read_torch_files([tmp_path / "model.bin"])


class Large:
    """A pickle of this asks for 8 GiB, of a class that torch's weights-only loader admits."""

    def __reduce__(self) -> tuple[Any, ...]:
        return bytearray, (2**33,)


def test_a_torch_file_that_asks_for_gigabytes_is_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2), "b": Large()}, tmp_path / "model.bin")
    with pytest.raises(UserError, match=r"model\.bin: needs over 1 GiB to list its tensors"):
        read_torch_files([tmp_path / "model.bin"])
    folder = save_dcp(tmp_path / "dcp", {"a": TENSORS["a"]})
    torch.save(Large(), tmp_path / "item")
    item = (tmp_path / "item").read_bytes()
    (folder / "__0_0.distcp").write_bytes(item)
    change_metadata(
        folder,
        lambda m: (setattr(_storage(m), "offset", 0), setattr(_storage(m), "length", len(item))),
    )
    with pytest.raises(UserError, match=r"dcp: needs over 1 GiB to list its tensors"):
        read_dcp_folder(folder)
    for content in (MEMO_OF_GIGABYTES, BYTES_THAT_ARE_NOT_THERE):
        (folder / ".metadata").write_bytes(content)
        with pytest.raises(
            UserError,
            match=r"\.metadata: (damaged|refers to place .* damaged|holds the pickle opcode)",
        ):
            read_dcp_folder(folder)


def _class(name: str) -> bytes:
    return b"ctorch.distributed.checkpoint.metadata\n" + name.encode() + b"\n"


def _path_of_doubled_length(times: int) -> bytes:
    return (
        b"\x80\x02X\x01\x00\x00\x00aq\x00"
        + times * b"cpathlib\nPosixPath\nh\x00h\x00\x86Rq\x00"
        + b"."
    )


MEMO_OF_GIGABYTES = b"\x80\x02}r\x00\x00\x00\x10."
BYTES_THAT_ARE_NOT_THERE = b"\x80\x05\x96" + struct.pack("<Q", 2**33) + b"."
HOSTILE_METADATA = {
    "a bytearray": (pickle.dumps(Large()), r"wants to import builtins\.bytearray"),
    "attributes of an admitted class": (
        b"\x80\x02" + _class("TensorStorageMetadata") + b"N}X\x04\x00\x00\x00sizeK\x05s\x86b.",
        r"damaged \(TypeError\)",
    ),
    "attributes of an admitted class by a mapping": (
        b"\x80\x02" + _class("Metadata") + b"}X\x0c\x00\x00\x00storage_data}sb.",
        r"damaged \(TypeError\)",
    ),
    "a path of doubled length": (_path_of_doubled_length(28), r"does not describe a checkpoint"),
}


@pytest.mark.parametrize("case", HOSTILE_METADATA)
def test_hostile_metadata_takes_no_memory_and_leaves_nothing_behind(
    case: str, tmp_path: Path
) -> None:
    """Read in this process, so that a later folder meets what the hostile one may have left."""
    content, message = HOSTILE_METADATA[case]
    folder = save_dcp(tmp_path / "dcp", {"a": TENSORS["a"]})
    sound = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(content)
    tracemalloc.start()
    with pytest.raises(UserError, match=message):
        read_metadata(folder)
    assert tracemalloc.get_traced_memory()[1] < 10 * 1024**2
    tracemalloc.stop()
    (folder / ".metadata").write_bytes(sound)
    assert read_metadata(folder)["state_dict_metadata"]["a"].attributes["size"] == (3, 4)


def test_a_hostile_pickle_is_refused_unread(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    folder = save_dcp(tmp_path / "dcp", {"a": TENSORS["a"]})
    (folder / ".metadata").write_bytes(pickle.dumps(Hostile(trap)))
    with pytest.raises(UserError, match=r"\.metadata: wants to import posix\.system"):
        read_dcp_folder(folder)
    torch.save({"a": Hostile(trap)}, tmp_path / "model.bin")
    with pytest.raises(UserError, match=r"model\.bin: holds more than weights"):
        read_torch_files([tmp_path / "model.bin"])
    assert not trap.exists()


def _storage(metadata: Any) -> Any:
    return next(info for index, info in metadata.storage_data.items() if index.fqn == "a")


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing file": (
        lambda f: (f / "__0_0.distcp").unlink(),
        r"__0_0\.distcp: a: its file is missing",
    ),
    "truncated file": (
        lambda f: os.truncate(f / "__0_0.distcp", 900),
        r"__0_0\.distcp: a: not a torch file",
    ),
    "traversal": (
        lambda f: change_metadata(
            f, lambda m: setattr(_storage(m), "relative_path", "../../etc/passwd")
        ),
        r"a: its file '\.\./\.\./etc/passwd' leads out of the folder",
    ),
    "negative place": (
        lambda f: change_metadata(f, lambda m: setattr(_storage(m), "offset", -5)),
        r"a: its place in __0_0\.distcp is not valid",
    ),
    "other shape": (
        lambda f: change_metadata(
            f, lambda m: setattr(m.state_dict_metadata["a"], "size", torch.Size([9, 4]))
        ),
        r"a: of shape \[9, 4\] by its metadata, but the files hold parts of shape \[3, 4\]",
    ),
    "extensions": (
        lambda f: change_metadata(
            f, lambda m: setattr(_storage(m), "transform_descriptors", ["zstd"])
        ),
        r"a: written through \['zstd'\]",
    ),
    "truncated metadata": (lambda f: os.truncate(f / ".metadata", 60), r"\.metadata: damaged"),
    "no metadata": (
        lambda f: (f / ".metadata").write_bytes(pickle.dumps([1])),
        "does not describe a checkpoint",
    ),
}


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("case", WRONG)
def test_a_damaged_dcp_folder_is_reported(case: str, tmp_path: Path) -> None:
    folder = save_dcp(tmp_path / "dcp", {"a": TENSORS["a"]})
    change, message = WRONG[case]
    change(folder)
    with pytest.raises(UserError, match=message):
        read_dcp_folder(folder)


def test_weights_are_found_behind_any_prefix_and_beside_an_optimizer(
    tiny_llama: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_llama()
    weights = load_file(model / "model.safetensors")
    moments = {f"state.{name}.exp_avg": tensor for name, tensor in weights.items()}
    save_dcp(tmp_path / "one", {"app": {"net": weights, "optimizer": moments}, "step": 7})
    command = ["export", "--base-model", str(model), "--no-verify"]
    assert main([*command, str(tmp_path / "one"), "--output", str(tmp_path / "out")]) == 0
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert exported.keys() == weights.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in weights.items())
    halves = sorted(weights)[::2], sorted(weights)[1::2]
    for number, names in enumerate(halves, start=1):
        (tmp_path / "bin").mkdir(exist_ok=True)
        torch.save(
            {n: weights[n] for n in names},
            tmp_path / "bin" / f"pytorch_model-0000{number}-of-00002.bin",
        )
    assert main([*command, str(tmp_path / "bin"), "--output", str(tmp_path / "out-bin")]) == 0
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (
        tmp_path / "out-bin" / "model.safetensors"
    ).read_bytes()
    save_dcp(tmp_path / "two", {"model": weights, "ema": weights})
    assert main([*command, str(tmp_path / "two"), "--output", str(tmp_path / "out2")]) == 2
    assert "holds the model more than once, under ema. and model." in capsys.readouterr().err
    assert main(["export", str(tmp_path / "one"), "--output", str(tmp_path / "out3")]) == 2
    assert "has no config.json; name the model that was trained" in capsys.readouterr().err


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    save_dcp(folder, {"a": TENSORS["a"], "b": TENSORS["b"]})
    torch.save({"a": TENSORS["a"]}, folder / "model.bin")
    return folder


@settings(max_examples=FUZZ_EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    file=st.sampled_from([".metadata", "__0_0.distcp", "model.bin"]),
    changes=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=4),
)
@pytest.mark.usefixtures("in_this_process")
def test_no_changed_byte_crashes_the_reader(
    file: str, changes: list[tuple[int, int]], sound: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("fuzz") / "dcp"
    shutil.copytree(sound, folder)
    content = bytearray((folder / file).read_bytes())
    for position, value in changes:
        content[position % len(content)] = value
    (folder / file).write_bytes(content)
    for reader in (
        lambda: read_dcp_folder(folder),
        lambda: read_torch_files([folder / "model.bin"]),
    ):
        try:
            tensors = reader()
        except UserError as error:
            assert str(folder) in str(error) or "hold" in str(error)
        else:
            for tensor in tensors.values():
                assert read(tensor).shape == tensor.shape
    shutil.rmtree(folder)
