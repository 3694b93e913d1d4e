"""Jobs run on several threads with the settings of the caller."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch

from capsnet.kernels.threads import run


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, nullcontext])
def test_jobs_of_two_threads_write_to_tensors_of_the_caller(mode: type[AbstractContextManager[None]]) -> None:
    """A tensor that was made in inference mode may only be written to in that mode, which is a thread's own."""
    meet, seen, before = threading.Barrier(2), set[int](), torch.get_num_threads()
    weight = torch.ones(2, requires_grad=True)

    def work(k: int) -> None:
        meet.wait(timeout=30)  # so that each thread takes one of the jobs
        seen.add(threading.get_ident())
        out[k] = 2 * weight[k]

    torch.set_num_threads(2)
    try:
        with mode():
            expected = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
            out = torch.zeros(2)
            run(work, [(0,), (1,)])
            assert (torch.is_inference_mode_enabled(), torch.is_grad_enabled()) == expected
    finally:
        torch.set_num_threads(before)
    assert len(seen) == 2
    assert out.tolist() == [2, 2]
    assert not out.requires_grad


def test_the_first_exception_of_a_job_is_raised_again() -> None:
    def fail(k: int) -> None:
        raise ValueError(f"job {k}")

    with pytest.raises(ValueError, match="job 0"):
        run(fail, [(0,)])
