"""Files without a name for the optimizer's state: what is written is read, nothing is left, and what cannot be is one sentence."""

import errno
import os
import re
from pathlib import Path

import pytest
import torch

from finetune.errors import UserError
from finetune.optim import offload
from finetune.optim.offload import ScratchFile, allocate_aligned, check_scratch_folder

ON_CPU = torch.device("cpu")


@pytest.mark.parametrize("is_direct", [True, False])
def test_what_is_written_is_read_whatever_the_requests(
    is_direct: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload, "REQUEST_BYTES", 3 * 4096)
    if not is_direct:
        monkeypatch.setattr(offload, "_make_direct", lambda descriptor: False)
    file = ScratchFile(tmp_path / "a" / "b", 40 * 4096)
    values = allocate_aligned(20 * 4096, ON_CPU)
    values.copy_(torch.randint(0, 256, (20 * 4096,), dtype=torch.uint8))
    file.write(8 * 4096, values)
    read = allocate_aligned(40 * 4096, ON_CPU).fill_(1)
    file.read(0, read)
    assert torch.equal(read[8 * 4096 : 28 * 4096], values)
    assert not read[: 8 * 4096].any() and not read[28 * 4096 :].any(), (
        "zero where nothing was written"
    )
    assert list((tmp_path / "a" / "b").iterdir()) == []
    assert os.fstat(file._descriptor).st_blocks * 512 >= 40 * 4096, "its space is reserved"


def test_a_disk_that_is_too_small_is_one_sentence_before_a_byte_is_written(tmp_path: Path) -> None:
    sentence = (
        r"the optimizer's state of 2 ranks takes 1,200,000 TB, but .* are free there; make room"
    )
    with pytest.raises(UserError, match=sentence):
        check_scratch_folder(tmp_path / "missing", 12 * 10**17, 2)
    with pytest.raises(
        UserError,
        match=r"missing/folder: no such folder, nor one to make it in; make .*missing, or correct the path",
    ):
        check_scratch_folder(tmp_path / "missing" / "folder", 0, 2)
    assert not (tmp_path / "missing").exists()
    with pytest.raises(UserError, match=r"takes .* free there; make room"):
        ScratchFile(tmp_path, 12 * 10**17)


def test_a_folder_that_cannot_be_written_or_is_in_memory_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        UserError, match=re.escape("cannot be written (Not a directory); name another folder")
    ):
        check_scratch_folder(tmp_path / "file", 0, 1)
    monkeypatch.setattr(offload, "_find_filesystem", lambda folder: "tmpfs")
    with pytest.raises(UserError, match="a tmpfs, which is host memory; name a folder on a disk"):
        check_scratch_folder(tmp_path, 0, 1)


def test_a_disk_that_fails_names_the_folder(tmp_path: Path) -> None:
    file = ScratchFile(tmp_path, 4096)
    file._file.close()
    with pytest.raises(OSError, match=re.escape(str(tmp_path))) as failure:
        file.read(0, allocate_aligned(4096, ON_CPU))
    assert failure.value.errno == errno.EBADF
