"""What can be rented now and at which price, for the work in hand.

`sources` reads catalogs, price lists and recorded histories; `market` ranks offers for a model and says why the rest is
not taken; `model_catalog` looks up what a model needs.
"""

__all__ = ["market", "model_catalog", "price_files", "sources", "token_prices"]
