"""The provider `ssh`: GPUs of hosts of your own, reached over SSH only.

`config` is what stands in fleet.yaml and light to import; `provider` the five calls. `login` makes an SSH connection,
`connections` keeps one per host in an event loop of its own (asyncssh is imported in these, `tunnel` and nowhere else),
`host_silence` tells a dead host from a broken connection. `tunnel` leads a local port to an engine, `engine_tunnel` one
to a rented host, `host_words` asks one what it says of itself, `host_requests` writes what is sent to a host and reads
its answers, `inspection` is what `batch-assets fleet check` shows. `host_requests.sh` and `host_supervisor.sh` run on
the hosts, with what both need in `host_end.sh`.
"""

__all__ = ["config", "connections", "engine_tunnel", "host_words", "login", "provider"]
