"""What tenants used, what they are charged for it, and what the engines cost in the same time.

`price_list` is the price list, `usage_ledger` keeps who used how many tokens of which model and class on which day.
`interactive_usage` writes what an answer used into a `usage_journal`, which brings it there behind the requests,
`batch_usage` brings that of batches (`answer_usage`: of one line). `spending` keeps the
budget of a batch. `routes` shows tenants their own usage, `margin` sets it beside the bills of the fleet.
"""

__all__ = [
    "answer_usage",
    "batch_usage",
    "interactive_usage",
    "margin",
    "price_list",
    "routes",
    "spending",
    "usage",
    "usage_journal",
    "usage_ledger",
]
