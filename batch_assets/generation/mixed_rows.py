"""A table never has rows of an engine simulator and of a model: what is said where it would."""

from __future__ import annotations


def mixed(dataset: str, *, simulated: bool) -> str:
    """Why no more rows are written, for people. `simulated`: by a simulator beside a model's rows, else vice versa."""
    if simulated:
        return (
            f"{dataset}: expected an engine that is not simulated, as the dataset has rows of a real model, found an "
            "engine simulator. Nothing was written. Give `batch-assets run` the real engine again, or declare the "
            "dataset under another name to have simulated rows"
        )
    return (
        f"{dataset}: expected a simulated engine, as other batches of the dataset are simulated, found a real one. "
        f"Nothing was written. The job `{dataset}_refresh` or `batch-assets run {dataset}` makes all of them anew"
    )
