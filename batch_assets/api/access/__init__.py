"""Who may do what, and how much: API keys, JSON Web Tokens, tenants, limits, audit log.

`authentication` knows callers, `key_store` keeps their keys (`api_keys`), `jwt_tokens` and `jwks` check tokens.
`enforcement` holds callers to the limits of `rate_limits`: `rate_limiter` has the buckets, `token_bucket` their
arithmetic, `quotas` what a tenant holds. `request_access` is what is known of a request, `audit` writes down who did
what, `browser_guard` keeps web pages out of a service that asks for no key.
"""

__all__ = [
    "api_keys",
    "audit",
    "authentication",
    "browser_guard",
    "enforcement",
    "key_store",
    "quotas",
    "rate_limiter",
    "rate_limits",
    "request_access",
]
