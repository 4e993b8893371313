"""`/docs`: the OpenAPI description as a page, without scripts and without anything from elsewhere."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
STYLE = """
:root{color-scheme:light dark;--line:#8884;--soft:#8881;--get:#1769aa;--post:#2e7d32;--delete:#b3261e}
body{font:15px/1.5 system-ui,sans-serif;margin:0 auto;max-width:62rem;padding:1.5rem}
h1{margin:.2rem 0}h2{margin:2rem 0 .5rem;text-transform:capitalize}
details{border:1px solid var(--line);border-radius:6px;margin:.4rem 0;background:var(--soft)}
summary{cursor:pointer;padding:.45rem .7rem;display:flex;gap:.8rem;align-items:baseline;flex-wrap:wrap}
details>div{padding:.2rem .9rem .8rem;border-top:1px solid var(--line)}
.method{font:700 12px/1 ui-monospace,monospace;color:#fff;border-radius:4px;padding:.3rem .5rem;min-width:3.6rem;
text-align:center;background:#555}.get{background:var(--get)}.post{background:var(--post)}.delete{background:var(--delete)}
code,pre{font:13px/1.45 ui-monospace,monospace}pre{overflow:auto;background:var(--soft);padding:.6rem;border-radius:6px}
table{border-collapse:collapse;width:100%;margin:.3rem 0 .6rem}
td,th{border-bottom:1px solid var(--line);padding:.25rem .5rem;text-align:left;vertical-align:top}
"""

router = APIRouter(include_in_schema=False)


@router.get("/docs")
async def docs(request: Request) -> HTMLResponse:
    """The page."""
    return HTMLResponse(page(request.app.openapi()), headers={"Content-Security-Policy": POLICY})


def page(document: Mapping[str, Any]) -> str:
    """The page of an OpenAPI document."""
    info = document["info"]
    title = escape(info["title"])
    scheme = document["components"]["securitySchemes"]["bearer"]["description"]
    return "".join(
        (
            f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title>",
            f"<meta name=viewport content='width=device-width'><style>{STYLE}</style>",
            f"<h1>{title}</h1><p>{escape(info.get('summary', ''))} For programs: ",
            "<a href=openapi.json>openapi.json</a>.</p>",
            f"<p><code>Authorization: Bearer …</code> {escape(scheme)}</p>",
            *_operations(document),
            "<h2>Objects</h2>",
            *_schemas(document["components"]["schemas"]),
            "</html>",
        )
    )


def _operations(document: Mapping[str, Any]) -> Iterator[str]:
    shown = ""
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            tag = (operation.get("tags") or ["other"])[0]
            if tag != shown:
                shown = tag
                yield f"<h2>{escape(tag)}</h2>"
            yield f"<details><summary><span class='method {method}'>{method.upper()}</span><code>{escape(path)}</code>"
            yield f"<span>{escape(operation.get('summary', ''))}</span></summary><div>"
            yield f"<p>{_text(operation.get('description', ''))}</p>"
            yield _parameters(operation.get("parameters", ()))
            for kind, body in operation.get("requestBody", {}).get("content", {}).items():
                yield f"<h4>Body: {escape(kind)}</h4>{_schema(body['schema'])}"
            yield _responses(operation["responses"])
            yield "</div></details>"


def _parameters(parameters: Any) -> str:
    rows = [
        (
            f"<code>{escape(one['name'])}</code>",
            escape(one["in"]),
            _words(one["schema"]),
            _text(one.get("description", "")),
        )
        for one in parameters
    ]
    return _table(("parameter", "in", "type", ""), rows) if rows else ""


def _responses(responses: Mapping[str, Any]) -> str:
    rows = []
    for status, response in sorted(responses.items()):
        kinds = [f"{escape(kind)}: {_words(one['schema'])}" for kind, one in response.get("content", {}).items()]
        rows.append((f"<code>{escape(status)}</code>", _text(response["description"]), "<br>".join(kinds)))
    return "<h4>Answers</h4>" + _table(("status", "when", "what"), rows)


def _schemas(schemas: Mapping[str, Any]) -> Iterator[str]:
    for name, schema in sorted(schemas.items()):
        about = _text(schema.get("description", ""))
        yield f"<details id='{escape(name)}'><summary><code>{escape(name)}</code><span>{about}</span></summary>"
        yield f"<div>{_schema(schema)}</div></details>"


def _schema(schema: Mapping[str, Any]) -> str:
    """Its fields as a table; what has none as JSON."""
    if "$ref" in schema:
        return f"<p>{_words(schema)}</p>"
    if not schema.get("properties"):
        return f"<pre>{escape(json.dumps(schema, indent=1))}</pre>"
    required = schema.get("required", ())
    rows = [
        (
            f"<code>{escape(name)}</code>{' *' if name in required else ''}",
            _words(one),
            _text(one.get("description", "")),
        )
        for name, one in schema["properties"].items()
    ]
    return _table(("field (* required)", "type", ""), rows)


def _words(schema: Mapping[str, Any]) -> str:
    """A type in words, with links to objects."""
    if "$ref" in schema:
        name = escape(str(schema["$ref"]).rpartition("/")[2])
        return f"<a href='#{name}'>{name}</a>"
    if choices := schema.get("anyOf"):
        return " or ".join(_words(choice) for choice in choices)
    if "const" in schema or "enum" in schema:
        return escape(" | ".join(json.dumps(one) for one in schema.get("enum", [schema.get("const")])))
    if schema.get("type") == "array":
        return f"list of {_words(schema.get('items', {}))}"
    limits = [f"{word} {schema[key]}" for key, word in _LIMITS.items() if key in schema]
    return escape(" ".join([str(schema.get("type", "any")), *limits]))


def _text(words: str) -> str:
    """Prose; what stands in backquotes is code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(words))


_LIMITS = {"minimum": "≥", "maximum": "≤", "minLength": "from", "maxLength": "to", "default": "default"}


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    cells = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><tr>{''.join(f'<th>{escape(one)}</th>' for one in head)}</tr>{cells}</table>"
