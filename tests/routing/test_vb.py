"""Variational Bayes routing is what its equations say, with expectations as a library computes them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import special, stats
from torch import Tensor

from capsnet.nn.functional import matrix_votes, votes
from capsnet.nn.layers import DenseCaps
from capsnet.routing import vb
from capsnet.routing.vb import VBRouting, digamma, entropy, log_rho, update

SIZES = [(1, 1, 1, 1, 1, 1), (2, 6, 3, 4, 5, 6), (3, 12, 10, 2, 4, 3), (1, 5, 7, 3, 1, 5)]  # b i j p q n


def layer_of(sizes: tuple[int, ...], dtype: torch.dtype = torch.float64, **options: Any) -> DenseCaps:
    """A layer in evaluation mode whose parameters and running statistics all matter."""
    _, i, j, p, q, n = sizes
    torch.manual_seed(sum(sizes))
    matrix = options.pop("matrix", False)
    layer = DenseCaps(i, p, j, q, routing=VBRouting(**options), shared=n if n < i else None, matrix=matrix, dtype=dtype)
    with torch.no_grad():
        for tensor in (layer.routing.beta_u, layer.routing.beta_a, layer.routing.running_mean):
            tensor.copy_(torch.randn(j))
        layer.routing.running_var.copy_(torch.rand(j) + 0.5)
    return layer.eval()


def problem(sizes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Lower poses and activations."""
    b, i, _, p, *_ = sizes
    generator = torch.Generator().manual_seed(b + i)
    return torch.randn(b, i, p, generator=generator, dtype=dtype), torch.rand(b, i, generator=generator, dtype=dtype)


# --- The equations, word for word, on NumPy's float64 ---------------------------------------------------------


def literal_vb(V: np.ndarray, a: np.ndarray, iterations: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One example: votes V [i][j][q], activations a [i] → means [j][q], exp E[ln π] H [j], responsibilities [i][j]."""
    lower, upper, dims = V.shape
    R = np.full((lower, upper), 1 / upper)
    for t in range(iterations):
        S = [sum(R[i, j] * a[i] for i in range(lower)) for j in range(upper)]
        mean, weighted, log_rho = np.zeros((upper, dims)), np.zeros(upper), np.zeros((lower, upper))
        for j in range(upper):
            log_pi = special.digamma(1 + S[j]) - special.digamma(sum(1 + s for s in S))
            kappa, nu, log_det = 1 + S[j], 2 + S[j], 0.0
            log_rho[:, j] = log_pi
            for q in range(dims):
                centre = sum(R[i, j] * a[i] * V[i, j, q] for i in range(lower)) / S[j]
                mean[j, q] = (S[j] * centre + 1 * 0) / kappa
                # around the mean of the votes and from there to the prior's, as the paper writes it
                spread = sum(R[i, j] * a[i] * (V[i, j, q] - centre) ** 2 for i in range(lower))
                psi = 1 / (1 + spread + 1 * S[j] / kappa * centre**2)
                log_precision = special.digamma(nu / 2) + math.log(2 * psi)
                log_det += log_precision
                for i in range(lower):
                    distance = 1 / kappa + nu * psi * (V[i, j, q] - mean[j, q]) ** 2
                    log_rho[i, j] += 0.5 * (log_precision - math.log(2 * math.pi) - distance)
            weighted[j] = math.exp(log_pi) * 0.5 * (dims * math.log(2 * math.pi * math.e) - log_det)
        if t == iterations - 1:
            return mean, weighted, R
        R = special.softmax(log_rho, 1)
    raise AssertionError


def check_against_the_loop(layer: DenseCaps, u: Tensor, a: Tensor) -> None:
    routing = layer.routing
    V = (matrix_votes if layer.matrix else votes)(u, layer.weight).detach().numpy()
    every = [literal_vb(V[b], a[b].numpy(), routing.options.iterations) for b in range(len(V))]
    mean, weighted, R = (torch.from_numpy(np.stack(x)) for x in zip(*every, strict=True))
    normed = (weighted - routing.running_mean) / (routing.running_var + vb.EPS).sqrt()
    routed = layer.route(u, a, trace=True)
    assert routed.trace is not None
    torch.testing.assert_close(routed.poses, mean)
    torch.testing.assert_close(routed.trace.couplings[-1], R)
    torch.testing.assert_close(routed.activations, torch.sigmoid(routing.beta_a - routing.beta_u * normed))


@pytest.mark.parametrize("iterations", [1, 2, 3, 4])
@pytest.mark.parametrize("sizes", SIZES)
def test_vb_is_its_equations_word_for_word(sizes: tuple[int, ...], iterations: int) -> None:
    check_against_the_loop(layer_of(sizes, iterations=iterations), *problem(sizes))


def test_vb_with_matrix_poses_is_its_equations_word_for_word() -> None:
    sizes = (2, 6, 3, 16, 16, 6)
    u, a = problem(sizes)
    check_against_the_loop(layer_of(sizes, matrix=True), u / 4, a)


# --- Expectations against a library -----------------------------------------------------------------------------


def test_digamma_is_the_librarys_and_so_is_its_derivative() -> None:
    x = torch.cat([torch.linspace(0.5, 20, 100), torch.logspace(1, 6, 20)]).double().requires_grad_()
    torch.testing.assert_close(digamma(x), torch.special.digamma(x), rtol=1e-10, atol=1e-10)
    (slope,) = torch.autograd.grad(digamma(x).sum(), x)
    torch.testing.assert_close(slope, torch.special.polygamma(1, x.detach()), rtol=1e-8, atol=1e-10)
    assert (digamma(x.float()) - torch.special.digamma(x)).abs().max() < 1e-5


def test_expectations_under_the_posterior_are_the_librarys() -> None:
    u, a = problem(SIZES[1])
    u_hat = votes(u, layer_of(SIZES[1]).weight).detach()
    posterior = update(u_hat, a.unsqueeze(-1).expand(2, 6, 3) / 3)
    nu, psi = posterior.nu[0, 1].item(), posterior.psi[0, 1].numpy()
    # a one-dimensional Wishart distribution is a gamma distribution
    expected = [stats.gamma(nu / 2, scale=2 * x).expect(np.log, limit=200) for x in psi]
    np.testing.assert_allclose(posterior.log_precision[0, 1].numpy(), expected, rtol=1e-5)
    alpha = (1 + a.sum(1)[0] / 3).item()
    dirichlet = stats.dirichlet([alpha] * 3).rvs(200_000, random_state=0)
    assert abs(posterior.log_pi[0, 0].item() - np.log(dirichlet[:, 0]).mean()) < 0.02
    variance = (-posterior.log_precision[0, 1]).exp().numpy()
    np.testing.assert_allclose(entropy(posterior)[0, 1], stats.norm(0, np.sqrt(variance)).entropy().sum())


def test_the_expected_log_density_is_the_mean_of_log_densities() -> None:
    u, a = problem(SIZES[1])
    u_hat = votes(u, layer_of(SIZES[1]).weight).detach()
    posterior = update(u_hat, a.unsqueeze(-1).expand(2, 6, 3) / 3)
    generator = np.random.default_rng(0)
    nu, kappa, m, psi = (x[0, 1].numpy() for x in (posterior.nu, posterior.kappa, posterior.mean, posterior.psi))
    precision = generator.gamma(nu / 2, 2 * psi, (400_000, 5))
    mean = m + generator.standard_normal(precision.shape) / np.sqrt(kappa * precision)
    sampled = stats.norm(mean, 1 / np.sqrt(precision)).logpdf(u_hat[0, 2, 1].numpy()).sum(1).mean()
    ours = log_rho(u_hat, posterior) - posterior.log_pi.unsqueeze(1)
    assert ours[0, 2, 1].item() == pytest.approx(sampled, rel=0.01)


# --- Batch norm, gradients, trace -------------------------------------------------------------------------------


def test_training_normalises_by_the_batch_and_evaluation_by_running_statistics() -> None:
    sizes = (50, 6, 3, 4, 5, 6)
    layer, (u, a) = layer_of(sizes).train(), problem(sizes)
    in_training = [layer.route(u, a).activations for _ in range(60)][-1]
    torch.testing.assert_close(layer.eval().route(u, a).activations, in_training, rtol=1e-2, atol=1e-2)
    alone = torch.cat([layer.route(u[k : k + 1], a[k : k + 1]).activations for k in range(3)])
    torch.testing.assert_close(alone, layer.route(u, a).activations[:3])


def test_evaluation_and_the_trace_leave_the_running_statistics_as_training_does() -> None:
    layers, (u, a) = [layer_of(SIZES[1]) for _ in range(3)], problem(SIZES[1])
    before = layers[0].routing.running_mean.clone()
    layers[0].route(u, a)
    assert torch.equal(layers[0].routing.running_mean, before)
    layers[1].train().route(u, a)
    layers[2].train().route(u, a, trace=True)
    assert not torch.equal(layers[1].routing.running_mean, before)
    assert torch.equal(layers[1].routing.running_mean, layers[2].routing.running_mean)


def test_a_single_example_can_be_trained_on() -> None:
    layer, (u, a) = layer_of(SIZES[1]).train(), problem(SIZES[1])
    layer.route(u[:1], a[:1]).activations.sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.isfinite().all()


@pytest.mark.parametrize("training", [False, True])
def test_gradients_flow_through_every_iteration(training: bool) -> None:
    sizes = (2, 4, 3, 2, 3, 4)
    layer, (u, a) = layer_of(sizes).train(training), problem(sizes)
    parameters = [layer.weight, layer.routing.beta_u, layer.routing.beta_a]

    def route(u: Tensor, a: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
        return layer.route(u, a)[:2]

    assert torch.autograd.gradcheck(route, (u.requires_grad_(), a.requires_grad_(), *parameters))


def test_variances_do_not_collapse() -> None:
    """A parent with a single child, and one that receives nothing, keep the variance of the prior or more."""
    layer = layer_of((2, 1, 3, 4, 5, 1))
    u, _ = problem((2, 1, 3, 4))
    for a in (1.0, 0.0):
        trace = layer.route(u, torch.full((2, 1), a).double(), trace=True, iterations=10).trace
        assert trace is not None
        assert trace.variances is not None
        assert trace.variances.min() > 1 / 3 - 1e-9
