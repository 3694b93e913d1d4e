"""Binding by phase and by routing: `compare.py` is the experiment, `binding.py` measures the groups of pixels."""
