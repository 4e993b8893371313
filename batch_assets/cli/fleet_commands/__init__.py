"""Commands on the fleet: what may be rented (`offers`), what stands and what it cost (`fleet`).

Whether renting will work, `fleet_check` asks the providers, and `kubernetes_check` the cluster that run workers use.
"""

__all__ = ["fleet", "fleet_check", "kubernetes_check", "offers"]
