"""Training: configs and presets, the training loop, and run folders."""
