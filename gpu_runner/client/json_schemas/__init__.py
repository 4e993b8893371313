"""JSON schemas of structured outputs: `output_schema` holds answers against them, `schema_limits` bounds them.

`schema_mistakes` says what a user cannot have meant, `openai_strict` which ones OpenAI takes in its strict mode,
`column_types` which columns the properties of an object make.
"""

__all__ = ["column_types", "openai_strict", "output_schema", "schema_limits", "schema_mistakes"]
