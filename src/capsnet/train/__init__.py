"""Training: configs and presets, the loop, and the folder that a run has to itself."""
