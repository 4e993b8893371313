"""`batch-assets keys`: makes, lists and revokes API keys of the front door."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime

from rich.box import SIMPLE_HEAD
from rich.table import Table

from batch_assets.api.access.api_keys import ApiKey, KeyRequestError, checked_scopes
from batch_assets.api.access.key_store import KeyStore
from batch_assets.api.settings import api_settings
from batch_assets.cli.output import output_console, print_json
from batch_assets.local_dagster.home import prepare_home
from batch_assets.spec.deadline import parse_seconds

LONGEST_SECONDS = 3653 * 86400.0


def create_key(tenant: str, scopes: list[str], name: str, expires: str | None, *, as_json: bool) -> None:
    """Make a key, and show it this once. Raises KeyRequestError."""
    wanted = checked_scopes(scopes)
    lifetime = None if expires is None else parse_seconds(expires)
    if expires is not None and (lifetime is None or not 1 <= lifetime <= LONGEST_SECONDS):
        raise KeyRequestError(f"--expires: expected a time as 90d or 12h, at most ten years, found {expires[:40]!r}")
    with _keys() as store:
        key, secret = store.create(tenant, wanted, name=name, lifetime=lifetime)
    if as_json:
        print_json({**_shown(key), "key": secret})
        return
    sys.stderr.write(f"{key.key_id} for {key.tenant}. The key is shown this once; only a digest of it is kept.\n")
    sys.stdout.write(f"{secret}\n")


def list_keys(tenant: str | None, *, as_json: bool) -> None:
    """Show all keys, or those of a tenant. Never the keys themselves: nobody has them."""
    with _keys() as store:
        found = store.keys(tenant)
    if as_json:
        print_json({"keys": [_shown(key) for key in found]})
        return
    table = Table("key", "tenant", "name", "state", "made", "ends", "scopes", box=SIMPLE_HEAD)
    now = time.time()
    for key in found:
        scopes = " ".join(sorted(key.scopes))
        state = "revoked" if key.revoked_at is not None else "active" if key.usable(now) else "expired"
        table.add_row(key.key_id, key.tenant, key.name, state, _day(key.created_at), _day(key.expires_at), scopes)
    output_console().print(table)


def revoke_key(key_id: str) -> None:
    """End a key: the service refuses it within seconds. Raises KeyRequestError."""
    with _keys() as store:
        key = store.revoke(key_id)
    sys.stderr.write(f"{key.key_id} of {key.tenant} is revoked; the service refuses it within 5 s\n")


@contextlib.contextmanager
def _keys() -> Iterator[KeyStore]:
    prepare_home()
    with contextlib.closing(KeyStore(api_settings().database, time.time)) as store:
        yield store


def _shown(key: ApiKey) -> dict[str, object]:
    return {
        "key_id": key.key_id,
        "tenant": key.tenant,
        "name": key.name,
        "scopes": sorted(key.scopes),
        "created_at": key.created_at,
        "expires_at": key.expires_at,
        "revoked_at": key.revoked_at,
    }


def _day(moment: int | None) -> str:
    return "" if moment is None else datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%d %H:%M")
