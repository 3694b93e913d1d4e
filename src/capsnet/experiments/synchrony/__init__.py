"""Binding by phase beside routing by agreement: `compare.py` is the experiment, `binding.py` measures which pixels a
network takes together."""
