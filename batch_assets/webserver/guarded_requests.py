"""What a request to Dagster's webserver is and does, read from its headers and its GraphQL document. Pure."""

from __future__ import annotations

import hmac
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

from graphql import GraphQLError, OperationDefinitionNode, OperationType, parse

MOST_TOKENS = 20_000
MOST_FIELDS = 100
# Headers that decide; a second one would let two readers see two different requests.
SINGLE = ("host", "origin", "authorization", "content-type", "content-length", "sec-fetch-site")
# Addresses of the webserver that are no pages: a foreign page may link to a page, but not to these.
NO_PAGES = ("/graphql", "/logs", "/notebook", "/dagit", "/download_debug", "/report_asset")
READS = frozenset({OperationType.QUERY})
LIVE_READS = frozenset({OperationType.QUERY, OperationType.SUBSCRIPTION})


class Refused(Exception):
    """The request is not let through. `status` is the HTTP status; the text says why and names no secret."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True, slots=True)
class Access:
    """The access rules: the port of the webserver, further host names (of a proxy or tunnel), the token and its
    cookie.
    """

    port: int
    token: str
    cookie: str
    hosts: frozenset[str] = frozenset()

    @property
    def cookie_name(self) -> str:
        """A name for each port: cookies of one host are shared by all its ports."""
        return f"batch_assets_{self.port}"

    def known_host(self, host: str) -> bool:
        """Whether this Host header names us. A page that rebinds its own name to 127.0.0.1 sends that name."""
        own = {f"{name}:{self.port}" for name in ("127.0.0.1", "localhost", "[::1]")}
        return host.lower() in own | self.hosts | ({"127.0.0.1", "localhost", "[::1]"} if self.port == 80 else set())

    def known_origin(self, origin: str, host: str) -> bool:
        """Whether a page of this origin is ours: the same host and port as the request's own."""
        scheme, _, named = origin.lower().partition("://")
        return named == host.lower() and (scheme == "http" or (scheme == "https" and named in self.hosts))

    def has_token(self, headers: Mapping[str, str]) -> bool:
        """Whether a program shows the token: `Authorization: Bearer TOKEN`."""
        scheme, _, shown = headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(shown.strip().encode(), self.token.encode())

    def has_cookie(self, headers: Mapping[str, str]) -> bool:
        """Whether the UI shows its cookie. Another port may have set one of the same name: any of them counts."""
        parts = [part.strip().partition("=") for part in headers.get("cookie", "").split(";")]
        shown = [value for name, _, value in parts if name == self.cookie_name]
        return any(hmac.compare_digest(value.encode(), self.cookie.encode()) for value in shown)


def read_headers(raw: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """Headers by lower-case name. Raises Refused where one that decides is there twice."""
    found: dict[str, str] = {}
    for name, value in raw:
        key, text = name.decode("latin-1").lower(), value.decode("latin-1").strip()
        if key in found and key in SINGLE:
            raise Refused(400, f"header {key}: expected one, found several")
        found[key] = f"{found[key]}; {text}" if key in found else text
    return found


def check_source(access: Access, headers: Mapping[str, str], *, method: str, path: str) -> None:
    """Raise Refused unless the request is for us, and comes from our own page, a program, or a link to a page."""
    host = headers.get("host", "")
    if not access.known_host(host):
        raise Refused(403, "Host: not a name of this server; further names go into BATCH_ASSETS_UI_HOSTS")
    if "origin" in headers and not access.known_origin(headers["origin"], host):
        raise Refused(403, "Origin: the request comes from a page of another origin")
    if headers.get("sec-fetch-site", "none") in ("none", "same-origin"):
        return
    followed = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
    if not (followed and method == "GET" and not path.startswith(NO_PAGES)):
        raise Refused(403, "Sec-Fetch-Site: the request comes from a page of another site")


def check_json(headers: Mapping[str, str], *, may_lack: bool) -> None:
    """Raise Refused for a body that a foreign page may send unasked (a form, text/plain) or that is no JSON."""
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not (may_lack and not headers.get("content-type")):
        raise Refused(415, "Content-Type: expected application/json")


def posted_operations(body: bytes) -> frozenset[OperationType]:
    """What a GraphQL request in a JSON body may do. Raises Refused when it is none."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        raise Refused(400, "body: expected JSON") from None
    if not isinstance(found, dict):
        raise Refused(400, "body: expected one JSON object with a GraphQL query")
    return operations(found.get("query"))


def asked_operations(query_string: bytes) -> frozenset[OperationType]:
    """What a GraphQL request in an address may do; of several `query` parameters each one counts."""
    try:
        fields = parse_qsl(query_string.decode("latin-1"), keep_blank_values=True, max_num_fields=MOST_FIELDS)
    except ValueError:
        raise Refused(400, "query string: too many fields") from None
    return frozenset().union(*(operations(value) for name, value in fields if name == "query"))


def operations(query: object) -> frozenset[OperationType]:
    """Kinds of all operations of a document. All count, whichever `operationName` picks."""
    if not isinstance(query, str):
        raise Refused(400, "query: expected a GraphQL document as text")
    try:
        document = parse(query, no_location=True, max_tokens=MOST_TOKENS)
    except (GraphQLError, RecursionError):
        raise Refused(400, "query: expected a GraphQL document, found one that cannot be parsed") from None
    return frozenset(node.operation for node in document.definitions if isinstance(node, OperationDefinitionNode))


def check_message(message: Mapping[str, Any], limit: int) -> None:
    """Raise Refused for a WebSocket message that changes something, or that is none of the protocol's (graphql-ws)."""
    text = message.get("text")
    if not isinstance(text, str) or len(text) > limit:
        raise Refused(400, "message: expected text of moderate size")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise Refused(400, "message: expected JSON") from None
    if not isinstance(found, dict):
        raise Refused(400, "message: expected a JSON object")
    if found.get("type") == "start":
        payload = found.get("payload")
        kinds = operations(payload.get("query") if isinstance(payload, dict) else None)
        if not kinds <= LIVE_READS:
            raise Refused(403, "a change: expected by POST")
