"""Engines as pods of a Kubernetes cluster: one pod for each machine, by the API server alone, nothing installed there.

`config` is what stands in fleet.yaml, `provider` the five calls. The pod's name is our machine's name. The rest:
`manifests` makes pod and Secret, `pod_status` reads what the API server says of a pod (both pure), `api` talks to it,
`pod_watch` keeps a copy of all pods of a provider, `port_forward` is the way in from outside, `inspection` what
`batch-assets fleet check` shows. The official client is imported when the API server is first asked.
"""

__all__ = ["api", "config", "inspection", "provider"]
