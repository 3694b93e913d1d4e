"""Faster ways to compute the same results, and nothing else; `dispatch` chooses among them.

Every function here has a plain twin that a reader of the paper recognises (`F.conv2d`,
`capsnet.routing.dynamic`); tests hold the two together, gradients too. `with plain():` turns all of it off.

    convolution, bilinear, stem               convolutions with fewer products
    routing, routing_torch, routing_numba     dynamic routing without stored votes
    moments, moments_numba                    the same for EM and variational Bayes routing
    grid, grid_numba                          the same for capsules on grids
    products, lanes, threads, operators       what they are made of: matrix products, vectors, threads, operators
    allocator, private                        memory that stays in the process; private APIs of PyTorch and OpenMP
"""

from capsnet.kernels.dispatch import enabled, plain

__all__ = ["enabled", "plain"]
