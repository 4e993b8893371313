"""Offers and how they compare: datasheets, estimated and measured speeds, cost of the work in hand. Pure."""

__all__ = ["gpus", "offer", "selection", "speed", "workload"]
