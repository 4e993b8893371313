"""What a fresh process sees of the package `batch_assets`, and what it takes to load its definitions."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import batch_assets, sys
assert "dagster" not in sys.modules
names = dir(batch_assets)
assert "GeneratedDataset" in names
for name in names:
    getattr(batch_assets, name)

from batch_assets.definitions import defs
found = defs()
assert found.get_job_def("example_refresh")
assert not found.metadata.get("plugin_component_types_json")  # no types of components of others are described
assert found.component_tree is not None
assert not {"boto3", "dagster_aws"} & set(sys.modules)

from dagster.components.core.package_entry import discover_package_objects
print([key.to_typename() for key in discover_package_objects(["batch_assets"])])
"""


def test_every_listed_name_can_be_had_the_definitions_load_lightly_and_dagster_finds_the_component_alone() -> None:
    """One process, as its start is dear. `dg` reads every name that `dir()` lists, having imported nothing else."""
    variables = {name: value for name, value in os.environ.items() if name != "BATCH_ASSETS_DEFS"}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=variables)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['batch_assets.GeneratedDataset']"
