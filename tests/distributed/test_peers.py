"""A rank ends when another rank of its node has died, whatever it waits for."""

import subprocess
import sys

import pytest

from finetune.distributed.join import is_alive, this_process
from tests.ranks import environment

WAITS = """
import os, sys, time, psutil
from finetune.distributed.join import this_process, watch_peers
host, peer = os.uname().nodename, int(sys.argv[1])
processes = [this_process(), (host, peer, psutil.Process(peer).create_time()), ("another-host", 1, 0.0)]
left = watch_peers(0, processes, timeout_seconds=1.0)
if "leaves" in sys.argv:
    left.set()
print("watching", flush=True)
time.sleep(4)
"""


@pytest.mark.parametrize(
    "leaves",
    [
        pytest.param(False, id="in the run"),
        pytest.param(True, id="after leaving", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_waits_ends_after_its_peer_was_killed(leaves: bool) -> None:
    with subprocess.Popen(["sleep", "60"]) as peer:
        command = [sys.executable, "-c", WAITS, str(peer.pid), *(["leaves"] if leaves else [])]
        with subprocess.Popen(
            command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as rank:
            assert rank.stdout is not None and rank.stderr is not None
            assert rank.stdout.readline() == b"watching\n"
            peer.kill()  # not yet waited for: a zombie, as under a parent that sleeps
            said = rank.stderr.read().decode()
            assert rank.wait() == (0 if leaves else 1), said
    if not leaves:
        assert "rank 0: rank 1 ended 1 s ago" in said


def test_a_process_id_that_was_given_to_another_process_is_not_the_peer() -> None:
    _, process, created = this_process()
    assert is_alive(process, created)
    assert not is_alive(process, created - 1.0)
