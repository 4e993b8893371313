"""Where the service listens, what it uses, and how much it takes: from the environment, each with a default."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

from batch_assets import settings
from batch_assets.api.billing.price_list import FILE as PRICES_FILE
from batch_assets.api.billing.price_list import PriceList, read_prices
from batch_assets.settings import SettingError
from gpu_runner.bounded_http.tls_files import TlsFiles
from gpu_runner.errors import ExitStatus, UserFacingError
from resources.fleet.engine_tls import tls_of_environment
from resources.yaml_files import read_settings

GIB = 1 << 30
REGION_WORDS = "letters, digits, dots, dashes and underscores, 63 at most"
_REGION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
TLS_CERTIFICATE, TLS_KEY = "BATCH_ASSETS_TLS_CERTIFICATE", "BATCH_ASSETS_TLS_KEY"
MODELS_FILE = "models.yaml"
MOST_ENTRIES = 10_000  # of it

ModelName = Annotated[str, Field(min_length=1, max_length=256)]
Reserve = Annotated[int, Field(ge=0, le=1000, strict=True)]


class ModelSettingsError(UserFacingError):
    """The file of models cannot be used."""

    exit_status = ExitStatus.WRONG_REQUEST


class ModelSettings(BaseModel):
    """What `models.yaml` says. `aliases`: the model behind a name. `reserve`: engines of a model that stay leased, also
    without work.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    aliases: dict[ModelName, ModelName] = Field(default={}, max_length=MOST_ENTRIES)
    reserve: dict[ModelName, Reserve] = Field(default={}, max_length=MOST_ENTRIES)

    @model_validator(mode="after")
    def _one_step(self) -> ModelSettings:
        for alias, model in self.aliases.items():
            if model in self.aliases:
                raise ValueError(f"aliases.{alias[:80]}: expected a model, found the alias {model[:80]!r}")
        for model in self.reserve:
            if model in self.aliases:
                raise ValueError(f"reserve.{model[:80]}: expected a model, found an alias")
        return self

    def resolve(self, name: str) -> str:
        """The model behind a name; a name that is no alias stands for itself."""
        return self.aliases.get(name, name)


def read_model_settings(path: Path) -> ModelSettings:
    """The settings of a file, none where there is no file. Raises ModelSettingsError."""
    return read_settings(path, ModelSettings, ModelSettingsError)


@dataclass(frozen=True, slots=True)
class ApiLimits:
    """Bounds of one request and of one batch. Bytes, seconds, counts.

    `silent_seconds`: longest wait for the next part of a request's body. `file_days`: how long a batch's files are kept
    when nobody says; None: for ever.
    """

    json_bytes: int = 1 << 20
    file_bytes: int = 2 * GIB
    line_bytes: int = 16 << 20
    lines: int = 1_000_000
    listed_errors: int = 1_000
    silent_seconds: float = 30.0
    json_seconds: float = 60.0
    upload_seconds: float = 3600.0
    batch_file_days: float = 30.0


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """`home`: DAGSTER_HOME. `database`: SQLAlchemy URL of the records.

    `endpoints`: engines that run, `max_num_seqs` the slots of each, `engine_tls` their certificates. Without one,
    engines are those of the fleet. `tls`: certificate and key of the service itself; None: plain HTTP. `regions`: of
    those endpoints of which one is named.
    """

    home: Path
    store_root: str
    database: str
    host: str = "127.0.0.1"
    port: int = 8080
    endpoints: tuple[str, ...] = ()
    max_num_seqs: int | None = None
    limits: ApiLimits = field(default_factory=ApiLimits)
    prices: PriceList = field(default_factory=PriceList)
    models: ModelSettings = field(default_factory=ModelSettings)
    tls: TlsFiles | None = None
    engine_tls: TlsFiles | None = None
    regions: Mapping[str, str] = field(default_factory=dict)


def is_region(text: str) -> bool:
    """Whether it can be the name of a region."""
    return _REGION.fullmatch(text) is not None


def split_endpoint(text: str) -> tuple[str, str]:
    """Region and address of `eu-west-1=http://host:8000`; the region is empty where none is named."""
    region, named, url = text.partition("=")
    return (region, url) if named and is_region(region) else ("", text)


def api_settings(
    host: str = "127.0.0.1",
    port: int = 8080,
    endpoints: Sequence[str] = (),
    max_num_seqs: int | None = None,
    regions: Mapping[str, str] | None = None,
) -> ApiSettings:
    """The settings of this environment. Raises SettingError, PricesError, ModelSettingsError."""
    home = settings.dagster_home()
    return ApiSettings(
        home=home,
        store_root=settings.store_root(),
        database=records_database(),
        host=host,
        port=port,
        endpoints=tuple(dict.fromkeys(endpoints)),
        max_num_seqs=max_num_seqs,
        prices=read_prices(home / PRICES_FILE),
        models=read_model_settings(home / MODELS_FILE),
        tls=service_tls(),
        engine_tls=tls_of_environment(),
        regions=regions or {},
        limits=ApiLimits(
            file_bytes=_whole("BATCH_ASSETS_API_MAX_FILE_BYTES", ApiLimits().file_bytes),
            lines=_whole("BATCH_ASSETS_API_MAX_LINES", ApiLimits().lines),
        ),
    )


def records_database() -> str:
    """SQLAlchemy URL of the records: BATCH_ASSETS_API_DB, else SQLite in DAGSTER_HOME."""
    return os.environ.get("BATCH_ASSETS_API_DB") or f"sqlite:///{settings.dagster_home() / 'api.db'}"


def service_tls() -> TlsFiles | None:
    """Certificate and key of the service; None: plain HTTP. Raises SettingError when one is named without the other."""
    named = {name: os.environ.get(name, "").strip() for name in (TLS_CERTIFICATE, TLS_KEY)}
    if not any(named.values()):
        return None
    for name, value in named.items():
        if not value:
            raise SettingError(f"{name}: expected a file, because {' and '.join(named)} belong together")
    return TlsFiles(Path(named[TLS_CERTIFICATE]), Path(named[TLS_KEY]))


def _whole(name: str, default: int) -> int:
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    if not text.isdecimal() or len(text) > 15 or int(text) < 1:
        raise SettingError(f"{name}: expected a whole number above 0, found {text!r:.40}")
    return int(text)
