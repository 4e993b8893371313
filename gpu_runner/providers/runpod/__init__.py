"""RunPod (experimental: never run for money): engines in pods, reached through its HTTPS proxy or a mapped TCP port.

`config` is what stands in fleet.yaml, `provider` the five calls and the way to an engine. `api` calls RunPod within
bounds and tells its errors apart; `pods` says how a pod is asked for and reads RunPod's answers: pure. `pod_watch` runs
in the pod and ends it when nobody asks its engine.
"""

__all__ = ["config", "provider"]
