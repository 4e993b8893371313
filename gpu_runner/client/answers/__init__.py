"""Checks of an engine's answer, which is outside data: its size (`answer_limit`), the parts that it must have
(`answer_parts`), its numbers (`answer_numbers`), and the forms of scores, classes and ranked lists
(`pooled_outputs`). `unreadable` says what a body is that is no answer, `quota_codes`
which errors say that nothing more can be paid for.
"""

__all__ = ["answer_limit", "answer_numbers", "answer_parts", "pooled_outputs", "quota_codes", "unreadable"]
