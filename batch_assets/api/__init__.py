"""The front door: OpenAI's Batch API (files, batches, models) over the store and the fleet, as an ASGI service.

`app` makes the application, `server` runs it as a process, `service` is what stands behind it. `settings` has its
limits, `store_threads` has threads for calls of the store, `models` has what can be asked for. `requests/` is what
every call goes through: callers, bounds, bodies, errors. `files/` and `batches/` have the calls of these names,
`database/` what is known of files and batches, `execution/` brings batches on, `capacity/` plans how many engines they
have, `billing/` says who used what and what it costs, `openapi/` describes all calls. `front_door` puts around it who
may do what (`access/`), single requests to engines (`interactive/`), requests that are submitted and asked for later
(`online/`), and what operators see (`telemetry/`, `health`).
"""

__all__ = [
    "access",
    "app",
    "billing",
    "front_door",
    "health",
    "interactive",
    "models",
    "online",
    "requests",
    "server",
    "service",
    "settings",
    "store_threads",
    "telemetry",
]
