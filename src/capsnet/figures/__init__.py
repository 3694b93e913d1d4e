"""Pictures: each is a function from data to a `matplotlib.figure.Figure`; `save` writes one as PNG or SVG.

    byhand.py   Procedure 1 by hand; beside.py: a neuron, a sigmoid, attention beside it
    curves.py   how a training went
    errors.py   what is confused with what, and the worst mistakes
    outcomes.py what experiments come to: lines and bars
    painted.py  reconstructions (the paper's Fig. 3) and the tweak grid (Fig. 4)
    pairs.py    two digits on one canvas, told apart (Fig. 5)
    routes.py   how routing went (after the appendix's Fig. A.1)
    speed.py    where a training step's time goes, and how it grows
    style.py    palette, type and files; names.py and tiles.py: what the others are put together from

One palette, safe for colour-blind eyes, means the same everywhere: blue is what is there, vermillion what was named
wrongly, grey the rest. Pictures keep their light paper, so they look the same on a light page, a dark one and a
slide. No pyplot and no figure that outlives its caller. Class names are the user's: they are never read as
mathematics, and where DejaVu lacks their letters the picture shows the class's number instead.
"""

from capsnet.figures.curves import training_curves
from capsnet.figures.errors import confusion_matrix, confusions, mistakes, worst_mistakes
from capsnet.figures.names import shown, shown_all
from capsnet.figures.outcomes import PALETTE, Bar, Line, Panel, bars, lines, shades
from capsnet.figures.painted import painted_beside, reconstructions, tweak_grid
from capsnet.figures.pairs import told_apart
from capsnet.figures.routes import contributions, routing
from capsnet.figures.speed import step_bill, sweep
from capsnet.figures.style import BLUE, PAPER, PER_POINT, VERMILLION, render, save
from capsnet.figures.tiles import as_pixels, in_colours

__all__ = [
    "BLUE",
    "PALETTE",
    "PAPER",
    "PER_POINT",
    "VERMILLION",
    "Bar",
    "Line",
    "Panel",
    "as_pixels",
    "bars",
    "confusion_matrix",
    "confusions",
    "contributions",
    "in_colours",
    "lines",
    "mistakes",
    "painted_beside",
    "reconstructions",
    "render",
    "routing",
    "save",
    "shades",
    "shown",
    "shown_all",
    "step_bill",
    "sweep",
    "told_apart",
    "training_curves",
    "tweak_grid",
    "worst_mistakes",
]
