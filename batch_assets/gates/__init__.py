"""Gates: while rows come, whether so many are bad that the request is paused. Pure; runs carry it out."""

__all__ = ["quality_gates", "refusals", "similar_outputs", "text_features"]
