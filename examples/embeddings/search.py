"""`python search.py PASSAGE`: the passages of the table that are most like one of them."""

import os
import sys
from pathlib import Path

import duckdb

published = Path(os.environ.get("BATCH_ASSETS_STORE", "data")) / "passage_vectors" / "published"
table = published / (published / "CURRENT").read_text().strip()

NEAREST = f"""
    WITH passages AS (SELECT row_id, title, output AS vector FROM '{table}/part-*.parquet' WHERE error IS NULL)
    SELECT other.title, round(list_cosine_similarity(wanted.vector, other.vector), 3) AS likeness
    FROM passages AS wanted, passages AS other
    WHERE wanted.row_id = ? AND other.row_id <> wanted.row_id
    ORDER BY likeness DESC, other.title LIMIT 3
"""

for title, likeness in duckdb.execute(NEAREST, [sys.argv[1]]).fetchall():
    print(f"{likeness:6.3f}  {title}")
