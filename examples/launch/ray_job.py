"""Ray: `python examples/launch/ray_job.py --ranks 2 -- --recipe quickstart --config ddp`.

On a cluster or one machine: one actor for each rank, with a GPU where the cluster has any. The
ranks meet at the first rank's machine.
"""

import argparse
import os
import socket
import subprocess
import sys
from pathlib import Path

import ray

RUN = Path(__file__).resolve().parents[2] / "finetune" / "run.py"


@ray.remote(max_restarts=0)
class Rank:
    """One rank of a run, in a process of its own."""

    def find_address(self) -> tuple[str, int]:
        """This machine's address, and a free port on it."""
        with socket.socket() as free:
            free.bind(("", 0))
            return ray.util.get_node_ip_address(), free.getsockname()[1]

    def train(self, rank: int, ranks: int, address: str, port: int, arguments: list[str]) -> int:
        """Runs run.py with what torchrun would set, and returns its exit code."""
        given = {
            "RANK": rank,
            "WORLD_SIZE": ranks,
            "LOCAL_RANK": 0,
            "LOCAL_WORLD_SIZE": 1,
            "MASTER_PORT": port,
        }
        environment = (
            os.environ
            | {name: str(value) for name, value in given.items()}
            | {"MASTER_ADDR": address}
        )
        return subprocess.run([sys.executable, str(RUN), *arguments], env=environment).returncode


def main() -> int:
    """Starts the ranks and returns the largest of their exit codes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    options, arguments = parser.parse_known_args()
    ray.init()
    gpus = 1 if ray.cluster_resources().get("GPU", 0) >= options.ranks else 0
    ranks = [Rank.options(num_cpus=1, num_gpus=gpus).remote() for _ in range(options.ranks)]
    address, port = ray.get(ranks[0].find_address.remote())
    words = [word for word in arguments if word != "--"]
    running = [
        each.train.remote(number, options.ranks, address, port, words)
        for number, each in enumerate(ranks)
    ]
    return max(ray.get(running))


if __name__ == "__main__":
    sys.exit(main())
