"""The paper's equations, capsule layers and losses as ordinary PyTorch functions and modules."""
