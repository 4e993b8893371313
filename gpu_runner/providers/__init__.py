"""Where engines run: one file per provider."""
