"""Beside what people use today: the same rows by other systems, on the same engine. `python -m benchmarks.peers`.

`works` are the rows and the engines, `systems` who does them, `trial` is one measurement. The files `run_*.py` are the
programs that a user of that system would write; each is run by its path, with the Python of the system's own
environment, and gets one argument: a JSON file of `systems.Task`.
"""
