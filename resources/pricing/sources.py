"""Offers from where prices are written: gpuhunt's catalogs, private price lists, and a recorded history.

A source only reads; whether a price is believed is decided by `gpu_runner.offers.offer.screen`, which says what it
refuses.
"""

from __future__ import annotations

import datetime as dt
import logging
import os
import re
import threading
import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from pydantic import BaseModel, ConfigDict, Field

from gpu_runner.offers.gpus import find_sheet, spell_gpu
from gpu_runner.offers.offer import DAY, Offer, Sanity
from resources.pricing.price_files import HistoryLine, PriceLine, PricingError, check_columns, read_csv, read_yaml

if TYPE_CHECKING:
    from gpuhunt import Catalog, CatalogItem

logger = logging.getLogger(__name__)

CATALOG_DIR = "GPUHUNT_CATALOG_DIR"
CATALOG_COLUMNS = {"instance_name", "location", "price", "gpu_count", "gpu_name", "gpu_memory", "spot"}


class Conduct(BaseModel):
    """What price lists do not say of a provider. Every number can be set; none of the defaults is measured.

    480 s is a usual budget for node and image. Reliability is our guess, until the fleet has its own experience.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    boot_seconds: float = Field(default=480, ge=0, allow_inf_nan=False)
    reliability: float = Field(default=0.99, ge=0, le=1)
    spot_reliability: float = Field(default=0.9, ge=0, le=1)


Conducts = Mapping[str, Conduct]


class Source(Protocol):
    """Something that knows prices."""

    def offers(self, now: float) -> list[Offer]:
        """Offers as known at `now` (Unix seconds). Raises PricingError."""


def provider_name(name: str) -> str:
    """One spelling of providers: `Cudo Compute` and `cudo-compute` are the same."""
    return re.sub(r"\s+", "-", name.strip().lower())


def _make_offer(
    conducts: Conducts,
    *,
    provider: str,
    region: str,
    instance_type: str,
    gpu: str,
    gpus: int,
    gpu_memory_gib: float | None,
    spot: bool,
    price: float,
    observed_at: float,
    source: str,
    boot_seconds: float | None = None,
    reliability: float | None = None,
    capacity: int | None = None,
) -> Offer:
    """An offer in our spelling; what the source leaves out comes from the GPU's name, datasheet and the conduct."""
    provider = provider_name(provider)
    conduct = conducts.get(provider) or Conduct()
    spelled, named_memory = spell_gpu(gpu, instance_type)
    memory = gpu_memory_gib or named_memory
    if memory is None:
        sheet = find_sheet(spelled, None)
        memory = sheet.memory if sheet else 0.0
    if reliability is None:
        reliability = conduct.spot_reliability if spot else conduct.reliability
    return Offer(
        provider=provider,
        region=region,
        instance_type=instance_type,
        gpu=spelled,
        gpus=gpus,
        gpu_memory_gib=memory,
        spot=spot,
        price_per_hour=price,
        boot_seconds=conduct.boot_seconds if boot_seconds is None else boot_seconds,
        reliability=reliability,
        observed_at=observed_at,
        source=source,
        capacity=capacity,
    )


# Public clouds: gpuhunt


@dataclass
class GpuhuntSource:
    """gpuhunt's catalogs: from the folder that GPUHUNT_CATALOG_DIR names, or downloaded when it is not set.

    Offline prices are as old as their file. A download is repeated after `refresh` seconds; when it fails, the last
    one stays in use, grows stale, and is asked for again after `retry` seconds; an answer is waited for `seconds`.
    `version` pins one published catalog, such as `20260818-42`.
    """

    providers: tuple[str, ...] = ()
    conducts: Conducts = field(default_factory=dict)
    version: str | None = None
    refresh: float = 6 * 3600
    retry: float = 600
    seconds: float = 60
    _catalog: Catalog | None = field(default=None, init=False, repr=False)
    _next_load: float = field(default=0, init=False, repr=False)

    def offers(self, now: float) -> list[Offer]:
        """All GPU offers of the wanted providers, spot and on demand."""
        folder = os.environ.get(CATALOG_DIR)
        return list(self._offline(Path(folder)) if folder else self._online())

    def _offline(self, folder: Path) -> Iterator[Offer]:
        """One query per file: gpuhunt raises FileNotFoundError for any provider without one."""
        from gpuhunt import Catalog

        if not folder.is_dir():
            raise PricingError(f"{CATALOG_DIR}={folder}: expected a folder of <provider>.csv, found none")
        here = {path.stem: path for path in sorted(folder.glob("*.csv"))}
        missing = set(self.providers) - set(here)
        if missing:
            raise PricingError(f"{folder}: expected {', '.join(f'{name}.csv' for name in sorted(missing))}, found none")
        for provider in self.providers or tuple(here):
            path = here[provider]
            check_columns(path, CATALOG_COLUMNS)
            try:
                # auto_reload would download; without min_gpu_count machines without a GPU come too.
                items = Catalog(auto_reload=False).query(provider=[provider], min_gpu_count=1)
            except ValueError as error:
                raise PricingError(f"{path}: {error}. Other providers belong into a private price list") from None
            yield from self._convert(items, {provider: path.stat().st_mtime})

    def _online(self) -> Iterator[Offer]:
        if self._catalog is None or time.monotonic() > self._next_load:
            self._load()
        assert self._catalog is not None
        versions = {name: _version_time(one.version) for name, one in self._catalog.catalog.items()}
        wanted = list(self.providers or versions)
        missing = set(wanted) - set(versions)
        if missing:
            raise PricingError(f"gpuhunt: expected catalogs of {sorted(missing)}, found {sorted(versions)}")
        yield from self._convert(self._catalog.query(provider=wanted, min_gpu_count=1), versions)

    def _load(self) -> None:
        """Download, in a thread of its own: gpuhunt sets no time-out."""
        from gpuhunt import Catalog

        # It logs the traceback of each provider that it cannot download; what failed is in our error.
        logging.getLogger("gpuhunt").addHandler(logging.NullHandler())
        catalog = Catalog(auto_reload=False)
        failure: list[Exception] = []

        def download() -> None:
            try:
                catalog.load(self.version)
            except Exception as error:
                failure.append(error)

        thread = threading.Thread(target=download, name="gpuhunt", daemon=True)
        thread.start()
        thread.join(self.seconds)
        if not failure and not thread.is_alive():
            self._catalog, self._next_load = catalog, time.monotonic() + self.refresh
            return
        found = failure[0] if failure else f"no answer within {self.seconds:g} s"
        if self._catalog is None:
            raise PricingError(f"gpuhunt: expected a catalog, found: {found}. Set {CATALOG_DIR} to work offline")
        logger.warning("gpuhunt: the earlier catalog stays in use, no newer one: %s", found)
        self._next_load = time.monotonic() + self.retry

    def _convert(self, items: Iterable[CatalogItem], observed: Mapping[str, float]) -> Iterator[Offer]:
        for item in items:
            yield _make_offer(
                self.conducts,
                provider=item.provider,
                region=item.location,
                instance_type=item.instance_name,
                gpu=item.gpu_name or "unknown",
                gpus=item.gpu_count,
                gpu_memory_gib=item.gpu_memory,
                spot=item.spot,
                price=item.price,
                observed_at=observed[item.provider],
                source="gpuhunt",
            )


def _version_time(version: str) -> float:
    """When a catalog was published: its version begins with the date, `20260818-42`."""
    try:
        return dt.datetime.strptime(version[:8], "%Y%m%d").replace(tzinfo=dt.UTC).timestamp()
    except ValueError:
        raise PricingError(f"gpuhunt: expected a version such as 20260818-42, found {version!r}") from None


# Private price lists


@dataclass(frozen=True)
class PriceList:
    """A private price list: your own cluster, reserved hosts, a provider that gpuhunt does not know.

    YAML with a list under `offers`, or CSV with a header; the fields are those of PriceLine. A line without
    `observed_at` holds until it is changed. Read anew at each call, so that an edit counts at once.
    """

    path: Path
    conducts: Conducts = field(default_factory=dict)

    def offers(self, now: float) -> list[Offer]:
        """Every line of the list. Raises PricingError naming file, line, expected and found for each problem."""
        lines = read_yaml(self.path) if self.path.suffix in (".yaml", ".yml") else read_csv(self.path, PriceLine)
        return [self._convert(line, now) for line in lines]

    def _convert(self, line: PriceLine, now: float) -> Offer:
        return _make_offer(
            self.conducts,
            provider=line.provider,
            region=line.region,
            instance_type=line.instance_type,
            gpu=line.gpu,
            gpus=line.gpus,
            gpu_memory_gib=line.gpu_memory_gib,
            spot=line.spot,
            price=line.price_per_hour,
            observed_at=line.observed_at.timestamp() if line.observed_at else now,
            source=self.path.name,
            boot_seconds=line.boot_seconds,
            reliability=line.reliability,
            capacity=line.capacity,
        )


# Recorded history


class PriceHistory:
    """Prices as they were at a moment, from a CSV of observations at irregular times.

    As of a moment, a provider's prices are those of its last observation at or before it; what that observation no
    longer lists is no longer offered. Read once.
    """

    def __init__(self, path: Path, conducts: Conducts | None = None) -> None:
        self.path = path
        self._conducts = conducts or {}
        self._observed: dict[str, dict[float, list[HistoryLine]]] = {}
        for line in read_csv(path, HistoryLine):
            times = self._observed.setdefault(provider_name(line.provider), {})
            times.setdefault(line.observed_at.timestamp(), []).append(line)
        self._times = {provider: sorted(times) for provider, times in self._observed.items()}

    def times(self) -> list[float]:
        """Every moment at which some price was observed, in order."""
        return sorted({moment for times in self._times.values() for moment in times})

    def offers(self, now: float) -> list[Offer]:
        """Prices as of `now`."""
        found: list[Offer] = []
        for provider, times in self._times.items():
            before = bisect_right(times, now)
            if before:
                observed_at = times[before - 1]
                for line in self._observed[provider][observed_at]:
                    found.extend(self._convert(line, observed_at))
        return found

    def _convert(self, line: HistoryLine, observed_at: float) -> Iterator[Offer]:
        for spot, price in ((False, line.on_demand_usd_per_hour), (True, line.spot_usd_per_hour)):
            if price is not None:
                yield _make_offer(
                    self._conducts,
                    provider=line.provider,
                    region="",
                    instance_type=line.instance_name or _describe(line),
                    gpu=line.gpu_name,
                    gpus=line.gpu_count,
                    gpu_memory_gib=line.gpu_memory_gib,
                    spot=spot,
                    price=price,
                    observed_at=observed_at,
                    source=self.path.name,
                )


def _describe(line: HistoryLine) -> str:
    """A name for an instance type that has none: `8x A4000, 64 vCPU, 128 GiB`."""
    parts = [f"{line.gpu_count or '?'}x {line.gpu_name}"]
    parts += [f"{line.vcpus:g} vCPU"] if line.vcpus else []
    parts += [f"{line.ram_gib:g} GiB"] if line.ram_gib else []
    return ", ".join(parts)


class PricingConfig(BaseModel):
    """Which sources a deployment uses. `gpuhunt`: false, true for every provider, or the names of some."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    gpuhunt: bool | list[str] = False
    gpuhunt_version: str | None = None
    lists: list[Path] = []
    history: Path | None = None
    max_age_days: float = Field(default=7, gt=0)
    conduct: dict[str, Conduct] = Field(default={}, description="by provider; what its price list does not say")

    def sources(self) -> Sequence[Source]:
        """The sources, in order. Raises PricingError when the history cannot be read."""
        conducts = {provider_name(name): conduct for name, conduct in self.conduct.items()}
        sources: list[Source] = []
        if self.gpuhunt:
            names = tuple(self.gpuhunt) if isinstance(self.gpuhunt, list) else ()
            sources.append(GpuhuntSource(names, conducts, self.gpuhunt_version))
        sources += [PriceList(path, conducts) for path in self.lists]
        if self.history is not None:
            sources.append(PriceHistory(self.history, conducts))
        return sources

    def below(self, folder: Path) -> PricingConfig:
        """The same with relative paths taken from `folder`, where the file lies that names them."""
        history = folder / self.history if self.history is not None else None
        return self.model_copy(update={"lists": [folder / path for path in self.lists], "history": history})

    def sanity(self) -> Sanity:
        """When a price is not believed."""
        return Sanity(max_age=self.max_age_days * DAY)
