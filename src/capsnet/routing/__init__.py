"""Routing: how lower capsules decide which upper capsules to send their output to. One file per algorithm.

Names are imported when they are first used, so that configs can name options without importing torch.
"""

from typing import TYPE_CHECKING

from capsnet.lazy import exports
from capsnet.routing.options import DynamicOptions, IterativeOptions, RoutingOptions

if TYPE_CHECKING:
    from capsnet.routing.base import (
        ALL,
        ROUTINGS,
        Parents,
        Routed,
        Routing,
        Sizes,
        Trace,
        create,
        options_for,
        register,
    )
    from capsnet.routing.dynamic import DynamicRouting, dynamic_routing

__all__ = [
    "ALL",
    "ROUTINGS",
    "DynamicOptions",
    "DynamicRouting",
    "IterativeOptions",
    "Parents",
    "Routed",
    "Routing",
    "RoutingOptions",
    "Sizes",
    "Trace",
    "create",
    "dynamic_routing",
    "options_for",
    "register",
]
__getattr__, __dir__ = exports(
    __name__,
    {
        "base": (
            *("ALL", "ROUTINGS", "Parents", "Routed", "Routing", "Sizes", "Trace"),
            *("create", "options_for", "register"),
        ),
        "dynamic": ("DynamicRouting", "dynamic_routing"),
    },
)
