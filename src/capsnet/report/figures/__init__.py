"""Figures: each is a function from data to a `matplotlib.figure.Figure`; `save` writes one as PNG or SVG.

    byhand.py       Procedure 1 by hand
    comparisons.py  neuron and capsule, sigmoid and squash, routing and attention
    curves.py       training curves
    decoded.py      reconstructions (Fig. 3) and the tweak grid (Fig. 4)
    errors.py       confusion matrix and the most confident mistakes
    gallery.py      lines of images with captions
    outcomes.py     results of experiments: lines, bars and intervals
    pairs.py        overlapping digits, separated (Fig. 5)
    routes.py       routing by iteration (after Fig. A.1)
    speed.py        time of a training step, and how it grows
    style.py        palette, type and files; names.py and tiles.py: shared parts

One colour-blind safe palette has the same meaning everywhere: blue for what is true, vermillion for what is wrong, grey
for the rest. Figures have a light background on every page. No pyplot, and no figure outlives its caller. Class names
come from the user: they are never parsed as mathematics, and a name that the font cannot show becomes a number.
"""

from capsnet.report.figures.curves import training_curves
from capsnet.report.figures.decoded import reconstruction_rows, reconstructions, tweak_grid
from capsnet.report.figures.errors import confusion_matrix, confusions, mistakes, worst_mistakes
from capsnet.report.figures.names import short_name, short_names
from capsnet.report.figures.outcomes import PALETTE, Bar, Interval, Line, Panel, bars, intervals, lines, shades
from capsnet.report.figures.pairs import told_apart
from capsnet.report.figures.routes import contributions, routing
from capsnet.report.figures.speed import step_bill, sweep
from capsnet.report.figures.style import BLUE, PAPER, PER_POINT, VERMILLION, render, save
from capsnet.report.figures.tiles import as_pixels, in_colours

__all__ = [
    "BLUE",
    "PALETTE",
    "PAPER",
    "PER_POINT",
    "VERMILLION",
    "Bar",
    "Interval",
    "Line",
    "Panel",
    "as_pixels",
    "bars",
    "confusion_matrix",
    "confusions",
    "contributions",
    "in_colours",
    "intervals",
    "lines",
    "mistakes",
    "reconstruction_rows",
    "reconstructions",
    "render",
    "routing",
    "save",
    "shades",
    "short_name",
    "short_names",
    "step_bill",
    "sweep",
    "told_apart",
    "training_curves",
    "tweak_grid",
    "worst_mistakes",
]
