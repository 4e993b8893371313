"""What providers that rent from a cloud share.

`machine_names` writes our names as a cloud allows them; `ordered_once` makes orders of a cloud without tokens once, and
`same_name` chooses among doubles; `listed_machine` looks for one that boots; `engine_container` is the command of an
engine's container; `tunnels` is what a provider asks of a tunnel.
"""

__all__ = ["engine_container", "listed_machine", "machine_names", "ordered_once", "same_name", "tunnels"]
