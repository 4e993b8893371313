"""Each error for the user ends a command with its message, without a traceback, and with its class's exit status."""

from __future__ import annotations

import socket
import sqlite3
from pathlib import Path

import pytest
import typer
import yaml
from typer.testing import CliRunner, Result

from batch_assets.cli.demos.demo import NoModel
from batch_assets.cli.demos.demo_fleet import DagsterRuns
from batch_assets.cli.main import app
from batch_assets.cli.user_errors import CommandError, user_errors
from batch_assets.file_permissions import AccessError
from batch_assets.local_dagster.dagster_client import LaunchError
from batch_assets.local_dagster.home import StackError
from batch_assets.settings import SettingError
from batch_assets.snapshot.source.errors import SourceError
from batch_assets.spec.deadline import InvalidDeadline
from batch_assets.spec.errors import Problem, SpecError
from batch_assets.spec.request_options import InvalidTag
from gpu_runner.errors import ExitStatus, UserFacingError
from gpu_runner.fleet_database.database import FleetDatabase
from gpu_runner.fleet_database.migrations import VERSION_TABLE, FleetDatabaseTooNew
from gpu_runner.providers.base import ProviderUnclear
from resources.endpoints import EndpointsError
from resources.fleet.fleet_config import FleetConfigError
from resources.objects.opening import CorruptObject, StoreError
from resources.objects.store_health import StoreAway
from resources.pricing.price_files import PricingError

SPEC = {
    "name": "haiku",
    "source": {"grid": {"topic": ["rain", "snow"]}},
    "prompt": {"user": "A haiku about {{ topic }}."},
    "model": "m",
}
TEXT = "expected [one] thing, found another"
ERRORS = [
    *(kind(TEXT) for kind in (
        AccessError, CommandError, CorruptObject, DagsterRuns, EndpointsError, FleetConfigError, LaunchError, NoModel,
        PricingError, SettingError, SourceError, StackError, StoreAway, StoreError,
    )),
    FleetDatabaseTooNew("9999"),
    InvalidDeadline("Say more."),
    InvalidTag("batch/deadline", TEXT),
    SpecError("defs.yaml", [Problem("model", "text", "nothing")]),
]  # fmt: skip


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_for_the_user_is_its_message_and_its_exit_status(
    error: UserFacingError, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(typer.Exit) as ended, user_errors():
        raise error
    assert ended.value.exit_code == type(error).exit_status
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", f"{error}\n")


def test_the_exit_status_is_the_one_of_the_class(capsys: pytest.CaptureFixture[str]):
    class Failed(UserFacingError):
        exit_status = ExitStatus.FAILED

    with pytest.raises(typer.Exit) as ended, user_errors():
        raise Failed("2 of 3 rows differ")
    assert ended.value.exit_code == 1
    assert capsys.readouterr().err == "2 of 3 rows differ\n"


def test_an_error_for_the_user_is_found_behind_the_one_that_was_raised_from_it(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(typer.Exit) as ended, user_errors():
        try:
            try:
                raise FleetDatabaseTooNew("9999")
            except ValueError as error:
                raise RuntimeError("a resource cannot be made") from error
        except RuntimeError as error:
            raise RuntimeError("a step cannot begin") from error
    assert ended.value.exit_code == 2
    assert capsys.readouterr().err == f"{FleetDatabaseTooNew('9999')}\n"


def test_an_error_of_ours_while_one_for_the_user_was_handled_is_raised():
    with pytest.raises(TypeError, match="a bug"), user_errors():
        try:
            raise StoreError(TEXT)
        except StoreError:
            raise TypeError("a bug")  # noqa: B904  # as a mistake in a handler does


def test_a_class_that_only_has_the_name_of_one_is_none_for_the_user():
    with pytest.raises(Exception, match="inner") as raised, user_errors():
        raise type("PricingError", (Exception,), {})("inner")
    assert not isinstance(raised.value, typer.Exit)


@pytest.mark.parametrize("error", [RuntimeError("a bug"), ValueError("no"), ProviderUnclear("lost")])
def test_an_error_that_is_not_for_the_user_is_raised(error: Exception):
    with pytest.raises(type(error)), user_errors():
        raise error


def test_a_database_that_does_not_answer_is_said_without_its_statement(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(typer.Exit) as ended, user_errors():
        raise sqlite3.OperationalError("unable to open database file")
    assert ended.value.exit_code == 2
    assert "a database cannot be used: unable to open database file. Look at" in capsys.readouterr().err


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A new home with one dataset, `haiku`."""
    for name, folder in {"DAGSTER_HOME": "home", "BATCH_ASSETS_STORE": "store", "BATCH_ASSETS_DEFS": "defs"}.items():
        monkeypatch.setenv(name, str(tmp_path / folder))
    for name in ("BATCH_ASSETS_FLEET_DB", "BATCH_ASSETS_ENDPOINT", "BATCH_ASSETS_GROUP"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("BATCH_ASSETS_FLEET", str(tmp_path / "fleet.yaml"))
    (tmp_path / "fleet.yaml").write_text("simulated: default\n")
    (tmp_path / "home").mkdir(mode=0o700)
    declare(tmp_path, SPEC)
    return tmp_path


def declare(home: Path, attributes: object) -> None:
    file = home / "defs" / "haiku" / "defs.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump({"type": "batch_assets.GeneratedDataset", "attributes": attributes}))


def ask(*words: str) -> Result:
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "200"})


def refused(result: Result) -> str:
    """What was said on standard error by a command that ended with status 2."""
    assert result.exit_code == 2, (result.output, result.exception)
    assert (result.stdout, "Traceback" in result.stderr) == ("", False)
    return result.stderr


def test_a_wrong_spec_is_answered(home: Path):
    declare(home, {**SPEC, "model": 3})
    assert "model: expected text, found 3 (a number)" in refused(ask("plan", "haiku"))


def test_a_source_that_is_not_there_is_answered(home: Path):
    declare(home, {**SPEC, "source": {"path": "nowhere.csv"}})
    for command in ("plan", "offers", "preview"):
        assert "haiku: " in (said := refused(ask(command, "haiku"))) and "nowhere.csv" in said


def test_a_wrong_fleet_yaml_is_answered(home: Path):
    (home / "fleet.yaml").write_text("max_instances: many\n")
    for command in ("plan", "offers"):
        assert "fleet.yaml: max_instances: " in refused(ask(command, "haiku"))


def test_a_wrong_price_history_is_answered(home: Path):
    (home / "fleet.yaml").write_text("simulated: default\nprices: {history: prices.csv}\n")
    (home / "prices.csv").write_text("provider,price\n")
    said = refused(ask("offers", "haiku"))
    assert "prices.csv, line 1: expected the columns" in said


def test_a_damaged_list_of_endpoints_is_answered(home: Path):
    (home / "home" / "endpoints.json").write_text("{")
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert "endpoints.json" in refused(ask("run", "haiku", "--endpoint", url))


def test_a_group_that_is_not_there_is_answered(home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("BATCH_ASSETS_GROUP", "no-such-group")
    said = refused(ask("ui"))
    assert "BATCH_ASSETS_GROUP: expected a group of this machine, found 'no-such-group'" in said


def test_a_wrong_setting_is_answered(home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("BATCH_ASSETS_FLEET_DB", "postgresql://user:secret@host:port/name")
    said = refused(ask("fleet"))
    assert "BATCH_ASSETS_FLEET_DB: expected a URL like" in said and "secret" not in said


def test_a_wrong_dagster_yaml_is_answered(home: Path):
    (home / "home" / "dagster.yaml").write_text("telemetry: {enabled: maybe}\n")
    assert "telemetry" in refused(ask("status", "haiku"))


def test_a_fleet_database_of_a_later_version_is_answered(home: Path):
    file = home / "home" / "fleet.db"
    FleetDatabase(f"sqlite:///{file}").close()
    with sqlite3.connect(file) as connection:
        connection.execute(f"UPDATE {VERSION_TABLE} SET version_num = '9999'")
    connection.close()
    assert "found 9999: a later version of batch-assets has written it" in refused(ask("fleet"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--deadline", "never"], "--deadline: expected a time after the request"),
        (["--budget-usd", "-1"], "--budget-usd: expected US dollars above 0, found '-1.0'"),
        (["--objective", "best"], "--objective: expected cheapest, fastest, efficient, found 'best'"),
        (["--max-instances", "0"], "--max-instances: expected a whole number from 1 to 999, found '0'"),
    ],
)
def test_a_wrong_option_is_named_as_it_was_written(words: list[str], said: str, home: Path):
    assert refused(ask("plan", "haiku", *words)).startswith(said)
