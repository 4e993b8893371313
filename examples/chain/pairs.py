"""Preference pairs out of the judge's table: `python pairs.py FILE` writes prompt, chosen and rejected as JSONL."""

import json
import sys
from pathlib import Path

import polars as pl

import batch_assets

table = batch_assets.table("judge").lazy().select("question", "answers", "best", "worst")
judged = table.filter(pl.col("best").is_not_null() & pl.col("worst").is_not_null()).collect()
pairs = 0
with Path(sys.argv[1]).open("w", encoding="utf-8") as file:
    for row in judged.iter_rows(named=True):
        answers, best, worst = row["answers"], row["best"], row["worst"]
        if best != worst and max(best, worst) < len(answers):
            pair = {"prompt": row["question"], "chosen": answers[best], "rejected": answers[worst]}
            file.write(json.dumps(pair, ensure_ascii=False) + "\n")
            pairs += 1
print(f"{pairs} pairs of {len(judged)} questions")
