"""Commands on the fleet: what may be rented (`offers`), what stands and what it cost (`fleet`).

Whether renting will work, `fleet_check` asks the providers, and the cluster that run workers use.
"""

__all__ = ["fleet", "fleet_check", "offers"]
