"""Clouds that are simulated on this computer: real processes, invented money.

    config.py    what stands in fleet.yaml
    default.py   the embedded default: three competing providers
    faults.py    what the API and the machines do wrong, seeded or injected
    market.py    which offers stand at a moment
    provider.py  the five calls, and the engine simulator's arguments for a GPU and a model
    cloud.py     all providers of one home, and the hands of a test in it
    meter.py     the cloud's own bill

It says everywhere that it is a simulation: names of providers begin with `sim-` by default, engines say `simulated`.
"""

__all__ = ["cloud", "config", "default"]
