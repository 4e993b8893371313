"""What operators see of the service: Prometheus figures and traces.

`metrics` counts what passes, `gauges` looks at states when Prometheus asks; `observation` sees each request. `tracing`
has spans and their contexts; `trace_export` reads the environment, `opentelemetry_spans` alone imports OpenTelemetry.
"""

__all__ = ["gauges", "metrics", "observation", "opentelemetry_spans", "repeated_lines", "trace_export", "tracing"]
