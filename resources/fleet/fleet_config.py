"""fleet.yaml: which engines stand somewhere, which providers rent out machines, and how the fleet behaves."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, field_validator, model_validator

from gpu_runner.bounded_http.addresses import engine_url
from gpu_runner.bounded_http.key_variables import key_in
from gpu_runner.bounded_http.tls_files import TlsFiles
from gpu_runner.errors import ExitStatus, UserFacingError
from gpu_runner.models.names import name_problem
from gpu_runner.providers.ec2.config import Ec2ProviderConfig
from gpu_runner.providers.kubernetes.config import KubernetesProviderConfig
from gpu_runner.providers.local import LocalProviderConfig
from gpu_runner.providers.runpod.config import RunPodConfig
from gpu_runner.providers.simulated.config import SimulatedCloudConfig
from gpu_runner.providers.simulated.default import default_cloud
from gpu_runner.providers.ssh.config import SshProviderConfig
from gpu_runner.request_limits import REQUEST_SECONDS, RequestLimits
from gpu_runner.token_price import TokenPrice
from resources import endpoints
from resources.alerts import AlertConfig
from resources.engine_options import PLAIN, EngineOptions
from resources.fleet.batch_api_config import BatchApiConfig
from resources.fleet.engine_tls import EngineTls, tls_of_environment
from resources.pricing.sources import PricingConfig
from resources.pricing.token_prices import TokenPriceConfig
from resources.yaml_errors import Unusable, problem_of, show
from resources.yaml_files import Document, YamlProblem, line_of, load_documents, read_text

ENDPOINT_VARIABLE, KEY_VARIABLE = "BATCH_ASSETS_ENDPOINT", "BATCH_ASSETS_API_KEY"
LARGEST_FILE = 1 << 20
MOST_PROBLEMS = 50  # that one message lists
LLAMA_CPP_SLOTS = 16  # 61 tokens/s of a 135M model on one thread, 20 with one slot
RENTED = ("local", "kubernetes", "ssh", "ec2", "runpod")  # keys of providers of real machines
RentedConfig = LocalProviderConfig | KubernetesProviderConfig | SshProviderConfig | Ec2ProviderConfig | RunPodConfig
SIMULATOR = "gpu_runner.simulator"  # the module in the command of an engine that only plays a model
EMBEDDED_IDLE_MINUTES = 0.1  # of a clock 60 times as fast as ours

# Fields of an engine that only one kind takes: (kind, fields, what is said of them for another kind).
_FIELDS_OF_KINDS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("llama_cpp", ("threads", "context"), "expected for kind llama_cpp only"),
    ("endpoint", ("concurrency", "requests_per_minute", "tokens_per_minute"), "expected for kind endpoint only"),
)

VLLM_COMMAND = ["vllm", "serve", "{model}", "--host", "127.0.0.1", "--port", "{port}"]


class FleetConfigError(UserFacingError):
    """fleet.yaml is not what it should be."""

    exit_status = ExitStatus.WRONG_REQUEST


class _WholeProblem(ValueError):
    """A validator's message that says what was found as far as it may be shown: nothing is added to it."""


class EngineConfig(BaseModel):
    """One engine that may be leased, by one run at a time.

    `simulated`, `llama_cpp` and `process` engines are started for a lease and end with it; an `endpoint` runs already,
    and so does a `batch_api`, which takes rows as files.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")
    kind: Literal["simulated", "process", "llama_cpp", "endpoint", "batch_api"]
    url: str | None = None
    command: list[str] = VLLM_COMMAND
    environment: dict[str, str] = {}
    api_key_env: str | None = None
    models: list[str] = Field(default=[], description="only for datasets of these models; empty: for all")
    max_num_seqs: int | None = Field(default=None, ge=1)
    start_seconds: float = Field(default=1800, gt=0, description="compiling a large model was seen to take 2,222 s")
    timeout: float = Field(default=REQUEST_SECONDS, gt=0, description="seconds that one request may take at most")
    concurrency: int | None = Field(default=None, ge=1, description="endpoint only: rows in flight at most")
    requests_per_minute: int | None = Field(default=None, ge=1, description="endpoint only")
    tokens_per_minute: int | None = Field(default=None, ge=1, description="endpoint only: of prompts and answers")
    gguf: Path | None = Field(default=None, description="llama_cpp only: the model's file, from the folder of this one")
    threads: int | None = Field(default=None, ge=1, description="llama_cpp only; all cores but one by default")
    context: int | None = Field(
        default=None, ge=64, le=1 << 20, description="llama_cpp only: tokens of one row, prompt and answer"
    )
    speed: float = Field(default=20.0, gt=0, description="simulated only: how much faster than the modelled GPU")
    arguments: list[str] = Field(
        default=[], description="further arguments of gpu_runner.simulator, or of gpu_runner.providers.llama_cpp_server"
    )
    tls: EngineTls | None = Field(default=None, description="endpoint of https only: certificates")
    usd_per_million_tokens: TokenPriceConfig | None = Field(
        default=None,
        description="endpoint and batch_api only: what a hosted API asks, one number or {input: , output: }",
    )
    batch: BatchApiConfig = Field(
        default=BatchApiConfig(), description="batch_api only: what a batch may hold, and its window"
    )
    engine: EngineOptions = Field(
        default=PLAIN,
        description="endpoint and batch_api only: what it was started with, as `engine` of a dataset says it",
    )
    region: str = Field(default="", max_length=63, description="where it is; see BATCH_ASSETS_REGION")
    provider: str = "local"
    instance_type: str = "local"

    @model_validator(mode="before")
    @classmethod
    def _timeout_was_called_otherwise(cls, found: Any) -> Any:
        """`request_seconds` in files of an earlier version."""
        if not isinstance(found, dict) or "request_seconds" not in found or "timeout" in found:
            return found
        return {
            **{name: value for name, value in found.items() if name != "request_seconds"},
            "timeout": found["request_seconds"],
        }

    @field_validator("models")
    @classmethod
    def _models_are_words(cls, models: list[str]) -> list[str]:
        for model in models:
            if problem := name_problem(model):
                raise _WholeProblem(f"models: expected names of models, found one of which {problem}")
        return models

    @model_validator(mode="after")
    def _gguf_has_a_name(self) -> EngineConfig:
        if (self.kind == "llama_cpp") != (self.gguf is not None):
            raise _WholeProblem("gguf: expected a file for kind llama_cpp, and for no other kind")
        if self.kind == "llama_cpp" and not self.models:
            raise _WholeProblem("models: expected the name of the model in the gguf file, as datasets call it")
        return self

    @model_validator(mode="after")
    def _fields_are_of_its_kind(self) -> EngineConfig:
        for kind, names, words in _FIELDS_OF_KINDS:
            if self.kind != kind and any(getattr(self, name) is not None for name in names):
                raise _WholeProblem(f"{', '.join(names)}: {words}")
        return self

    @model_validator(mode="after")
    def _a_batch_api_has_its_price(self) -> EngineConfig:
        if self.usd_per_million_tokens is not None and not self.runs_already:
            raise _WholeProblem("usd_per_million_tokens: expected for kind endpoint or batch_api, and for no other")
        if self.kind == "batch_api" and self.usd_per_million_tokens is None:
            raise _WholeProblem("usd_per_million_tokens: expected for kind batch_api, which is compared by its price")
        if self.kind != "batch_api" and self.batch != BatchApiConfig():
            raise _WholeProblem("batch: expected for kind batch_api only")
        return self

    @model_validator(mode="after")
    def _only_an_endpoint_is_described(self) -> EngineConfig:
        if self.engine.written() and not self.runs_already:
            raise _WholeProblem(
                "engine: expected for kind endpoint or batch_api; another one is started as each dataset needs it"
            )
        return self

    @model_validator(mode="after")
    def _tls_needs_https(self) -> EngineConfig:
        if self.tls is not None and not (self.url or "").startswith("https://"):
            raise _WholeProblem("tls: expected for kind endpoint or batch_api with a url of https://, and for no other")
        return self

    @property
    def token_price(self) -> TokenPrice | None:
        """What its tokens cost; None: it is not paid by the token."""
        return None if self.usd_per_million_tokens is None else self.usd_per_million_tokens.price

    @property
    def limits(self) -> RequestLimits:
        """What it may be asked."""
        batches = self.batch.limits if self.kind == "batch_api" else None
        return RequestLimits(self.timeout, self.concurrency, self.requests_per_minute, self.tokens_per_minute, batches)

    @property
    def runs_already(self) -> bool:
        """Whether it is a server that somebody else runs."""
        return self.kind in ("endpoint", "batch_api")

    @property
    def tls_files(self) -> TlsFiles | None:
        """Certificates for its connections; None: those of the system."""
        return None if self.tls is None else self.tls.files()

    @property
    def api_key(self) -> str | None:
        """The key that `api_key_env` names, as it stands now."""
        return key_in(self.api_key_env) if self.api_key_env else None

    @property
    def simulated(self) -> bool:
        """Whether it is known to be a simulator. Of an `endpoint`, only its answers tell."""
        return self.kind == "simulated" or (self.kind == "process" and SIMULATOR in self.command)

    def lacks(self, options: EngineOptions) -> list[str]:
        """Keys of `options` that change answers and that it does not have. One that is started for a run has all of
        them, but for llama.cpp, which takes none, and for the arguments of another server than its command's.
        """
        if self.kind == "process" and not self.simulated and options.written():
            theirs = "sglang" if any("sglang" in word for word in self.command) else "vllm"
            return [] if (options.server or "vllm") == theirs else ["server"]
        return [] if self.kind in ("process", "simulated") else options.missing(self.engine)

    @property
    def slots(self) -> int | None:
        """Rows at once, where they are known."""
        return self.max_num_seqs or (LLAMA_CPP_SLOTS if self.kind == "llama_cpp" else None)

    @model_validator(mode="after")
    def _endpoint_has_url(self) -> EngineConfig:
        if self.runs_already != (self.url is not None):
            raise _WholeProblem("url: expected for kind endpoint or batch_api, and for no other kind")
        if self.url is not None:
            try:
                engine_url(self.url)
            except ValueError as error:
                raise _WholeProblem(f"url: {error}") from None
        return self


class FleetConfig(BaseModel):
    """What fleet.yaml holds: engines that stand there anyway, and providers of which instances are rented."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    engines: list[EngineConfig] = Field(default=[], description="engines that are taken before anything is rented")
    simulated: SimulatedCloudConfig | None = Field(
        default=None,
        description="providers that only play their machines; `default`: the three of a fleet without this file",
    )
    simulate_only_if_asked: bool = Field(
        default=False, description="a run takes simulated providers with `--simulate` only; so it is without this file"
    )
    local: list[LocalProviderConfig] = Field(default=[], description="GPUs of this machine, a provider for each entry")
    kubernetes: list[KubernetesProviderConfig] = Field(
        default=[], description="namespaces of Kubernetes clusters, a provider for each entry; see `docs/providers.md`"
    )
    ssh: list[SshProviderConfig] = Field(default=[], description="hosts of your own, reached by SSH")
    ec2: list[Ec2ProviderConfig] = Field(default=[], description="VMs of AWS, an account for each entry")
    runpod: list[RunPodConfig] = Field(default=[], description="pods of RunPod (experimental), an account for each")
    prices: PricingConfig = Field(default=PricingConfig(), description="price sources, see `docs/pricing.md`")
    alerts: AlertConfig | None = Field(default=None, description="a webhook that hears of deadlines and budgets")
    allowed_endpoints: list[str] = Field(
        default=[], description="further addresses that the tag `batch/endpoint` may name; no key is sent to them"
    )
    max_instances: int = Field(default=20, ge=1, description="most instances at once, of all datasets together")
    idle_minutes: float = Field(default=10, ge=0, description="real; how long an instance waits for the next run")
    start_seconds: float = Field(
        default=1800,
        gt=0,
        description="how long a boot may take, by the provider's clock; never less than 60 real seconds or 3 × its "
        "offer's `boot_seconds`",
    )
    move_seconds: float = Field(default=30, gt=0, description="how often a run looks for a cheaper offer")
    _home: Path | None = PrivateAttr(default=None)  # where endpoints.json lies

    @field_validator("allowed_endpoints")
    @classmethod
    def _addresses(cls, given: list[str]) -> list[str]:
        try:
            return [engine_url(one) for one in given]
        except ValueError as error:
            raise _WholeProblem(f"allowed_endpoints: {error}") from None

    @model_validator(mode="before")
    @classmethod
    def _default_cloud(cls, given: object) -> object:
        """A file that names no engine and no provider keeps the embedded simulated ones, as one with the word does."""
        if not isinstance(given, dict) or not given:
            return given
        if not given.keys() & {"engines", "simulated", *RENTED}:
            return {"simulate_only_if_asked": True, **given, "simulated": default_cloud()}
        if given.get("simulated") == "default":
            return {**given, "simulated": default_cloud()}
        return given

    @model_validator(mode="after")
    def _names_differ(self) -> FleetConfig:
        if not self.engines and not self.rented and self.simulated is None:
            raise _WholeProblem(f"engines: expected at least one of engines, simulated, {', '.join(RENTED)}")
        names = [engine.name for engine in self.engines]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise _WholeProblem(f"engines: expected a name of its own for each, found twice: {', '.join(twice)}")
        providers = [one.name for one in self.rented]
        providers += [one.name for one in self.simulated.providers] if self.simulated else []
        if twice := sorted({name for name in providers if providers.count(name) > 1}):
            raise _WholeProblem(f"expected a name of its own for each provider, found twice: {', '.join(twice)}")
        return self

    @model_validator(mode="after")
    def _idle_vms_live_on(self) -> FleetConfig:
        """A machine that waits for the next run is asked nothing: it must not take itself for an orphan."""
        limits = [("ec2", one.name, one.orphan_minutes) for one in self.ec2]
        limits += [("runpod", one.name, one.orphan_minutes) for one in self.runpod]
        for kind, name, minutes in limits:
            if minutes <= self.idle_minutes:
                raise _WholeProblem(
                    f"{kind}: expected orphan_minutes of {name} above idle_minutes ({self.idle_minutes:g}), found "
                    f"{minutes:g}"
                )
        return self

    @property
    def rented(self) -> list[RentedConfig]:
        """Every provider of real machines."""
        return [*self.local, *self.kubernetes, *self.ssh, *self.ec2, *self.runpod]

    @classmethod
    def embedded(cls) -> FleetConfig:
        """Three simulated providers that compete: what a newcomer sees. A run takes them only where it is asked to."""
        return cls(
            simulated=default_cloud(),
            simulate_only_if_asked=True,
            idle_minutes=EMBEDDED_IDLE_MINUTES,
            move_seconds=2,
        )

    def serves_really(self, model: str) -> bool:
        """Whether an engine or provider that is no simulation may serve the model. Simulated ones then do not."""
        return self.rents_really or any(not engine.simulated for engine in self._fitting(model))

    @property
    def rents_really(self) -> bool:
        """Whether a provider of real machines, with real engines on them, is there."""
        return any(not _plays(one) for one in self.rented)

    def leaves_out(self, provider: str, model: str) -> bool:
        """Whether the provider only plays its machines, and something else really serves the model."""
        played = self.simulated.providers if self.simulated is not None else ()
        return any(one.name == provider for one in played) and self.serves_really(model)

    def may_serve(self, model: str, *, batches: bool = True) -> bool:
        """Whether anything of this file may serve the model: an engine, or what a provider has. Not asked: whether it
        is to be had now. `batches`: as in `engines_for`.
        """
        return bool(self._fitting(model, batches) or self.simulated is not None or self.rented)

    def only_plays(self, model: str, *, simulate: bool = False) -> bool:
        """Whether there is no engine for the model but a simulation that nobody asked for."""
        return not simulate and self.simulate_only_if_asked and not self.serves_really(model)

    def _fitting(self, model: str, batches: bool = True) -> list[EngineConfig]:
        there = [engine for engine in self.engines if batches or engine.kind != "batch_api"]
        return [engine for engine in there if not engine.models or model in engine.models]

    def check_asked(self, model: str, endpoint: str | None, *, simulate: bool) -> None:
        """Raises FleetConfigError where there is no engine but a simulation that nobody asked for."""
        if endpoint or not self.only_plays(model, simulate=simulate):
            return
        raise FleetConfigError(
            f"no engine for {model}: expected one in fleet.yaml, a provider there, or an address, found none of these. "
            "What can be had: llama.cpp on this computer's CPU (kind: llama_cpp, docs/operations.md#llamacpp); a "
            "server with OpenAI's API (--endpoint http://HOST:PORT, or BATCH_ASSETS_ENDPOINT); GPUs of this machine, "
            "of a cluster or of a cloud as a provider in fleet.yaml (docs/fleet.md). To see how it works with made-up "
            "texts: `batch-assets run NAME --simulate`, the tag batch/simulate: true, or `simulated: default` in "
            "fleet.yaml"
        )

    def engines_for(
        self, model: str, endpoint: str | None, options: EngineOptions = PLAIN, *, batches: bool = True
    ) -> Sequence[EngineConfig]:
        """Engines that may serve the model, started with `options`, or the one at this address. Raises
        FleetConfigError. `batches`: those too that answer hours later, by a Batch API.

        The address comes from a tag, which whoever reaches Dagster may write: it only chooses among those that the
        environment, fleet.yaml or a command line on this home has named. A key goes to the address it was given for.
        """
        if endpoint:
            named = self._engine_at(endpoint)
            if named.engine.written() and (lacking := named.lacks(options)):
                raise FleetConfigError(_not_started_so(model, [named], options, lacking))
            return [named]
        fitting = self._fitting(model, batches)
        if not self.may_serve(model, batches=batches):
            raise FleetConfigError(
                f"fleet.yaml: expected an engine that serves {model}, found engines for "
                f"{', '.join(sorted({model for engine in self.engines for model in engine.models}))}"
            )
        really = self.serves_really(model)
        fitting = [engine for engine in fitting if not (really and engine.simulated)]
        started_so = [engine for engine in fitting if not engine.lacks(options)]
        if fitting and not started_so and not self.rented and self.simulated is None:
            raise FleetConfigError(_not_started_so(model, fitting, options, fitting[0].lacks(options)))
        return started_so

    def user_engine(self, name: str, model: str) -> EngineConfig:
        """The engine that `prompt.user_model.engine` of a dataset names. Raises FleetConfigError.

        It must name the model: an engine that is for all models is one for the rows of all datasets.
        """
        key, engine = "prompt.user_model.engine", next((one for one in self.engines if one.name == name), None)
        if engine is None or engine.kind != "endpoint":
            known = ", ".join(sorted(one.name for one in self.engines if one.kind == "endpoint")) or "none"
            found = show(name) if engine is None else f"{name}, of kind {engine.kind}"
            raise FleetConfigError(f"{key}: expected an engine of kind endpoint in fleet.yaml ({known}), found {found}")
        if model not in engine.models:
            raise FleetConfigError(
                f"{key}: expected an engine whose entry in fleet.yaml has {model} among its `models`, found {name} "
                f"with {', '.join(engine.models) or 'none, so that it is for the rows of all datasets'}. Write "
                f"`models: [{model}]` there"
            )
        return engine

    def _engine_at(self, endpoint: str) -> EngineConfig:
        try:
            url, own = engine_url(endpoint), _engine_of_environment()
            given = None if self._home is None else endpoints.allowed(self._home, url)
        except (ValueError, endpoints.EndpointsError) as error:
            raise FleetConfigError(f"address of the engine (--endpoint, tag batch/endpoint): {error}") from None
        key = key_in(KEY_VARIABLE)
        there = [engine for engine in self.engines if engine.url and engine.kind == "endpoint"]
        standing = [engine for engine in there if engine_url(engine.url or "") == url]
        price = given.usd_per_million_tokens if given else None
        price = price or (standing[0].usd_per_million_tokens if standing else None)
        if url == own or (given and given.takes(key)):
            found = _endpoint_engine(url, KEY_VARIABLE if key else None, price)
            return found if not standing else _with_key(standing[0], found)
        if standing:
            return standing[0].model_copy(update={"usd_per_million_tokens": price})
        if (given and given.without_key) or url in self.allowed_endpoints:
            return _endpoint_engine(url, None, price)
        if given:
            raise FleetConfigError(
                f"{KEY_VARIABLE}: expected the key that was given with --endpoint, found another or none in the "
                "environment of this Dagster; end it and start it with the key"
            )
        raise FleetConfigError(
            "tag batch/endpoint: expected an address that BATCH_ASSETS_ENDPOINT, `engines` or `allowed_endpoints` in "
            "fleet.yaml, or `batch-assets run --endpoint` has named, found another one; nothing was sent to it"
        )

    @classmethod
    def load(cls, path: Path, home: Path | None = None) -> FleetConfig:
        """Read fleet.yaml; `home`: where the addresses lie that were allowed by a command.

        Raises FleetConfigError naming file, key, expected and found.
        """
        found = cls._load(path)
        found._home = home
        return found

    @classmethod
    def _load(cls, path: Path) -> FleetConfig:
        if not path.exists():
            if os.environ.get("BATCH_ASSETS_FLEET") == str(path):
                raise FleetConfigError(f"{path}: expected the file that BATCH_ASSETS_FLEET names, found none")
            return cls.embedded()
        try:
            document = _document(read_text(path, LARGEST_FILE))
            found = _validated(cls, document, path)
            below: dict[str, object] = {"prices": found.prices.below(path.parent)}
            if found.kubernetes:
                below["kubernetes"] = [one.below(path.parent) for one in found.kubernetes]
            if found.engines:
                below["engines"] = [_below(engine, path.parent) for engine in found.engines]
            if found.ssh:
                below["ssh"] = [one.below(path.parent) for one in found.ssh]
            return found.model_copy(update=below)
        except YamlProblem as error:
            raise FleetConfigError(f"{path}: {error}") from None
        except OSError as error:
            raise FleetConfigError(f"{path}: expected a readable file, found: {error.strerror}") from None


def _not_started_so(model: str, engines: Sequence[EngineConfig], options: EngineOptions, lacking: Sequence[str]) -> str:
    """Why none of the engines is taken, and what to write."""
    wanted = {name: value for name, value in options.identity().items() if name in lacking}
    names = ", ".join(engine.name for engine in engines)
    return (
        f"no engine for {model} as the dataset needs it: expected one started with {show(wanted)}, found {names} "
        "without. Where it was started so, say it in fleet.yaml: `engine:` of that entry, the same keys as of the "
        "dataset; else start it so, or name a provider that rents"
    )


def _plays(provider: RentedConfig) -> bool:
    """Whether a provider of real machines starts the simulator on them: by its command, or an image of this name."""
    image = getattr(provider, "engine_image", "") or ""
    return SIMULATOR in getattr(provider, "command", ()) or image.partition("@")[0] == SIMULATOR


def _below(engine: EngineConfig, folder: Path) -> EngineConfig:
    """The engine with the path of its file from `folder` on."""
    update: dict[str, object] = {}
    if engine.gguf is not None:
        update["gguf"] = folder.resolve() / engine.gguf.expanduser()
    if engine.tls is not None:
        update["tls"] = engine.tls.below(folder)
    return engine.model_copy(update=update) if update else engine


def _engine_of_environment() -> str | None:
    """BATCH_ASSETS_ENDPOINT in our spelling. Raises ValueError, without what it holds."""
    found = os.environ.get(ENDPOINT_VARIABLE)
    try:
        return engine_url(found) if found else None
    except ValueError as error:
        raise ValueError(f"{ENDPOINT_VARIABLE}: {error}") from None


def _endpoint_engine(url: str, api_key_env: str | None, price: TokenPriceConfig | None) -> EngineConfig:
    name = re.sub(r"[^a-z0-9._-]+", "-", url.split("://")[-1].lower()).strip("-._")[:63]
    own = EngineConfig(name=name or "endpoint", kind="endpoint", url=url, api_key_env=api_key_env)
    described = {"provider": "endpoint", "instance_type": "endpoint"}
    files = tls_of_environment() if url.startswith("https://") else None
    tls = None if files is None else EngineTls(ca=files.ca, certificate=files.certificate, key=files.key)
    return own.model_copy(update={**described, "tls": tls, "usd_per_million_tokens": price})


def _with_key(standing: EngineConfig, given: EngineConfig) -> EngineConfig:
    """An engine of fleet.yaml whose address was given too: with the key that was given with it, if any was; all else,
    its limits too, is as the file says.
    """
    key, tls = given.api_key_env or standing.api_key_env, standing.tls or given.tls
    price = given.usd_per_million_tokens
    return standing.model_copy(update={"api_key_env": key, "tls": tls, "usd_per_million_tokens": price})


def _document(text: str) -> Document:
    """The one document of a file. Raises YamlProblem."""
    documents = load_documents(text)
    if len(documents) > 1:
        raise YamlProblem("one document", str(len(documents)))
    return documents[0] if documents else Document(None, None)


def _validated(model: type[FleetConfig], document: Document, path: Path) -> FleetConfig:
    """Raises FleetConfigError with every wrong place: its line, key, what was expected and found."""
    try:
        return model.model_validate(document.value)
    except ValidationError as error:
        details = sorted(error.errors(include_url=False), key=lambda one: line_of(document.node, one["loc"]))
        details = details[:MOST_PROBLEMS]
        lines = [_problem(dict(one), model, document) for one in details]
        more = error.error_count() - len(lines)
        if len(lines) == 1:
            raise FleetConfigError(f"{path}: {lines[0]}") from None
        listed = "".join(f"\n  {line}" for line in [*lines, *([f"and {more} more"] if more else [])])
        raise FleetConfigError(f"{path}: {error.error_count()} problems{listed}") from None


def _problem(detail: dict[str, Any], model: type[FleetConfig], document: Document) -> str:
    """One wrong place. Of what may be a secret only the type is shown: a part, a setting of an engine's environment, an
    address, or whatever stands under a key that we do not know (`api_key: …`).
    """
    keys, found, kind = detail["loc"], detail["input"], detail["type"]
    line = line_of(document.node, keys)
    place = f" (line {line})" if line else ""
    cause = detail.get("ctx", {}).get("error")
    if isinstance(cause, _WholeProblem):
        where = ".".join(map(str, keys))
        return f"{where + ': ' if where else ''}{cause}{place}"
    secret = {"environment", "alerts"} & set(keys) or {"@", "/", "?", "#"} & set(str(found))
    if secret or not isinstance(found, str | int | float | bool):
        detail = {**detail, "input": None}
    said = problem_of(detail, model, document.value)
    key = ".".join(map(str, keys)) or "this file"
    if kind in ("extra_forbidden", "missing"):
        return f"{key}: expected {said.expected}, found {said.found}. {said.hint}".rstrip(". ") + place
    if isinstance(cause, Unusable) and cause.key and not secret & {"environment", "alerts"}:
        key, detail = said.key, {**detail, "input": cause.found}  # a section's own words of one of its keys
    shown = said.found if detail["input"] is not None else type(found).__name__
    expected = said.expected[:1].lower() + said.expected[1:]
    expected = expected.removeprefix("value error, ")
    return f"{key}: expected {expected}, found {shown}" + (f". {said.hint}" if said.hint else "") + place
