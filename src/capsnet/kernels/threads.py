"""Jobs written in Python, or compiled by Numba, on the threads that PyTorch computes with.

After a parallel operation PyTorch's OpenMP threads spin for milliseconds, waiting for the next one. Threads of our
own would have to share the cores with them, and on a busy machine everything then takes several times as long.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from capsnet.kernels.private import TEAM_MEMBER, openmp_parallel


def run(job: Callable[..., None], jobs: list[tuple[Any, ...]]) -> None:
    """Run job(*arguments) for all of the jobs; every thread takes the next when it is done with one.

    A job gains from threads only where it releases the interpreter lock. It records no gradients, and sees inference
    mode as the caller does: both are settings of a thread. The first exception is raised again here.
    """
    queue, inference = iter(jobs), torch.is_inference_mode_enabled()
    failures: list[BaseException] = []

    def work(_: object = None) -> None:
        try:
            with torch.inference_mode(inference), torch.no_grad():
                for arguments in queue:
                    job(*arguments)
        except BaseException as failure:  # an exception must not unwind through OpenMP
            failures.append(failure)

    threads, start = min(torch.get_num_threads(), len(jobs)), openmp_parallel()
    if threads == 1:
        work()
    elif start is not None:
        start(TEAM_MEMBER(work), None, threads, 0)
    else:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(work, range(threads)))
    if failures:
        raise failures[0]
