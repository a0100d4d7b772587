"""The `openai` package against Spillway: only the address changes."""

from __future__ import annotations

import os

from openai import OpenAI


def main() -> None:
    """Embed with the encoder, then talk to the chat model in a session of the server's."""
    url = os.environ.get("SPILLWAY_URL", "http://127.0.0.1:8080")
    key = os.environ.get("SPILLWAY_API_KEY", "none")
    with OpenAI(base_url=f"{url}/v1", api_key=key) as client:
        models = {model.kind: model.id for model in client.models.list()}
        result = client.embeddings.create(model=models["embed"], input=["one text", "another text"])
        print(f"{models['embed']}: {len(result.data)} vectors of {len(result.data[0].embedding)}")

        session = client.post("/sessions", body={}, cast_to=dict)["id"]
        for said in ("What can you do?", "What do you need for that?"):
            stream = client.chat.completions.create(
                model=models["generate"],
                messages=[{"role": "user", "content": said}],  # only what is new
                max_completion_tokens=40,
                stream=True,
                extra_body={"session": session},
            )
            for chunk in stream:
                print(chunk.choices[0].delta.content or "", end="", flush=True)
            print()


if __name__ == "__main__":
    main()
