"""JSON schemas of structured outputs: `output_schema` holds answers against them, `schema_limits` bounds them."""

__all__ = ["output_schema", "schema_limits"]
