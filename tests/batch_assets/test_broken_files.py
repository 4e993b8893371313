"""One file that cannot be used is one broken dataset: all others are declared, loaded and looked after."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml
from support.defs_folders import COMPONENT, WRONG, attributes, own_folder, write, write_text

from batch_assets.definitions import defs
from batch_assets.orchestration.broken_files import CHECK, broken_key
from batch_assets.spec.discovery import declarations, known_datasets
from batch_assets.spec.errors import SpecError

pytestmark = pytest.mark.filterwarnings("ignore::dagster.BetaWarning")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, folder in {"DAGSTER_HOME": "home", "BATCH_ASSETS_STORE": "store"}.items():
        monkeypatch.setenv(name, str(tmp_path / folder))
    (tmp_path / "home").mkdir()
    return tmp_path


@pytest.fixture(params=["BATCH_ASSETS_DEFS", "the project's own folder"])
def folder(request: pytest.FixtureRequest, home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the dataset `good`, loaded by us or by Dagster."""
    if request.param == "BATCH_ASSETS_DEFS":
        found = home / "defs"
        monkeypatch.setenv("BATCH_ASSETS_DEFS", str(found))
    else:
        found = own_folder(home / "project", monkeypatch)
    write(found, "good")
    return found


def loaded() -> dg.Definitions:
    with warnings.catch_warnings(action="ignore", category=dg.BetaWarning):
        found: dg.Definitions = defs()
        found.get_repository_def()
    return found


def assets(found: dg.Definitions) -> set[str]:
    return {key.to_user_string() for key in found.resolve_asset_graph().get_all_asset_keys()}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_file_that_cannot_be_used_is_an_asset_that_says_so_and_all_others_load(folder: Path, wrong: str):
    before = assets(loaded())
    break_it, word = WRONG[wrong]
    break_it(folder)
    found = loaded()
    assert assets(found) == before | {"bad/defs_yaml"}
    node = found.resolve_asset_graph().get(broken_key("bad"))
    assert node.group_name == "bad"
    assert word in (node.description or "") and str(folder.resolve() / "bad") in (node.description or "")
    assert found.resolve_job_def("good_refresh")
    assert known_datasets().keys() == {"good"}


def test_datasets_that_read_each_other_in_a_circle_are_broken_and_those_that_read_them_are_not(folder: Path):
    for name, read in (("a", "b"), ("b", "c"), ("c", "a"), ("reads", "a"), ("fine", "good")):
        write(folder, name, source={"dataset": read})
    found = loaded()
    assert broken_now(found) == {"a", "b", "c"}
    assert "found a → b → c → a" in (found.resolve_asset_graph().get(broken_key("a")).description or "")
    assert known_datasets().keys() == {"good", "reads", "fine"}


@pytest.mark.parametrize("kind", ["dataset", "prompts", "rows", "source", "dead_letters"])
def test_a_circle_of_assets_of_datasets_is_one_too(folder: Path, kind: str):
    for name, source in (("a", {"asset": f"b/{kind}"}), ("b", {"dataset": "a"}), ("own", {"asset": f"own/{kind}"})):
        write(folder, name, source=source)
    write(folder, "fine", source={"asset": f"good/{kind}"})
    found = loaded()
    assert broken_now(found) == {"a", "b", "own"}
    assert "own → own" in (found.resolve_asset_graph().get(broken_key("own")).description or "")
    assert known_datasets().keys() == {"good", "fine"}
    assert found.resolve_asset_graph().toposorted_asset_keys


def test_a_circle_through_a_dataset_that_goes_on_as_it_was_last_known_is_none_of_dagsters(folder: Path):
    write(folder, "a")
    write(folder, "b", source={"dataset": "a"})
    loaded()
    (folder / "b" / "defs.yaml").write_text("type: [")
    write(folder, "a", source={"dataset": "b"})
    found = loaded()
    assert broken_now(found) == {"a", "b"}
    assert "a → b → a" in (found.resolve_asset_graph().get(broken_key("a")).description or "")
    assert known_datasets().keys() == {"a", "b", "good"}
    assert found.resolve_asset_graph().toposorted_asset_keys


def broken_now(found: dg.Definitions) -> set[str]:
    return {name.partition("/")[0] for name in assets(found) if name.endswith("/defs_yaml")}


def test_the_projects_own_folder_is_still_loaded_by_dagster(home: Path, monkeypatch: pytest.MonkeyPatch):
    folder = own_folder(home / "project", monkeypatch)
    write(folder, "good")
    WRONG["no source"][0](folder)
    (folder / "more.py").write_text("import dagster as dg\n\n@dg.asset\ndef of_others(): ...\n")
    found = loaded()
    assert found.component_tree is not None
    assert {"of_others", "good/rows", "bad/defs_yaml"} <= assets(found)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("import nothing_of_this_name\n", "nothing_of_this_name"),
        ("def (:\n", "SyntaxError"),
        ("import dagster as dg\n\nvalue = dg.Definitions(assets=[3])\n", "CheckError"),
    ],
    ids=["an import that fails", "no Python", "definitions that Dagster refuses"],
)
def test_a_module_of_others_that_cannot_be_loaded_stops_no_dataset(
    home: Path, monkeypatch: pytest.MonkeyPatch, text: str, word: str
):
    folder = own_folder(home / "project", monkeypatch)
    write(folder, "good")
    (folder / "theirs").mkdir()
    (folder / "theirs" / "code.py").write_text(text)
    found = loaded()
    (name,) = broken_now(found)
    assert word in (found.resolve_asset_graph().get(broken_key(name)).description or "")
    assert "good/rows" in assets(found)
    found.resolve_job_def("good_refresh")


def test_a_component_of_others_that_fails_when_it_is_built_stops_no_dataset(
    home: Path, monkeypatch: pytest.MonkeyPatch
):
    """Dagster then loads nothing of the folder: our datasets are loaded by ourselves."""
    folder = own_folder(home / "project", monkeypatch)
    write(folder, "good")
    write_text(folder / "theirs", "type: dagster.PythonScriptComponent\nattributes: {nonsense: 1}\n")
    found = loaded()
    assert broken_now(found) == {"defs"}
    assert {"good/prompts", "good/rows", "good/dataset"} <= assets(found)


def test_components_of_others_are_passed_over_in_a_folder_that_is_not_the_projects(
    home: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("BATCH_ASSETS_DEFS", str(home / "defs"))
    write(home / "defs", "good")
    write(home / "defs", "theirs", kind="dagster_dbt.DbtProjectComponent")
    write(home / "defs", "own_class", kind="acme.GeneratedDataset")
    assert (declarations().datasets.keys(), declarations().broken) == ({"good"}, ())


def test_a_folder_without_datasets_loads(home: Path, monkeypatch: pytest.MonkeyPatch):
    own_folder(home / "project", monkeypatch)
    assert broken_now(loaded()) == set()


def test_hidden_folders_are_passed_over_as_dagster_does(folder: Path):
    """A ConfigMap that is mounted has its files in `..2026_01_01`, with links to them."""
    write(folder / "..2026_01_01", "linked", description="by a link")
    (folder / "linked").symlink_to("..2026_01_01/linked")
    found = declarations()
    assert (found.datasets.keys(), found.broken) == ({"good", "linked"}, ())
    assert {"good/rows", "linked/rows"} <= assets(loaded())


def test_defs_check_of_dagster_fails_for_a_broken_file(folder: Path, monkeypatch: pytest.MonkeyPatch):
    WRONG["no source"][0](folder)
    monkeypatch.setenv("DAGSTER_IS_DEFS_VALIDATION_CLI", "1")
    with pytest.raises(SpecError, match="source: expected a value"):
        loaded()


def test_a_copy_that_was_not_renamed_breaks_the_copy_and_not_the_dataset(folder: Path):
    WRONG["a name used twice"][0](folder)
    found = declarations()
    assert found.datasets.keys() == {"good"}
    assert [one.name for one in found.broken] == ["bad"]
    assert found.broken_named("bad") is found.broken[0]
    assert found.broken_named("good") is None


def test_where_neither_folder_has_the_name_both_files_are_broken_and_told_of_each_other(folder: Path):
    text = write(folder, "shared").read_text()
    (folder / "shared").rename(folder / "one")
    write_text(folder / "two", text)
    found = declarations()
    assert found.datasets.keys() == {"good"}
    assert [one.name for one in found.broken] == ["shared", "two"]
    for one, other in zip(found.broken, reversed(found.broken), strict=True):
        assert f"found 'shared', which {other.file} has, too" in str(one.error)
    assert found.broken_named("shared") is found.broken[0]


def test_broken_files_have_names_of_their_own(folder: Path):
    for place in ("a/deep", "b/deep", "c/deep"):
        write_text(folder / place, "type: [\n")
    assert [one.name for one in declarations().broken] == ["deep", "deep_2", "deep_3"]
    assert broken_now(loaded()) == {"deep", "deep_2", "deep_3"}


def test_a_broken_file_is_called_by_the_name_that_stands_in_it(folder: Path):
    text = write(folder, "capitals", model="").read_text()
    (folder / "capitals").rename(folder / "towns")
    write_text(folder / "cities", text.replace("capitals", "rivers") + "}\n")
    found = declarations()
    assert [one.name for one in found.broken] == ["rivers", "capitals"]
    for name in ("capitals", "towns", "rivers", "cities"):
        assert found.broken_named(name)


def test_a_dataset_whose_file_is_broken_goes_on_as_it_was_last_known_and_reads_no_source(folder: Path):
    write(folder, "good", budget_usd=3.5)
    before = assets(loaded())
    write_text(folder / "good", "type: [\n")
    found = loaded()
    assert assets(found) == before | {"good/defs_yaml"}
    assert found.resolve_asset_graph().get(broken_key("good")).group_name == "good"
    assert known_datasets()["good"][0].budget_usd == 3.5
    assert "good" not in declarations().datasets
    with dg.DagsterInstance.ephemeral() as instance:
        done = found.resolve_job_def("good_refresh").execute_in_process(instance=instance, raise_on_error=False)
        (failed,) = [event for event in done.all_events if event.event_type == dg.DagsterEventType.STEP_FAILURE]
    assert not done.success
    assert "expected YAML" in str(failed.step_failure_data.error)
    write(folder, "good", budget_usd=4.5)
    assert assets(loaded()) == before
    assert known_datasets()["good"][0].budget_usd == 4.5


def several(*documents: dict[str, Any]) -> str:
    return yaml.safe_dump_all([{"type": COMPONENT, "attributes": one} for one in documents])


def test_the_documents_of_one_file_are_datasets_of_their_own(folder: Path):
    write_text(folder / "chain", several(attributes("topics"), attributes("answers", budget_usd=3.5)))
    found = loaded()
    assert {"topics/rows", "answers/rows", "good/rows"} <= assets(found)
    assert found.resolve_job_def("answers_refresh")
    assert declarations().datasets["answers"][1] == declarations().datasets["topics"][1] == folder.resolve() / "chain"


def test_every_wrong_document_of_a_file_is_named_with_its_dataset_and_found_by_it(folder: Path):
    documents = [attributes("topics", nonsense=1), attributes("answers"), attributes("grades", model="")]
    write_text(folder / "chain", several(*documents) + "---\nattributes: {}\n")
    (broken,) = declarations().broken
    said = [str(problem).partition(": expected")[0] for problem in broken.error.problems]
    assert said == ["document 1 (topics): nonsense", "document 3 (grades): model", "document 4: type"]
    for name in ("topics", "answers", "grades", "chain"):
        assert declarations().broken_named(name) is not None
    assert declarations().broken_named("good") is None


def test_a_file_of_one_document_is_called_this_file_and_no_document(folder: Path):
    write(folder, "bad", nonsense=1)
    assert str(declarations().broken[0].error.problems[0]).startswith("nonsense: ")


def test_all_datasets_of_a_broken_file_go_on_as_they_were_last_known(folder: Path):
    write_text(folder / "chain", several(attributes("topics"), attributes("answers", budget_usd=3.5)))
    before = assets(loaded())
    write_text(folder / "chain", several(attributes("topics", model=""), attributes("answers", budget_usd=9.5)))
    assert assets(loaded()) == before | {"topics/defs_yaml"}
    assert {name: spec.budget_usd for name, (spec, _) in known_datasets().items() if name != "good"} == {
        "topics": None,
        "answers": 3.5,
    }


def test_a_copy_does_not_take_the_place_of_a_dataset_whose_file_is_broken(folder: Path):
    write(folder, "good", budget_usd=3.5)
    WRONG["a name used twice"][0](folder)
    before = loaded()
    assert broken_now(before) == {"bad"}
    write_text(folder / "good", "- broken\n")
    assert broken_now(loaded()) == {"good", "bad"}
    assert (known_datasets()["good"][0].budget_usd, known_datasets()["good"][1]) == (3.5, folder.resolve() / "good")
    assert declarations().datasets == {}


def test_nor_does_it_where_nothing_is_known_of_before(folder: Path):
    WRONG["a name used twice"][0](folder)
    write_text(folder / "good", "type: batch_assets.GeneratedDataset\nattributes:\n  name: good\n")
    assert [one.name for one in declarations().broken] == ["good", "bad"]
    assert declarations().datasets == {} == known_datasets()


def test_a_broken_file_takes_no_name_from_a_dataset_that_had_it_before(folder: Path):
    """It stands in the file, but neither was it this dataset, nor is it in the folder of that name."""
    write_text(folder / "draft", "attributes:\n  name: good\n")
    found = declarations()
    assert (found.datasets.keys(), [one.name for one in found.broken]) == ({"good"}, ["draft"])


def test_a_dataset_that_was_moved_is_declared_at_its_new_place(folder: Path):
    loaded()
    (folder / "good").rename(folder / "moved")
    assert known_datasets()["good"][1] == folder.resolve() / "moved"
    assert broken_now(loaded()) == set()


def test_nothing_is_kept_where_there_is_no_home(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DAGSTER_HOME", "/proc/nowhere")
    assert "good/rows" in assets(loaded())


def test_the_sensor_reports_a_failed_check_once_for_each_change(folder: Path):
    WRONG["no source"][0](folder)
    cursor = None
    said = []
    for _ in range(2):
        (sensor,) = [one for one in loaded().sensors or () if one.name == "broken_files"]
        assert isinstance(sensor, dg.SensorDefinition)
        with dg.build_sensor_context(dg.DagsterInstance.ephemeral(), cursor=cursor) as context:
            found = sensor.evaluate_tick(context)
        cursor = found.cursor
        said.append([(one.asset_key, one.check_name, one.passed) for one in found.asset_events])
        assert found.skip_message == "cannot be used: bad"
    assert said == [[(broken_key("bad"), CHECK, False)], []]
    write(folder, "bad")
    assert "broken_files" not in {one.name for one in loaded().sensors or ()}


def test_an_unchanged_file_is_not_read_again_whether_it_can_be_used_or_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    WRONG["no source"][0](folder)
    before = declarations()
    monkeypatch.setattr("batch_assets.spec.discovery.read_documents", lambda _: pytest.fail("read again"))
    after = declarations()
    assert (after.datasets.keys(), after.broken[0].error) == (before.datasets.keys(), before.broken[0].error)
