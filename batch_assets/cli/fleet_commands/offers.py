"""What `batch-assets offers NAME` prints: what can be rented for the work in hand, best first, and why not the rest."""

from __future__ import annotations

import dataclasses
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from batch_assets import settings
from batch_assets.capacity_planning.clock_scale import scale_words
from batch_assets.capacity_planning.planner_input import with_idle_tail
from batch_assets.capacity_planning.workload_estimate import WorkloadEstimator
from batch_assets.cli.arguments import readable
from batch_assets.cli.output import output_console, print_json
from batch_assets.snapshot.source.errors import SourceError
from batch_assets.spec.models import GeneratedDatasetSpec
from gpu_runner.models.facts import KnownModel, Placement
from gpu_runner.money import format_usd
from gpu_runner.offers.offer import HOUR, Offer, OfferFilter, RankedOffer, Ranking, Refusal, objective_value
from gpu_runner.offers.selection import MEMORY
from gpu_runner.offers.speed import Measurement
from gpu_runner.offers.workload import Assumption, Subject, Workload
from gpu_runner.planner.types import ControlTiming, Target
from gpu_runner.providers.rentable import CLOUDS
from resources.fleet.fleet_config import ENDPOINT_VARIABLE
from resources.fleet.hosted_engines import hosted_engines, hosted_offers
from resources.fleet.leased_engine import instance_offer
from resources.fleet.planner_options import as_planned, beliefs
from resources.objects.opening import open_objects
from resources.pricing.market import Market
from resources.store.dataset_store import DatasetStore

NO_CLOCKS: Mapping[str, float] = {}


@dataclass(frozen=True, slots=True)
class OffersView:
    """Everything that the command shows. `placements` belong to the ranked offers, in their order.

    `clocks`: simulated seconds per real second, by provider. `not_rented`: those with prices here, but no provider.
    """

    dataset: str
    model: KnownModel
    work: Workload
    accept: OfferFilter
    ranking: Ranking
    placements: tuple[Placement | None, ...]
    problems: tuple[str, ...]
    clocks: Mapping[str, float]
    not_rented: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain values, stable keys."""
        return {
            "dataset": self.dataset,
            "model": {"name": self.model.name, "knowledge": self.model.knowledge, "where": self.model.where},
            "objective": self.ranking.objective,
            "filter": _filter_json(self.accept),
            "work": {
                "rows": self.work.rows,
                "tokens": round(self.work.tokens),
                "prompt_tokens_per_row": round(self.work.mix.prompt_tokens, 1),
                "completion_tokens_per_row": round(self.work.mix.output_tokens, 1),
                "longest_row_tokens": self.work.longest,
                "prompt_basis": self.work.prompt_basis,
                "completion_basis": self.work.output_basis,
                "assumptions": [str(one) for one in self.work.assumptions],
            },
            "ranked": [
                {"rank": rank, **_ranked_json(one), "placement": dataclasses.asdict(placed) if placed else None}
                for rank, (one, placed) in enumerate(zip(self.ranking.ranked, self.placements, strict=True), 1)
            ],
            "refused": [{**_offer_json(one.offer), "reasons": list(one.reasons)} for one in self.ranking.refused],
            "problems": list(self.problems),
            "clocks": dict(self.clocks),
            "not_rented": list(self.not_rented),
        }


def offers_view(
    spec: GeneratedDatasetSpec,
    work: Workload,
    market: Market,
    measurements: Sequence[Measurement] = (),
    gpus: Sequence[str] = (),
    clocks: Mapping[str, float] = NO_CLOCKS,
) -> OffersView:
    """Rank what the market has for this work. `gpus` take the place of those in the spec."""
    hardware, declared = spec.hardware, spec.declared(spec.model)
    accept = hardware.accept()
    if gpus:
        accept = dataclasses.replace(accept, gpus=frozenset(gpus))
    if not work.rows:
        text = f"nothing is left to do: ranked as if all {work.all_rows:,} rows were to be done"
        assumed = (*work.assumptions, Assumption(Subject.ROWS, text))
        work = dataclasses.replace(work, rows=work.all_rows, assumptions=assumed)
    stock = market.stock()
    bounds: dict[str, Any] = {
        "longest": work.longest,
        "max_model_len": hardware.max_model_len,
        "declared": declared,
    }
    ranking = market.ranking(
        spec.model,
        spec.task,
        work.mix,
        work.tokens,
        accept=accept,
        objective=spec.objective,
        measurements=measurements,
        stock=stock,
        **bounds,
    )
    placements = tuple(market.placement(one.offer, spec.model, spec.task, work.mix, **bounds) for one in ranking.ranked)
    listed = {one.offer.provider for one in ranking.refused}
    return OffersView(
        dataset=spec.name,
        model=market.model(spec.model, declared),
        work=work,
        accept=accept,
        ranking=ranking,
        placements=placements,
        problems=stock.problems,
        clocks=clocks,
        not_rented=tuple(sorted(name for name in listed if not market.rents(name))),
    )


def show_offers(spec: GeneratedDatasetSpec, folder: Path, *, gpus: Sequence[str], limit: int, as_json: bool) -> None:
    """Print the ranking for a dataset whose defs.yaml lies in `folder`. `limit` 0: everything.

    Raises SourceError, StoreError, and what fleet.yaml, the price sources or the source have against it.
    """
    store = DatasetStore(open_objects(settings.store_root()), spec.name)
    try:
        work = WorkloadEstimator(readable(spec), store, folder).look()
    except SourceError as error:
        raise SourceError(f"{spec.name}: {error}", error.rejects) from None
    market, measured, clocks = fleet_market()
    view = as_plan_has_it(offers_view(spec, work, market, measured, gpus, clocks), spec, market, measured)
    view = with_hosted(view, spec, time.time())
    if as_json:
        print_json(view.as_json())
        return
    output_console().print(report(view, limit, time.time()), highlight=False)


def as_plan_has_it(
    view: OffersView, spec: GeneratedDatasetSpec, market: Market, measured: Sequence[Measurement]
) -> OffersView:
    """The view with the figures of `plan`, and without what a plan leaves out."""
    from batch_assets.local_dagster.local_fleet import the_fleet

    fleet = the_fleet()
    config = fleet.config()
    with fleet.open_database() as fleet_db:
        failures, instances = fleet_db.offer_failures(MEMORY.horizon), fleet_db.fleet()
    known, estimated = (_everything(view, spec, market, these) for these in (measured, ()))
    wanted = Target(None if spec.deadline is None else 0.0, spec.budget_usd)
    idle = with_idle_tail(config, wanted, ControlTiming.of_sensor(settings.capacity_seconds())).idle_seconds
    standing = Counter(instance_offer(one).name for one in instances if one.state == "ready")
    ranking = as_planned(view.ranking, view.clocks, failures, beliefs(known, estimated), standing, idle)
    placed = dict(zip((one.offer for one in view.ranking.ranked), view.placements, strict=True))
    return dataclasses.replace(view, ranking=ranking, placements=tuple(placed[one.offer] for one in ranking.ranked))


def _everything(
    view: OffersView, spec: GeneratedDatasetSpec, market: Market, measured: Sequence[Measurement]
) -> Ranking:
    """All that is offered, whatever is wanted of hardware: what a plan learns speeds from."""
    return market.ranking(
        spec.model,
        spec.task,
        view.work.mix,
        view.work.tokens,
        measurements=measured,
        longest=view.work.longest,
        max_model_len=spec.hardware.max_model_len,
        declared=spec.declared(spec.model),
    )


def with_hosted(view: OffersView, spec: GeneratedDatasetSpec, now: float) -> OffersView:
    """The view with engines of fleet.yaml that are paid by the token, ranked among what can be rented."""
    from batch_assets.local_dagster.local_fleet import the_fleet

    fleet = the_fleet()
    engines = hosted_engines(fleet.config(), spec.model, os.environ.get(ENDPOINT_VARIABLE), spec.engine)
    if not engines:
        return view
    with fleet.open_database() as fleet_db:
        speeds = fleet_db.engine_speeds([one.name for one in engines], spec.name)
        hosted = hosted_offers(engines, view.work, speeds, now)
    pairs = [*zip(view.ranking.ranked, view.placements, strict=True), *((one, None) for one in hosted)]
    pairs.sort(key=lambda pair: objective_value(pair[0], view.ranking.objective))
    ranking = dataclasses.replace(view.ranking, ranked=tuple(one for one, _ in pairs))
    return dataclasses.replace(view, ranking=ranking, placements=tuple(placed for _, placed in pairs))


def fleet_market() -> tuple[Market, list[Measurement], dict[str, float]]:
    """The market of this deployment's fleet, the measured speeds, and its providers' clocks."""
    from batch_assets.local_dagster.local_fleet import the_fleet

    fleet = the_fleet()
    config = fleet.config()
    with fleet.open_database() as fleet_db:
        measured = list(fleet_db.measurements())
    providers = fleet.providers(config)
    return fleet.market(config, providers), measured, {name: one.clock for name, one in providers.items()}


def report(view: OffersView, limit: int, now: float) -> Group:
    """The view for people: the work, the ranking, the refusals."""
    parts: list[Text | Table] = [Text(line) for line in _head(view)]
    ranked, refused = view.ranking.ranked, view.ranking.refused
    if ranked:
        parts += [Text(), _ranked_table(ranked[: limit or None], now), *_more(len(ranked), limit)]
    else:
        parts += [Text(), Text("Nothing can be rented for it.", style="bold red")]
    if refused:
        parts += [Text(), Text(f"Refused: {len(refused):,}", style="bold")]
        parts += [_refused_table(refused[: limit or None]), *_more(len(refused), limit)]
    if view.not_rented:
        parts += [Text(), Text(_own_engine_words(view.not_rented))]
        if rentable := [name for name in view.not_rented if name in CLOUDS]:
            parts.append(Text(_configure_words(rentable)))
    return Group(*parts)


def _own_engine_words(clouds: Sequence[str]) -> str:
    """What to do about prices of clouds from which nothing can be rented."""
    return (
        f"No provider for {', '.join(clouds)}: these prices are for comparison. To use such a machine, rent it "
        "yourself, start `vllm serve` on it, and name its address under `engines` in "
        f"{settings.fleet_config()} or with `batch-assets run --endpoint`."
    )


def _configure_words(clouds: Sequence[str]) -> str:
    """What to do about prices of clouds that only have to be configured."""
    return (
        f"For {' and '.join(clouds)} there is a provider: the reason beside each offer names the lines that "
        f"{settings.fleet_config()} needs to rent it."
    )


def _head(view: OffersView) -> list[str]:
    work, mix = view.work, view.work.mix
    basis: str = work.prompt_basis
    if work.output_basis != basis:
        basis = f"prompts {work.prompt_basis}, completions {work.output_basis}"
    return [
        f"{view.dataset}: {work.rows:,} rows, {work.tokens:,.0f} tokens: {mix.prompt_tokens:,.0f} of the prompt and "
        f"{mix.output_tokens:,.0f} of the completion per row ({basis}); the longest row {work.longest:,}",
        *(f"  assumed: {text}" for text in work.assumptions),
        f"model: {view.model.name}, {_knowledge(view.model)}",
        f"objective: {view.ranking.objective}; {_filter_words(view.accept)}",
        *([f"{scale}; hours are theirs"] if (scale := scale_words(view.clocks)) else []),
        *(f"problem: {text}" for text in view.problems),
    ]


def _knowledge(model: KnownModel) -> str:
    if model.knowledge == "assumed":
        return f"taken for an 8B where machines are simulated: {model.where}"
    return {"declared": "facts from hardware.model_facts", "built in": "built-in shapes"}.get(
        model.knowledge, f"shapes from {model.where}"
    )


def _filter_words(accept: OfferFilter) -> str:
    words = [
        f"{name} {', '.join(sorted(values))}"
        for name, values in (("providers", accept.providers), ("regions", accept.regions), ("GPUs", accept.gpus))
        if values is not None
    ]
    words.append("spot allowed" if accept.spot else "no spot")
    words += [f"at most {format_usd(accept.max_price_per_hour)} $/h"] if accept.max_price_per_hour is not None else []
    words += [f"reliability from {accept.min_reliability:.3f}"] if accept.min_reliability else []
    return "filter: " + ", ".join(words)


def _ranked_table(ranked: Sequence[RankedOffer], now: float) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("#", "provider", "region", "type", "GPU", "spot"):
        table.add_column(name, justify="right" if name == "#" else "left", overflow="fold")
    for name in ("$/h", "age", "tokens/s"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("speed", no_wrap=True)
    for name in ("hours", "$", "$/M tokens"):
        table.add_column(name, justify="right", no_wrap=True)
    for rank, one in enumerate(ranked, 1):
        offer = one.offer
        table.add_row(
            str(rank),
            Text(offer.provider),
            Text(offer.region),
            Text(offer.instance_type),
            Text("by the token" if offer.by_tokens else _gpu(offer)),
            "spot" if offer.spot else "",
            "–" if offer.by_tokens else format_usd(offer.price_per_hour),
            _age(now - offer.observed_at),
            f"{one.speed.tokens_per_second:,.0f}",
            one.speed.basis,
            f"{one.seconds / HOUR:.2f}",
            format_usd(one.usd, fine=True),
            format_usd(one.usd_per_million_tokens, fine=True),
        )
    return table


def _refused_table(refused: Sequence[Refusal]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("offer", overflow="fold")
    table.add_column("GPU", no_wrap=True)
    table.add_column("$/h", justify="right", no_wrap=True)
    table.add_column("reason", overflow="fold")
    for one in refused:
        table.add_row(
            Text(one.offer.name), Text(_gpu(one.offer)), format_usd(one.offer.price_per_hour), Text(one.reason)
        )
    return table


def _more(count: int, limit: int) -> list[Text]:
    return [Text(f"… and {count - limit:,} more: --limit 0 shows all", style="dim")] if 0 < limit < count else []


def _gpu(offer: Offer) -> str:
    return f"{offer.gpus or '?'}× {offer.gpu} {offer.gpu_memory_gib:g} GiB"


def _age(seconds: float) -> str:
    if seconds < 60:
        return "now"
    if seconds < HOUR:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / HOUR:.0f} h" if seconds < 48 * HOUR else f"{seconds / HOUR / 24:.0f} d"


def _offer_json(offer: Offer) -> dict[str, Any]:
    return dataclasses.asdict(offer)


def _ranked_json(one: RankedOffer) -> dict[str, Any]:
    return {
        **_offer_json(one.offer),
        "tokens_per_second": round(one.speed.tokens_per_second, 1),
        "speed_basis": one.speed.basis,
        "hours": round(one.seconds / HOUR, 6),
        "usd": round(one.usd, 6),
        "usd_per_million_tokens": round(one.usd_per_million_tokens, 6),
    }


def _filter_json(accept: OfferFilter) -> dict[str, Any]:
    found = dataclasses.asdict(accept)
    return {name: sorted(value) if isinstance(value, frozenset) else value for name, value in found.items()}
