"""A run's and a sensor's view of the fleet: fleet.yaml, leases, ordering and moving between instances.

`resource` is the Dagster resource, `providers` makes what fleet.yaml names; `client` leases and gives back;
`warm_instances` are those that stand and may be leased, `shared_engines` those that others lease; `provisioning` orders
and ends instances; `migration` says when a move pays; `allocation` what a dataset may lease by the controller's
command; `engine_tls` certificates for connections to engines; `simulation` says whether rows will be a simulator's;
`hosted_engines` are those that are paid by the token; `batch_api_config` what a batch of a provider may hold.
"""

__all__ = [
    "batch_api_config",
    "client",
    "engine_tls",
    "fleet_config",
    "hosted_engines",
    "leased_engine",
    "migration",
    "planner_options",
    "resource",
    "shared_engines",
    "simulation",
]
