"""Codes by which hosted APIs say that an account can pay for no further request, whatever the status beside them.

OpenAI sends them with 429, as it does a limit per minute, which passes by itself. `error.code` or `error.type` tells
the two apart; a message is never read for it, for other servers use the same words for both.
"""

from __future__ import annotations

QUOTA_CODES = frozenset(
    {
        # OpenAI: `insufficient_quota` is the type of all of these, and was the only code before they had their own.
        "insufficient_quota",
        "credit_balance_exhausted",
        "organization_spend_limit_exceeded",
        "organization_usage_limit_exceeded",
        "project_spend_limit_exceeded",
        "billing_hard_limit_reached",
        "billing_not_active",
        "billing_error",  # Anthropic
        "exceeded_current_quota_error",  # Moonshot
        "insufficient_user_quota",  # gateways: New API
        "budget_exceeded",  # gateways: LiteLLM
    }
)


def quota_code(code: str, kind: str = "") -> str:
    """The one of an error's `code` and `type` that says so, the code first; "" where neither does."""
    return next((word for word in (code, kind) if word in QUOTA_CODES), "")
