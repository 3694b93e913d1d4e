"""Faster ways to compute the same results, and nothing else; `dispatch` chooses among them.

Every function here has a plain twin that a reader of the paper recognises (`F.conv2d`,
`capsnet.routing.dynamic`); tests hold the two together, gradients too. `with plain():` turns all of it off.
"""

from capsnet.kernels.dispatch import enabled, plain

__all__ = ["enabled", "plain"]
