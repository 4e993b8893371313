"""EC2: engines on rented VMs, on demand and spot, reached through an SSH tunnel with a pinned host key.

`config` is what stands in fleet.yaml, `provider` the five calls and the way to an engine, `checks` what is looked at
without renting. `launch` and `user_data` say how a VM is asked for and what it runs, `machines` reads EC2's answers:
all three are pure. `api` calls EC2 within bounds and tells its errors apart, `prices` makes offers.
"""

__all__ = ["config", "provider"]
