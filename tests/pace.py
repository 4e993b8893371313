"""How long tests wait, and how large the longest ones are. They run on machines that do other work too."""

from __future__ import annotations

import os

# Limits of waiting are what a machine that does nothing else needs, with room to spare. A test that passes ends before;
# on a busy machine the same work was seen to take twice as long and more.
PATIENCE = 2.5

# Full sizes of the longest tests: what docs/evidence.md shows. Without it they are shortened to fit a CI run.
SOAK = bool(os.environ.get("BATCH_ASSETS_SOAK"))
