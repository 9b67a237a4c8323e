#!/bin/sh
# What a server answers, from a shell. Start one first: penstock serve
set -eu
url=${PENSTOCK_URL:-http://127.0.0.1:8000}
model=${PENSTOCK_MODEL:-smollm2}
json="content-type: application/json"

echo "== health";  curl -sf "$url/health"; echo
echo "== models";  curl -sf "$url/v1/models"; echo
echo "== plan";    curl -sf "$url/plan" -H "$json" -d '{"prompt_tokens": 6000}'; echo
echo "== stream, with progress"
curl -sfN "$url/v1/chat/completions" -H "$json" -d '{
  "model": "'"$model"'", "stream": true, "return_progress": true, "temperature": 0, "max_tokens": 12,
  "messages": [{"role": "user", "content": "What is the capital of France?"}]
}'
echo "== metrics"; curl -sf "$url/metrics" | grep "^penstock:time_to_first_token_seconds_sum"
