"""What a fresh process sees of the package `batch_assets`, and what it takes to load its definitions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import pathlib, sys
import batch_assets
assert "dagster" not in sys.modules
names = dir(batch_assets)
assert "GeneratedDataset" in names
for name in names:
    getattr(batch_assets, name)

from batch_assets.definitions import defs
import resources.fleet.resource
found = defs()
assert found.get_job_def("example_refresh")
assert not found.metadata.get("plugin_component_types_json")  # no types of components of others are described
assert found.component_tree is not None
heavy = {"boto3", "botocore", "dagster_aws", "asyncssh", "cryptography"} & set(sys.modules)
assert not heavy, heavy  # neither stores on S3 nor rented machines are configured

from dagster.components.core.package_entry import discover_package_objects
print([key.to_typename() for key in discover_package_objects(["batch_assets"])])

from batch_assets.api.front_door import build_front_door
from batch_assets.api.settings import ApiSettings
build_front_door(ApiSettings(pathlib.Path(sys.argv[1]), "s", f"sqlite:///{sys.argv[1]}/api.db"))
assert not [name for name in sys.modules if name.startswith("opentelemetry.sdk")]  # no collector is configured
"""


@pytest.mark.slow
def test_what_a_fresh_process_imports_is_what_it_needs_and_dagster_finds_the_component_alone(tmp_path: Path) -> None:
    """The package's names, the definitions, and a front door. One process, as its start is dear.

    `dg` reads every name that `dir()` lists, having imported nothing else.
    """
    left_out = ("BATCH_ASSETS_DEFS", "OTEL_")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=variables)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['batch_assets.GeneratedDataset']"
