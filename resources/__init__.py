"""What runs and sensors use: the store, prices, and the fleet. Dagster resources and what stands behind them.

May import `gpu_runner`, never `batch_assets`.
"""

__all__ = ["alerts", "endpoints", "engine_options", "yaml_errors", "yaml_files"]
