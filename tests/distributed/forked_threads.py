"""Forks children in each of which several threads compute first at once: `forked_threads.py CHILDREN renewed|forked|without a pool`.

Prints how many failed by "Invalid thread pool".
"""

import os
import sys
import threading

import torch

from finetune.distributed.join import renew_thread_pool

THREADS, ELEMENTS = 6, 1 << 16


def main() -> None:
    children, kind = int(sys.argv[1]), sys.argv[2]
    if kind != "without a pool":
        torch.set_num_threads(torch.get_num_threads())
    print(sum(fails_in_child(is_renewed=kind == "renewed") for _ in range(children)))


def fails_in_child(*, is_renewed: bool) -> bool:
    process = os.fork()
    if process == 0:
        if is_renewed:
            renew_thread_pool()
        os._exit(int(compute_at_once()))
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) != 0


def compute_at_once() -> bool:
    """Whether one of the threads failed by that error."""
    barrier, errors = threading.Barrier(THREADS), list[str]()

    def compute() -> None:
        barrier.wait()
        try:
            torch.ones(ELEMENTS).sum()
        except RuntimeError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=compute) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return any("Invalid thread pool" in error for error in errors)


if __name__ == "__main__":
    main()
