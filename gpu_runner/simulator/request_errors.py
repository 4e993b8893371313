"""Refusals, as vLLM 0.32 words them."""

from __future__ import annotations


class ApiError(Exception):
    """An answer other than 200. `param` names the field at fault."""

    def __init__(self, status: int, message: str, kind: str = "BadRequestError", param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": status}}
        self.headers: dict[str, str] = {}
        self.prompt = ""  # digest of the prompt that was refused, when it could be read


def invalid(kind: str, where: str, message: str) -> ApiError:
    """The refusal of a body that has another shape than the API's."""
    text = f"1 validation error:\n  {{'type': '{kind}', 'loc': '{where}', 'msg': '{message}'}}"
    return ApiError(400, text, "Bad Request", where)
