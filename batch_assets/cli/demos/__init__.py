"""The two demos: a small real model on this computer (`demo`), a simulated market with a deadline (`demo_fleet`)."""

__all__ = ["demo", "demo_fleet"]
