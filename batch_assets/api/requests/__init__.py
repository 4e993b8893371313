"""What every call of the service goes through: who calls, limits and shape of its body, errors as OpenAI words them.

`direct_routes` answers plain calls before FastAPI's own routing, `request_bounds` holds bodies to their bounds,
`callers` names who calls, `json_body` reads what was sent, `error_answers` has what is answered when something is
wrong.
"""

__all__ = ["api_error", "callers", "direct_routes", "error_answers", "json_body", "request_bounds"]
