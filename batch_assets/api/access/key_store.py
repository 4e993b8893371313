"""API keys in the service's database: made, listed, revoked, found. Of a key itself only a digest is kept.

Every replica of the service looks here, so a key that is revoked is refused by all of them within `KeyCache.seconds`.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable

import sqlalchemy as sa

from batch_assets.api.access.api_keys import (
    ApiKey,
    KeyRequestError,
    checked_tenant,
    key_digest,
    looks_like_key,
    new_key_id,
    new_secret,
)
from batch_assets.api.database.service_database import Records
from batch_assets.api.database.tables import API_KEYS
from batch_assets.api.requests.callers import Scope

MOST_LISTED = 10_000
LONGEST_NAME = 100


class KeyStore:
    """The table of keys. Safe to use from several threads. `clock`: Unix seconds. Raises RecordsError."""

    def __init__(self, url: str, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.records = Records(url)

    def close(self) -> None:
        """Close all connections."""
        self.records.close()

    def create(
        self,
        tenant: str,
        scopes: frozenset[Scope],
        *,
        name: str = "",
        lifetime: float | None = None,
        random_bytes: Callable[[int], bytes] = secrets.token_bytes,
    ) -> tuple[ApiKey, str]:
        """A new key and its secret, which nobody can read again. `lifetime`: seconds, None: for ever.

        Raises KeyRequestError.
        """
        if len(name) > LONGEST_NAME or not (name.isprintable() or not name):
            raise KeyRequestError(f"name: expected at most {LONGEST_NAME} printable characters")
        now, secret = int(self._clock()), new_secret(random_bytes)
        expires = None if lifetime is None else now + max(1, int(lifetime))
        key = ApiKey(
            new_key_id(random_bytes), checked_tenant(tenant), name, scopes, key_digest(secret), now, expires, None
        )
        row = {
            "key_id": key.key_id,
            "tenant": key.tenant,
            "name": key.name,
            "scopes": " ".join(sorted(key.scopes)),
            "digest": key.digest,
            "created_at": now,
            "expires_at": expires,
        }
        with self.records.writing() as connection:
            connection.execute(API_KEYS.insert().values(**row))
        return key, secret

    def keys(self, tenant: str | None = None) -> list[ApiKey]:
        """Keys of a tenant, or all of them, the newest first; revoked and expired ones among them."""
        found = sa.select(API_KEYS).order_by(API_KEYS.c.created_at.desc(), API_KEYS.c.key_id).limit(MOST_LISTED)
        if tenant is not None:
            found = found.where(API_KEYS.c.tenant == tenant)
        with self.records.reading() as connection:
            return [_key(row) for row in connection.execute(found).mappings()]

    def revoke(self, key_id: str) -> ApiKey:
        """From now on this key is refused; a second call changes nothing. Raises KeyRequestError for an unknown id."""
        where = API_KEYS.c.key_id == key_id
        with self.records.writing() as connection:
            change = API_KEYS.update().where(where & API_KEYS.c.revoked_at.is_(None))
            connection.execute(change.values(revoked_at=int(self._clock())))
            row = connection.execute(sa.select(API_KEYS).where(where)).mappings().first()
        if row is None:
            raise KeyRequestError(
                f"key: expected the id of a key, as `batch-assets keys list` shows it, found {key_id[:40]!r}"
            )
        return _key(row)

    def find(self, secret: str) -> ApiKey | None:
        """The key with this secret, usable or not; None when there is none."""
        if not looks_like_key(secret):
            return None
        found = sa.select(API_KEYS).where(API_KEYS.c.digest == key_digest(secret))
        with self.records.reading() as connection:
            row = connection.execute(found).mappings().first()
        key = None if row is None else _key(row)
        return key if key is not None and key.is_for(secret) else None

    def any_usable(self) -> bool:
        """Whether there is a key that lets somebody in now."""
        now = self._clock()
        found = sa.select(API_KEYS.c.key_id).where(
            API_KEYS.c.revoked_at.is_(None) & (API_KEYS.c.expires_at.is_(None) | (API_KEYS.c.expires_at > now))
        )
        with self.records.reading() as connection:
            return connection.execute(found.limit(1)).first() is not None


class KeyCache:
    """Keys that were found lately, by digest: the database is not asked for each request.

    A key that was revoked meanwhile is let in for at most `seconds`. What was not found is not kept: it could only be a
    guess, and guesses would drive real keys out. `clock`: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float], seconds: float = 5.0, most: int = 10_000) -> None:
        self._clock, self._seconds, self._most = clock, seconds, most
        self._kept: OrderedDict[str, tuple[float, ApiKey]] = OrderedDict()

    def get(self, secret: str) -> ApiKey | None:
        """The key with this secret, if it was found a moment ago."""
        digest = key_digest(secret)
        kept = self._kept.get(digest)
        if kept is None or self._clock() - kept[0] >= self._seconds:
            return None
        return kept[1]

    def put(self, key: ApiKey) -> None:
        """Remember it; the one that was found longest ago is forgotten."""
        self._kept[key.digest] = (self._clock(), key)
        self._kept.move_to_end(key.digest)
        if len(self._kept) > self._most:
            self._kept.popitem(last=False)

    def __len__(self) -> int:
        return len(self._kept)


def _key(row: sa.RowMapping) -> ApiKey:
    known = {scope.value: scope for scope in Scope}
    return ApiKey(
        key_id=row["key_id"],
        tenant=row["tenant"],
        name=row["name"],
        scopes=frozenset(known[word] for word in row["scopes"].split() if word in known),
        digest=row["digest"],
        created_at=row["created_at"],
        expires_at=row["expires_at"],
        revoked_at=row["revoked_at"],
    )
