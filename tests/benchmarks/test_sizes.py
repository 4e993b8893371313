"""The counts that `make lint` prints, and the picture of imports."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from support.documents import REPOSITORY

from benchmarks.import_matrix import between_folders, in_order, picture
from benchmarks.sizes import LONG, equal_names, importers, report, with_one_importer


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Two modules of one name; one that only its neighbour imports, in a function; one that is long."""
    for file, text in {
        "batch_assets/tags.py": "",
        "batch_assets/cli/main.py": "def run():\n    from batch_assets.cli import config\n\nimport resources.store\n",
        "batch_assets/cli/config.py": "from batch_assets.tags import A\nfrom gpu_runner.config import B\n",
        "resources/store/__init__.py": "from gpu_runner import config\n",
        "gpu_runner/config.py": "x = 1\n" * (LONG + 1),
    }.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    return tmp_path


def test_the_report_has_floors_importers_equal_names_and_long_modules(project: Path) -> None:
    assert report(project).splitlines() == [
        "batch_assets         6 lines in    3 modules",
        "resources            1 lines in    1 modules",
        "gpu_runner         401 lines in    1 modules",
        "in all             408 lines in    5 modules",
        "2 modules have one importer, 1 of them in the same folder",
        "equal names: config (2)",
        "modules of more than 400 lines (advice):",
        "    401  gpu_runner/config.py",
    ]


def test_an_import_in_a_function_counts_and_a_package_is_no_module_with_one_importer(project: Path) -> None:
    assert with_one_importer(project) == {
        Path("batch_assets/cli/config.py"): Path("batch_assets/cli/main.py"),
        Path("batch_assets/tags.py"): Path("batch_assets/cli/config.py"),
    }
    assert importers(project)[Path("gpu_runner/config.py")] == {
        Path("batch_assets/cli/config.py"),
        Path("resources/store/__init__.py"),
    }


def test_equal_names_are_counted_and_packages_are_not() -> None:
    files = [Path(one) for one in ("a/__init__.py", "b/__init__.py", "a/x.py", "b/x.py", "b/z.py", "c/x.py", "c/a.py")]
    assert equal_names([*files, Path("a/a.py")]) == {"x": 3, "a": 2}


def test_folders_stand_below_those_that_import_them_and_a_circle_is_red(project: Path) -> None:
    (project / "batch_assets/api").mkdir()
    (project / "batch_assets/api/app.py").write_text("import batch_assets.cli.main\n")
    edges = between_folders(importers(project))
    folders = {"batch_assets", "batch_assets/cli", "batch_assets/api", "resources/store", "gpu_runner"}
    assert in_order(folders, edges) == [
        "batch_assets",
        "batch_assets/api",
        "batch_assets/cli",
        "resources/store",
        "gpu_runner",
    ]
    for one, other in (("a", "b"), ("b", "a")):
        (project / f"gpu_runner/{one}").mkdir()
        (project / f"gpu_runner/{one}/x.py").write_text(f"import gpu_runner.{other}.x\n")
    assert picture(importers(project)).count("#c00") == 1


@pytest.mark.slow
def test_no_folder_of_the_product_is_in_a_circle() -> None:
    drawn = picture(importers(REPOSITORY))
    ElementTree.fromstring(drawn)
    assert "#c00" not in drawn
