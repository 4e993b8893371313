"""Providers of OpenAI's Batch API in fleet.yaml (`kind: batch_api`): what a batch of theirs may hold."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from gpu_runner.request_limits import BatchLimits

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


class BatchApiConfig(BaseModel):
    """Limits of one provider, as its documentation says them. The defaults are within OpenAI's."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    completion_window: str = Field(
        default="24h",
        pattern=r"^[1-9][0-9]{0,3}[smhd]$",
        description="within which the provider answers a batch, as it is told; other providers than OpenAI take others",
    )
    max_requests_per_batch: int = Field(default=10_000, ge=1, le=1_000_000, description="rows of one input file")
    max_file_bytes: int = Field(default=100 << 20, ge=1 << 10, le=2 << 30, description="of one input file")
    max_output_bytes: int = Field(
        default=2 << 30, ge=1 << 10, le=64 << 30, description="of one output file; what is beyond is asked again"
    )
    max_open_batches: int = Field(default=2, ge=1, le=100, description="of one run at once")
    gather_seconds: float = Field(
        default=5.0, gt=0, le=600, description="without a further row, until a batch is sent that is not full"
    )
    poll_seconds: float = Field(default=30.0, gt=0, le=3600, description="between two looks at a batch, at most")

    @property
    def limits(self) -> BatchLimits:
        """As the client takes them."""
        return BatchLimits(
            completion_window=self.completion_window,
            window_seconds=float(self.completion_window[:-1]) * _SECONDS[self.completion_window[-1]],
            max_requests=self.max_requests_per_batch,
            max_file_bytes=self.max_file_bytes,
            max_output_bytes=self.max_output_bytes,
            max_open=self.max_open_batches,
            gather_seconds=self.gather_seconds,
            poll_seconds=self.poll_seconds,
        )
