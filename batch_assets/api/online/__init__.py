"""Submit and poll: `POST /v1/inference` accepts a request, `GET /v1/result/ID` says what became of it.

`routes` has the calls, `request` the shapes of what is sent, `online_service` what stands behind them. Accepted
requests are in `queues/`; `consumer` takes them out and has them answered by a `dispatcher` (embeddings together, by
`list_dispatcher`), with the retry policy of rows; `answers/` asks once for what is asked twice. `admission` refuses
before too much waits, by the pressure of queue and engines. `online_metrics` are its metrics, `online_settings` what
the environment says.
"""

__all__ = ["dispatcher", "list_dispatcher", "online_metrics", "online_service", "online_settings", "request", "routes"]
