"""Models on disk: checkpoints, the shipped models, transfer to other networks, export."""
