"""`python batch.py BASE_URL`: a batch of 20 questions by the stock `openai` client; prints each answer's beginning."""

import json
import sys
import tempfile
import time
from pathlib import Path

from openai import OpenAI

client = OpenAI(base_url=sys.argv[1], api_key="none")
model = client.models.list().data[0].id

with tempfile.TemporaryDirectory() as folder:
    requests = Path(folder) / "requests.jsonl"
    with requests.open("w") as lines:
        for number in range(20):
            messages = [{"role": "user", "content": f"What is {number} times {number}?"}]
            body = {"model": model, "messages": messages, "max_tokens": 40}
            line = {"custom_id": f"q{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
            lines.write(json.dumps(line) + "\n")
    file = client.files.create(file=requests, purpose="batch")

batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
while batch.status not in ("completed", "failed", "expired", "cancelled"):
    time.sleep(0.5)
    batch = client.batches.retrieve(batch.id)

print(f"{batch.status}: {batch.request_counts.completed} of {batch.request_counts.total} requests")
for line in client.files.content(batch.output_file_id).text.splitlines():
    answer = json.loads(line)
    print(answer["custom_id"], answer["response"]["body"]["choices"][0]["message"]["content"][:40])
