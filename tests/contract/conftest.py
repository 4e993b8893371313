"""The engines of the contract: each test is run against every kind of engine that is there."""

from support.contract_engines import (
    any_embedder,
    any_engine,
    embedder,
    embedders,
    engine,
    gguf_files,
    mortal_engine,
    served,
    vllm_files,
)

__all__ = [
    "any_embedder",
    "any_engine",
    "embedder",
    "embedders",
    "engine",
    "gguf_files",
    "mortal_engine",
    "served",
    "vllm_files",
]
