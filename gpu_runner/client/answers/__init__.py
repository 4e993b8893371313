"""Checks of an engine's answer, which is outside data: its size (`answer_limit`), the parts that it must have
(`answer_parts`), its numbers (`answer_numbers`), the length of vectors (`vector_length`).
"""

__all__ = ["answer_limit", "answer_numbers", "answer_parts", "vector_length"]
