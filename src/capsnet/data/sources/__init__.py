"""Published datasets, one file each, and the machinery that downloads, verifies and caches them."""
