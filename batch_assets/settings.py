"""Where things are on this machine, read from the environment once per use. No secrets here."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import urlsplit

from gpu_runner.client.answers.answer_limit import LARGEST_ANSWER
from gpu_runner.errors import ExitStatus, UserFacingError

FLEET_DB = "BATCH_ASSETS_FLEET_DB"
PROJECT = Path(__file__).resolve().parent.parent


class SettingError(UserFacingError):
    """An environment variable holds what it must not."""

    exit_status = ExitStatus.WRONG_REQUEST


def dagster_home() -> Path:
    """Folder of Dagster's own state: DAGSTER_HOME, else `.dagster_home` in the project."""
    return Path(os.environ.get("DAGSTER_HOME") or PROJECT / ".dagster_home").resolve()


def store_root() -> str:
    """Root of the store: BATCH_ASSETS_STORE (a folder or s3://bucket/prefix), else `data` in the project."""
    return os.environ.get("BATCH_ASSETS_STORE") or str(PROJECT / "data")


def viewer_url() -> str:
    """Where people reach `batch-assets view`: BATCH_ASSETS_VIEWER_URL, without a slash at its end; "": nowhere.

    Raises SettingError.
    """
    named = (os.environ.get("BATCH_ASSETS_VIEWER_URL") or "").rstrip("/")
    if named and not re.fullmatch(r"https?://[^\s/?#@]+", named):
        raise SettingError(
            "BATCH_ASSETS_VIEWER_URL: expected http://host:port or https://host, as http://127.0.0.1:3002, "
            f"found {named[:80]!r}"
        )
    return named


def fleet_is_shared() -> bool:
    """Whether the fleet's tables are somewhere that other computers may use, too."""
    return bool(os.environ.get(FLEET_DB))


def fleet_database() -> str:
    """SQLAlchemy URL of the fleet's tables: BATCH_ASSETS_FLEET_DB, else SQLite in DAGSTER_HOME."""
    named = os.environ.get(FLEET_DB) or ""
    try:
        _ = urlsplit(named).port
    except ValueError:  # never the address itself: there may be a password in it
        expected = "a URL like postgresql://host:5432/name or sqlite:////path/fleet.db"
        raise SettingError(f"{FLEET_DB}: expected {expected}, found one that cannot be read") from None
    return named or f"sqlite:///{dagster_home() / 'fleet.db'}"


def capacity_seconds() -> float:
    """How often the capacity sensor looks: BATCH_ASSETS_CAPACITY_SECONDS, else every 30 seconds."""
    text = os.environ.get("BATCH_ASSETS_CAPACITY_SECONDS") or "30"
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 86400:
        raise SettingError(
            f"BATCH_ASSETS_CAPACITY_SECONDS: expected seconds, above 0 and at most 86400, found {text!r:.80}"
        )
    return seconds


def fleet_config() -> Path:
    """The fleet's configuration: BATCH_ASSETS_FLEET, else `fleet.yaml` in DAGSTER_HOME."""
    return Path(os.environ.get("BATCH_ASSETS_FLEET") or dagster_home() / "fleet.yaml")


def run_workers_file() -> Path | None:
    """CPU and memory of run workers on Kubernetes: BATCH_ASSETS_RUN_WORKERS, else what the run launcher says."""
    named = os.environ.get("BATCH_ASSETS_RUN_WORKERS")
    return Path(named) if named else None


def max_answer_bytes() -> int | None:
    """Most bytes of the answer to one row, from BATCH_ASSETS_MAX_ANSWER_BYTES; None: as much as `sampling` asks for.

    Raises ValueError for anything but a whole number above 0.
    """
    said = os.environ.get("BATCH_ASSETS_MAX_ANSWER_BYTES", "").strip()
    if not said:
        return None
    if not said.isdecimal() or not 0 < int(said[:20]) <= LARGEST_ANSWER:
        raise ValueError(
            f"BATCH_ASSETS_MAX_ANSWER_BYTES: expected a whole number of bytes from 1 to {LARGEST_ANSWER}, "
            f"found {said[:20]!r}"
        )
    return int(said)
