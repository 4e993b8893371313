"""What a model needs of a GPU: shapes from its config.json, bytes of weights and KV cache, tensor-parallel sizes."""

__all__ = ["facts", "known", "model_config", "model_files", "names", "quantization"]
