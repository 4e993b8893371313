"""Where engines run, one provider each: five calls that are the same for a pod, a VM, a process and a simulation.

`base` defines them, and how an engine is reached; `checks` what can be asked without renting; `engine_keys` the keys of
rented engines. `local` is this computer, `machine_host` what keeps machines as processes of it, `simulated` clouds
with invented money, `ssh` hosts of one's own, `kubernetes` makes pods of a cluster, `ec2` rents VMs, `runpod` pods,
with `cloud` for what these share; `rentable` says what fleet.yaml needs for a listed offer. `process_guard` runs a
command as a group that cannot outlive its owner; `process_marks` finds processes by a mark in their environment.
`sglang_server` has the command lines of SGLang's server.
"""

__all__ = [
    "base",
    "checks",
    "engine_keys",
    "engine_process",
    "kubernetes",
    "local",
    "process_guard",
    "process_marks",
    "rentable",
]
