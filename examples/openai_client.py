"""OpenAI's own client against `penstock serve`: a chat, a stream with progress, a schema, an embedding.

penstock serve &
python examples/openai_client.py
"""

from __future__ import annotations

import os

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("PENSTOCK_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=os.environ.get("PENSTOCK_API_KEY", "none"),
)
model = client.models.list().data[0].id
question = [{"role": "user", "content": "What is the capital of France?"}]

answer = client.chat.completions.create(model=model, messages=question, temperature=0, max_tokens=30)
print("answer:", answer.choices[0].message.content)
print("cached:", answer.usage.prompt_tokens_details.cached_tokens, "of", answer.usage.prompt_tokens)

print("stream:", end=" ")
stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "The gate was opened and the turbine turned. " * 100 + "What turned?"}],
    temperature=0,
    max_tokens=20,
    stream=True,
    extra_body={"return_progress": True},
)
for chunk in stream:
    if progress := (chunk.model_extra or {}).get("prompt_progress"):
        print(f"[{progress['processed']}/{progress['total']}]", end=" ", flush=True)
    for choice in chunk.choices:
        print(choice.delta.content or "", end="", flush=True)
print()

schema = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}
bound = client.chat.completions.create(
    model=model,
    messages=question,
    temperature=0,
    max_tokens=40,
    response_format={"type": "json_schema", "json_schema": {"name": "capital", "schema": schema}},
)
print("schema:", bound.choices[0].message.content)

vector = client.embeddings.create(model=model, input="The water runs.").data[0].embedding
print("embedding:", len(vector), "numbers")
