"""Datasets that are drawn or composed on the fly."""
