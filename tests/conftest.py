"""What all tests share: Hypothesis without a stopwatch, and with the same examples every time in CI."""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("capsnet", deadline=None, derandomize="CI" in os.environ, max_examples=60)
settings.load_profile("capsnet")
