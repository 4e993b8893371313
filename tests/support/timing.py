"""How long tests wait, and how large the longest ones are. They run on machines that do other work too."""

from __future__ import annotations

import os

# A wait that is over its limit has failed: what it waits for will not come. Limits are many times what a quiet machine
# needs and say nothing about speed; a test that passes ends before.
PATIENCE = 2.5

# Full sizes of the longest tests: what docs/evidence.md shows. Without it they are shortened to fit a CI run.
SOAK = bool(os.environ.get("BATCH_ASSETS_SOAK"))
