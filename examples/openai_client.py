"""The `openai` package against Spillway: only the address changes."""

from __future__ import annotations

import os

from openai import OpenAI


def main() -> None:
    """List the models and embed with the first."""
    url = os.environ.get("SPILLWAY_URL", "http://127.0.0.1:8080")
    key = os.environ.get("SPILLWAY_API_KEY", "none")
    with OpenAI(base_url=f"{url}/v1", api_key=key) as client:
        model = client.models.list().data[0].id
        result = client.embeddings.create(model=model, input=["one text", "another text"])
        print(f"{model}: {len(result.data)} vectors of {len(result.data[0].embedding)} dimensions")


if __name__ == "__main__":
    main()
