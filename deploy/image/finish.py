"""Finish the image's folder: `python3 finish.py FOLDER`. FOLDER/env is a virtual environment, FOLDER/project our code.

Takes out what no process of the platform reads, puts the project on Python's path, and imports every module of the
project and what packages import lazily, so that a build without something that is needed fails here. What was imported
gets bytecode, and nothing else: bytecode of all packages would be a tenth of the image.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

# In pyarrow/: RPC, file systems of clouds (the store is read by obstore), formats that no source may have, by the start
# of their names.
ARROW = (
    *("_flight", "_gandiva", "libarrow_flight", "libarrow_python_flight"),
    *("_s3fs", "libarrow_s3", "_azurefs", "_gcsfs", "_hdfs"),
    *("_orc", "_dataset_orc", "_substrait"),
)
# In numpy/_core/: what only numpy's own tests load, by the start of their names.
NUMPY = (
    "_simd.",
    "_multiarray_tests.",
    "_operand_flag_tests.",
    "_rational_tests.",
    "_struct_ufunc_tests.",
    "_umath_tests.",
)
# Stubs, sources, maps of JavaScript, Windows programs.
SUFFIXES = {
    *(".pyi", ".pxd", ".pyx", ".pxi", ".h", ".hpp", ".c", ".cc", ".cpp", ".proto"),
    *(".a", ".map", ".exe"),
}
TESTS = {"tests", "e2e_test"}
# By their place: headers, build tools (setuptools reads setup.cfg for `dg`, which a project here does not have), what
# other projects' tests use, databases that nothing here speaks to, a second Kubernetes client, a second GraphiQL, the
# film that Dagster's UI shows on a first visit (`nux` is off).
FOLDERS = (
    *("pyarrow/include", "pyarrow/src", "numpy/_core/include", "numpy/f2py", "numpy/distutils"),
    *("setuptools", "pkg_resources", "_distutils_hack", "distutils-precedence.pth"),
    *("sqlalchemy/testing", "alembic/testing"),
    *(f"sqlalchemy/dialects/{name}" for name in ("mssql", "oracle")),  # Dagster's migrations import `mysql`
    *("kubernetes/aio", "dagster_webserver/graphiql", "dagster_webserver/webapp/build/Dagster_world.mp4"),
)
# Of the descriptions of 400 services of AWS those that boto3 asks for here (storage, machines, prices, logins) stay.
SERVICES = {
    "ec2",
    "iam",
    "kms",
    "pricing",
    "s3",
    "secretsmanager",
    "service-quotas",
    "signin",
    "ssm",
    "sso",
    "sso-oidc",
    "sts",
}
# What the platform reads: a table written, one queried, one object store each, clients of clouds.
SMOKE = """
import importlib, os, pkgutil, py_compile, sys, tempfile
import batch_assets, resources, gpu_runner
without = {
    "gpu_runner.providers.llama_cpp_server",  # needs the extra `cpu`
    "gpu_runner.fleet_database.migrations.env",  # imported by a migration alone
    "batch_assets.api.database.migrations.env",
}
for package in (batch_assets, resources, gpu_runner):
    for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if found.name not in without and not found.name.endswith("__main__"):
            importlib.import_module(found.name)
import boto3, dagster_aws.s3, dagster_k8s, dagster_postgres, dagster_webserver.app, dagster_graphql, duckdb
import kubernetes.client, kubernetes.config, kubernetes.watch, psycopg2, polars, pyarrow.compute
import pyarrow.csv, pyarrow.dataset, pyarrow.fs, pyarrow.json, pyarrow.parquet
import dagster._cli, dagster._daemon.cli, uvicorn, asyncssh
from alembic.script import ScriptDirectory
places = [("gpu_runner.fleet_database", "migrations"), ("batch_assets.api.database", "migrations")]
places.append(("dagster", "_core/storage/alembic"))
for package, place in places:  # a new database is stamped with the last of them: all are imported
    revisions = os.path.join(os.path.dirname(importlib.import_module(package).__file__), place)
    assert list(ScriptDirectory(revisions).walk_revisions()), revisions
with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "t.parquet")
    table = pyarrow.table({"id": [1, 2, 3], "text": ["a", "b", "c"]})
    pyarrow.parquet.write_table(table, path, compression="zstd")
    assert pyarrow.dataset.dataset(path).count_rows() == 3
    assert polars.scan_parquet(path).select(polars.col("id").sum()).collect().item() == 6
    assert duckdb.sql(f"select count(*) from '{path}'").fetchall() == [(3,)]
    assert polars.from_arrow(table).to_arrow().num_rows == 3

for module in list(sys.modules.values()):
    source = getattr(module, "__file__", None) or ""
    if source.startswith(sys.argv[1] + "/") and source.endswith(".py"):
        # Not compared with its source: nobody writes here, and builds of the same source are the same.
        py_compile.compile(source, doraise=True, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
"""


def unneeded(packages: Path) -> Iterator[Path]:
    """Files and folders of the environment that nothing reads."""
    for path in packages.rglob("*"):
        inside = path.relative_to(packages)
        if path.is_dir():
            if path.name in TESTS and len(inside.parts) > 1:
                yield path
        elif path.suffix in SUFFIXES or (inside.parts[0] == "pyarrow" and path.name.startswith(ARROW)):
            yield path
    for path in (packages / "pyarrow").glob("lib*.so"):  # three copies each: the loader takes libX.so.MAJOR
        yield from (path, *path.parent.glob(f"{path.name}.*.*")) if [*path.parent.glob(f"{path.name}.*")] else ()
    yield from (path for path in (packages / "numpy/_core").iterdir() if path.name.startswith(NUMPY))
    yield from (packages / name for name in FOLDERS if (packages / name).exists())
    yield from (path for path in (packages / "botocore/data").iterdir() if path.is_dir() and path.name not in SERVICES)
    for service in SERVICES:  # boto3 takes the newest version of each, and nothing here asks for another
        yield from sorted(path for path in (packages / "botocore/data" / service).glob("*-*-*"))[:-1]


def size(folder: Path) -> int:
    """Bytes of all files below."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())


def main() -> None:
    """Trim, compile, check; says what was gained."""
    folder = Path(sys.argv[1])
    python = folder / "env" / "bin" / "python"
    (packages,) = (folder / "env" / "lib").glob("python3.*/site-packages")
    before = size(packages)
    for path in sorted(set(unneeded(packages)), reverse=True):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    trimmed = size(packages)
    (packages / "batch_assets_project.pth").write_text(f"{folder / 'project'}\n")
    environment = {**os.environ, "DAGSTER_HOME": "", "DAGSTER_DISABLE_TELEMETRY": "1"}
    subprocess.run([str(python), "-W", "ignore", "-c", SMOKE, str(folder)], check=True, cwd="/", env=environment)
    print(f"packages: {before >> 20} MiB, {trimmed >> 20} MiB trimmed, {size(packages) >> 20} MiB with bytecode")


if __name__ == "__main__":
    main()
