"""What several commands are given: the declared arguments, and their checks before anything is asked of Dagster.

The checks raise CommandError, which names the option; heavy packages are imported by those that need them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from batch_assets.cli.user_errors import CommandError
from gpu_runner.request_limits import NO_LIMITS, RequestLimits

if TYPE_CHECKING:
    from pathlib import Path

    from batch_assets.spec.models import GeneratedDatasetSpec
    from batch_assets.spec.request_options import RequestOptions
    from resources.pricing.token_prices import TokenPriceConfig

ENDPOINT_SECONDS = 2.0
_NONE = (
    "No dataset is declared: `batch-assets new NAME` writes batch_assets/defs/NAME/defs.yaml, or into the folder that "
    "BATCH_ASSETS_DEFS names"
)

Name = Annotated[str, typer.Argument(help="Name of the dataset.", show_default=False)]
TokenPrices = Annotated[
    str | None, typer.Option(help="What the endpoint's tokens cost: 0.6, or 0.15,0.6 for input and output.")
]
Timeout = Annotated[
    float | None, typer.Option(min=0.1, help="Endpoint only: seconds that one request may take at most (1,800).")
]
Concurrency = Annotated[int | None, typer.Option(min=1, help="Endpoint only: most rows in flight.")]
RequestsPerMinute = Annotated[int | None, typer.Option(min=1, help="Endpoint only: most requests in any minute.")]
TokensPerMinute = Annotated[
    int | None, typer.Option(min=1, help="Endpoint only: most tokens in a minute, of prompts and answers.")
]
AcceptedGates = Annotated[
    list[str] | None,
    typer.Option("--accept-gate", metavar="GATE", help="A gate that shall not pause it; may be repeated."),
]
ExportTo = Annotated[str | None, typer.Option(help="Folder, or s3://bucket/prefix: empty, or of this export.")]
ExportFormat = Annotated[
    str | None,
    typer.Option("--format", help="messages, sharegpt, alpaca, prompt-completion, preference, jsonl or parquet."),
]
DeclaredExport = Annotated[
    str | None,
    typer.Option(metavar="EXPORT", help="In place of all else: one of `exports` in the defs.yaml, at its place."),
]
ExportMap = Annotated[
    list[str] | None,
    typer.Option("--map", help="FIELD=COLUMN, as prompt=question or chosen=answers[best]; may be repeated."),
]
ExportColumns = Annotated[
    str | None, typer.Option(help="Columns that each record carries along; of jsonl and parquet: those of a line.")
]
SplitBy = Annotated[str | None, typer.Option(help="Column whose equal values stay on one side; the prompt without.")]
GroupBy = Annotated[str | None, typer.Option(help="preference: column whose equal values are answers to one question.")]
RankBy = Annotated[
    str | None, typer.Option(help="preference: numbers; of a group the highest is chosen, the lowest rejected.")
]
Push = Annotated[
    str | None, typer.Option(metavar="ORG/NAME", help="Dataset repository of the Hugging Face hub that gets it, too.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]


def known_dataset(name: str) -> GeneratedDatasetSpec:
    """The declared dataset of this name. Raises CommandError, and SpecError when its file cannot be used."""
    return declared_dataset(name)[0]


def declared_dataset(name: str) -> tuple[GeneratedDatasetSpec, Path]:
    """The same, with the folder of its file."""
    from batch_assets.spec.discovery import declarations
    from batch_assets.spec.errors import near_miss, nearest

    found = declarations()
    if (broken := found.broken_named(name)) is not None:
        raise broken.error
    if name not in found.datasets:
        names = sorted({*found.datasets, *(one.name for one in found.broken)})
        hint = nearest(name, names) if names else _NONE
        known = f" Known: {', '.join(names)}." if near_miss(name, names) else ""
        raise CommandError(f"no dataset is called {name!r}. {hint}{known}")
    return found.datasets[name]


def chain_to(name: str) -> list[str]:
    """The datasets that are made before one, and it itself; with those that accept its rows, where it wants some.

    Raises ChainError, and SpecError for a broken file.
    """
    from batch_assets.spec.chain import steps_to
    from batch_assets.spec.discovery import declared_specs

    specs = declared_specs()
    return steps_to(specs, specs[name].accepted_by if name in specs else name)


def round_from(name: str) -> list[str]:
    """The datasets that are refreshed in each round of one that wants rows which another one accepts; else it alone.

    Raises ChainError.
    """
    from batch_assets.spec.chain import round_of
    from batch_assets.spec.discovery import declared_specs

    specs = declared_specs()
    return round_of(specs, specs[name]) if name in specs and specs[name].want is not None else [name]


def readable(spec: GeneratedDatasetSpec) -> GeneratedDatasetSpec:
    """The spec with the place of the table that it reads, of an asset or of a dataset. Raises SourceError."""
    if spec.source.asset is None and spec.source.dataset is None:
        return spec
    import dagster as dg

    from batch_assets import settings
    from batch_assets.local_dagster.home import ensure_storage, prepare_home
    from batch_assets.orchestration.source_place import at_its_place
    from resources.objects.opening import open_objects

    home = prepare_home()
    ensure_storage(home)
    with dg.DagsterInstance.from_config(str(home)) as instance:
        return at_its_place(spec, instance, open_objects(settings.store_root()))


def check_endpoint(endpoint: str) -> None:
    """Somebody must answer there now: a run would wait ten minutes for it."""
    from gpu_runner.bounded_http.addresses import AddressRefused
    from gpu_runner.providers.engine_process import EngineStartError, wait_reachable

    try:
        wait_reachable(endpoint, ENDPOINT_SECONDS)
    except (EngineStartError, AddressRefused) as error:
        raise CommandError(f"--endpoint: {error}") from None


def usable_endpoint(
    given: str | None, limits: RequestLimits, price: TokenPriceConfig | None = None
) -> tuple[str | None, str | None]:
    """(the address of --endpoint, that of BATCH_ASSETS_ENDPOINT), of which runs may use the first from now on.

    Raises CommandError where it cannot be used, or limits are given without either.
    """
    of_environment = engine_address("BATCH_ASSETS_ENDPOINT", os.environ.get("BATCH_ASSETS_ENDPOINT"))
    endpoint = engine_address("--endpoint", given)
    check_limits(limits, endpoint or of_environment)
    if endpoint is not None:
        check_endpoint(endpoint)
        allow_endpoint(endpoint, of_environment, price)
    return endpoint, of_environment


def check_limits(limits: RequestLimits, endpoint: str | None) -> None:
    """Limits are those of an endpoint that the command or the environment names. Raises CommandError."""
    if limits != NO_LIMITS and endpoint is None:
        raise CommandError(
            "--timeout, --concurrency, --requests-per-minute, --tokens-per-minute: expected with --endpoint or "
            "BATCH_ASSETS_ENDPOINT; engines of fleet.yaml have keys of these names"
        )


def check_model(model: str | None) -> None:
    from gpu_runner.models.names import name_problem

    if model is not None and (problem := name_problem(model)):
        raise CommandError(f"--model: expected a model as the engine knows it, found {model[:100]!r}: {problem}")


def engine_address(name: str, given: str | None) -> str | None:
    """An engine's address in our spelling. Raises CommandError without the address, which may hold a secret."""
    from gpu_runner.bounded_http.addresses import engine_url

    try:
        return engine_url(given) if given else None
    except ValueError as error:
        raise CommandError(f"{name}: {error}") from None


def token_price(text: str | None, endpoint: str | None) -> TokenPriceConfig | None:
    """The price of the endpoint's tokens. Raises CommandError."""
    if text is None:
        return None
    from resources.pricing.token_prices import parse_token_price

    try:
        found = parse_token_price(text)
    except ValueError as error:
        raise CommandError(f"--usd-per-million-tokens: {error}") from None
    if endpoint is None:
        raise CommandError("--usd-per-million-tokens: expected with --endpoint; other engines have it in fleet.yaml")
    return found


def allow_endpoint(endpoint: str, of_environment: str | None, price: TokenPriceConfig | None = None) -> None:
    """Runs of this home may send to it from now on, and the key with it unless that is for another address.

    `price`: of its tokens, kept with the address.
    """
    from batch_assets.local_dagster.home import prepare_home
    from gpu_runner.bounded_http.key_variables import key_in
    from resources.endpoints import allow

    given = of_environment is None or of_environment == endpoint
    allow(prepare_home(), endpoint, key_in("BATCH_ASSETS_API_KEY") if given else None, price)


def wished_options(
    spec: GeneratedDatasetSpec,
    deadline: str | None,
    budget_usd: float | None,
    objective: str | None,
    max_instances: int | None,
    accepted_gates: Sequence[str] = (),
) -> RequestOptions:
    """The dataset's wishes with those of the command line. Raises CommandError naming the option."""
    from batch_assets import tags
    from batch_assets.spec.request_options import InvalidTag, request_options, tags_of

    options = {
        tags.DEADLINE_TAG: "--deadline",
        tags.BUDGET_TAG: "--budget-usd",
        tags.OBJECTIVE_TAG: "--objective",
        tags.INSTANCES_TAG: "--max-instances",
        tags.ACCEPT_GATES_TAG: "gates",
    }
    try:
        return request_options(spec, tags_of(deadline, budget_usd, objective, max_instances, accepted_gates))
    except InvalidTag as error:
        raise CommandError(f"{options[error.tag]}: {error.problem}") from None
