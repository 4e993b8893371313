"""The Hugging Face hub as it is reached from here: addresses of datasets, and its client.

Addresses are those of huggingface_hub's file system and of DuckDB: `hf://datasets/OWNER/NAME@REVISION/PATH`
(https://huggingface.co/docs/huggingface_hub/guides/hf_file_system). Token and address of the hub come from the
environment, and are never part of them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import quote, unquote

from resources.objects.object_interface import StoreError

if TYPE_CHECKING:
    import httpx2
    from huggingface_hub import HfApi

T = TypeVar("T")

TOKEN, ENDPOINT = "HF_TOKEN", "HF_ENDPOINT"
TRIES = 5
TRANSIENT = frozenset({408, 409, 412, 429, 500, 502, 503, 504})  # what the hub may answer otherwise a moment later
SILENCE_SECONDS = 300.0  # of a hub that is connected to or has been asked: it may think so long about a large commit
MAIN, CONVERTED = "main", "refs/convert/parquet"
EXPECTED_ADDRESS = "hf://datasets/OWNER/NAME/FILE or hf://datasets/OWNER/NAME@REVISION/data/*.parquet"
_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"
_ADDRESS = re.compile(
    rf"hf://datasets/({_NAME}/{_NAME})(?:@(~parquet|refs/(?:convert/[\w.-]+|pr/\d+)|[\w.%+-]+))?(?:/([^#]*))?",
    re.ASCII | re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class HubAddress:
    """A place in a dataset repository. `revision`: a branch, a tag or a commit; `path`: "" for the whole repository."""

    repo: str
    revision: str = MAIN
    path: str = ""

    def __str__(self) -> str:
        return f"hf://datasets/{self.name}/{self.path}".rstrip("/")

    @property
    def name(self) -> str:
        """The repository, with its revision where that is not `main`."""
        shown = "~parquet" if self.revision == CONVERTED else quote(self.revision, safe="")
        return self.repo if self.revision == MAIN else f"{self.repo}@{shown}"


def hub_address(path: str) -> HubAddress | None:
    """The place on the hub that a path names; None for any other path. Raises ValueError for `hf://` and no dataset."""
    if path.partition("://")[0].lower() != "hf":
        return None
    found = _ADDRESS.fullmatch(path)
    if found is None:
        raise ValueError(f"expected {EXPECTED_ADDRESS}, found another address of the hub")
    repo, revision, below = found.groups()
    revision = CONVERTED if revision == "~parquet" else unquote(revision or MAIN)
    return HubAddress(repo, revision, (below or "").strip("/"))


def hub_api(environment: Mapping[str, str]) -> HfApi:
    """The hub's client, for the address and the token in the environment; without a token it asks as nobody, and never
    with one that lies on this disk. A hub that is silent is left after SILENCE_SECONDS. Raises StoreError."""
    try:
        from huggingface_hub import HfApi
        from huggingface_hub.utils import logging
        from huggingface_hub.utils.tqdm import disable_progress_bars
    except ImportError:
        raise StoreError(
            "expected the package huggingface_hub, found none; `pip install 'batch-assets[hub]'` brings it"
        ) from None
    endpoint = environment.get(ENDPOINT) or None
    if endpoint and {"@", "?", "#"} & set(endpoint):
        raise StoreError(f"{ENDPOINT}: expected an address without user, password, query or fragment")
    disable_progress_bars()
    _bound_sessions()
    logging.get_logger().setLevel("ERROR")
    return HfApi(endpoint=endpoint, token=environment.get(TOKEN, "").strip() or False, library_name="batch-assets")


@functools.cache
def _bound_sessions() -> None:
    """Every session of huggingface_hub in this process has a time-out. By themselves they wait for ever: a session is
    made anew after an error of its connection, and lists are asked for with `timeout=None`.
    """
    import httpx2
    from huggingface_hub import get_session, set_client_factory

    hooks = get_session().event_hooks
    bounded = {**hooks, "request": [*hooks["request"], _bound]}
    set_client_factory(
        lambda: httpx2.Client(event_hooks=bounded, follow_redirects=True, timeout=SILENCE_SECONDS),
    )


def _bound(request: httpx2.Request) -> None:
    seconds = request.extensions.get("timeout", {})
    kinds = ("connect", "read", "write", "pool")
    request.extensions["timeout"] = {kind: seconds.get(kind) or SILENCE_SECONDS for kind in kinds}


class Passing(Exception):
    """What may be otherwise a moment later. `headers`: of the hub's answer, which may ask for some seconds."""

    def __init__(self, said: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(said)
        asked = (headers or {}).get("Retry-After", "")
        self.wait = float(asked) if asked.isdecimal() else 0.0


def tried_again(call: Callable[[], T], sleep: Callable[[float], None], longest_wait: float) -> T:
    """What a call returns that is repeated while it raises Passing, TRIES times in all. Raises the last one."""
    for number in range(TRIES - 1):
        try:
            return call()
        except Passing as passing:
            sleep(min(passing.wait or 2.0**number, longest_wait))
    return call()
