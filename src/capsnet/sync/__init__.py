"""Synchronisation: layers whose units have an amplitude and a phase, and operators that decouple norm from angle.

    waves.py      a unit with amplitude and phase; complex convolution and complex linear layer
    kuramoto.py   oscillators on a grid with a learnt coupling kernel
    decoupled.py  convolution as h(‖w‖, ‖x‖) · g(angle)

Phases are pairs of real tensors, never complex ones, so that every layer compiles and exports.
"""

from capsnet.sync.decoupled import DecoupledConv2d
from capsnet.sync.kuramoto import KuramotoLayer, Oscillations
from capsnet.sync.waves import ComplexConv2d, ComplexLinear, Waves

__all__ = ["ComplexConv2d", "ComplexLinear", "DecoupledConv2d", "KuramotoLayer", "Oscillations", "Waves"]
