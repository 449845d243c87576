"""The launching of ranks that all distributed tests stand on."""

from pathlib import Path

import pytest

from tests.ranks import launch_ranks


def test_ranks_find_each_other_and_a_failed_rank_ends_the_rest(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, time\n"
        "print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], sys.argv[1])\n"
        "if sys.argv[1] == 'fail': sys.exit(3) if os.environ['RANK'] == '1' else time.sleep(60)\n"
        "if sys.argv[1] == 'hang': time.sleep(60)\n"
    )
    assert launch_ranks(script, ["well"], ranks=2).check().outputs == (
        "rank 0 of 2 well\n",
        "rank 1 of 2 well\n",
    )

    finished = launch_ranks(script, ["fail"], ranks=2, timeout=30)
    assert finished.returncodes == (-9, 3)
    with pytest.raises(AssertionError, match="rank 1 ended with 3"):
        finished.check()

    with pytest.raises(AssertionError, match="took more than 1 s"):
        launch_ranks(script, ["hang"], ranks=2, timeout=1)
