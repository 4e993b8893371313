from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gpu_runner.providers.base import ProviderError
from gpu_runner.providers.engine_keys import VARIABLE, EngineSecretError, engine_key, engine_secret


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


def test_processes_of_one_home_share_a_secret_that_only_the_user_reads(tmp_path: Path):
    home = tmp_path / "home"
    with ThreadPoolExecutor(8) as threads:
        secrets = set(threads.map(engine_secret, [home] * 32))
    assert len(secrets) == 1 and len(secrets.pop()) == 64
    (file,) = home.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_the_environment_counts_before_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    own = engine_secret(tmp_path)
    monkeypatch.setenv(VARIABLE, "s" * 40)
    assert engine_secret(tmp_path) == "s" * 40 != own


@pytest.mark.parametrize("short", ["", "secret"])
def test_a_short_secret_is_refused_without_showing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short: str):
    monkeypatch.setenv(VARIABLE, short)
    with pytest.raises(EngineSecretError, match=f"{VARIABLE}: expected at least 32 characters, found {len(short)}"):
        engine_secret(tmp_path)
    monkeypatch.delenv(VARIABLE)
    (tmp_path / "engine-secret").write_text(short)
    with pytest.raises(EngineSecretError, match="expected at least 32"):
        engine_secret(tmp_path)


def test_a_secret_that_cannot_be_read_is_an_error_of_the_provider_and_says_where_it_lies(tmp_path: Path):
    (tmp_path / "engine-secret").mkdir()
    with pytest.raises(ProviderError, match="engine-secret: the secret of the engines' keys cannot be used"):
        engine_secret(tmp_path)


def test_every_machine_has_a_key_of_its_own():
    # RFC 4231, test case 2.
    expected = "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"
    assert engine_key("Jefe", "what do ya want for nothing?") == expected
    assert len({engine_key("s" * 40, f"machine-{number}") for number in range(50)}) == 50
    assert os.environ.get(VARIABLE) is None
