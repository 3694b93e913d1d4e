"""Uniform couplings: dynamic routing with one iteration, in one matrix product."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from capsnet.nn.layers import DenseCaps
from capsnet.routing import dynamic_routing
from literal import (
    PATHS,
    array,
    assert_equal,
    assert_kernel_is_its_plain_twin,
    dtype_of,
    layer_and_poses,
    literal_squash,
    literal_votes,
    taking,
)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_uniform_is_the_literal_loop(path: str, shared: bool) -> None:
    layer, poses = layer_and_poses("uniform", shared)
    expected = []
    for u in array(poses):
        u_hat = literal_votes(u, array(layer.weight))
        expected.append(np.stack([literal_squash(sum(vote[j] / 3 for vote in u_hat)) for j in range(3)]))
    with taking(path):
        assert_equal(layer.route(poses).poses, expected)


@pytest.mark.parametrize("shared", [False, True])
def test_the_matrix_product_is_the_sum_of_votes_gradients_too(shared: bool) -> None:
    assert_kernel_is_its_plain_twin(*layer_and_poses("uniform", shared, dtype_of("torch")), "torch", 1e-10)


def test_uniform_is_dynamic_routing_with_one_iteration() -> None:
    layer, u = layer_and_poses("uniform")
    torch.testing.assert_close(layer(u), dynamic_routing(u, layer.weight, iterations=1).poses)


def test_the_trace_has_one_step_of_equal_couplings() -> None:
    layer, u = layer_and_poses("uniform")
    trace = layer.route(u, trace=True).trace
    assert trace is not None
    torch.testing.assert_close(trace.couplings, torch.full((1, 3, 12, 3), 1 / 3).double())
    torch.testing.assert_close(trace.outputs[0], layer(u))


def test_a_single_upper_capsule_gets_everything() -> None:
    layer = DenseCaps(6, 4, 1, 5, routing="uniform")
    trace = layer.route(torch.randn(2, 6, 4), trace=True).trace
    assert trace is not None
    assert (trace.couplings == 1).all()
