"""`python upload.py [TERM]`: puts the glossary into the bucket; the last entry is TERM where one is given."""

import sys

import boto3

TERMS = ["amortise", "basis point", "collateral", "dividend", "escrow", "futures", "gearing", "hedge"]
terms = [*TERMS[:-1], sys.argv[1]] if len(sys.argv) > 1 else TERMS
lines = ["number,term,reader", *(f"{number},{term},a new colleague" for number, term in enumerate(terms, 1))]
boto3.client("s3").put_object(Bucket="bucket", Key="glossary/terms.csv", Body="\n".join(lines).encode())
print(f"{len(terms)} terms, the last one: {terms[-1]}")
