"""A conversation whose second answer streams, whatever happens to the connection or to a process of the server."""

from __future__ import annotations

from spillway_client import Spillway


def main() -> None:
    """Ask, then ask again with what was said before, printing the answer as it is made."""
    messages = [{"role": "user", "content": "What can you do?"}]
    with Spillway() as client:
        answer = client.chat.completions.create(messages, max_tokens=60)
        print(answer.text)

        messages.append({"role": "assistant", "content": answer.text})
        messages.append({"role": "user", "content": "And what do you need for that?"})
        # Leaving the `with` before the end would end the work at the server.
        with client.chat.completions.stream(messages, max_tokens=60) as stream:
            for piece in stream.texts():
                print(piece, end="", flush=True)
            print()
        print(f"{stream.usage}; the connection was replaced {stream.resumed} times")


if __name__ == "__main__":
    main()
