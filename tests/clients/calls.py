"""What each client is made to ask, run by its own environment's Python: `python calls.py CLIENT URL` prints JSON.

A client's function returns what it got, by the name of the thing that was asked for: texts as texts, vectors as lists,
orders of documents as indexes, and for an overflow whether the client knew it for one.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

# A generator that only simulates, an encoder, and a real generator, whose answers can be bound.
CHAT, EMBED, REAL = "sim-chat", "sim", "spillway-demo"
SYSTEM, ASK = "You are short.", "What is a spillway?"
MESSAGES: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": ASK}]
OPTIONS: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "seed": 7}
TEXTS = ["water over the dam", "fire in the hills", "air and light"]
QUERY = "water"
LONG = "word " * 200_000
Found = dict[str, Any]


def answer_class() -> Any:
    """Return the pydantic model that bound answers must be of; its JSON has no greatest length to guess."""
    from typing import Literal

    from pydantic import BaseModel, ConfigDict

    class Answer(BaseModel):
        model_config = ConfigDict(extra="forbid")  # or a small model adds properties to the end
        place: Literal["river", "dam"]
        sure: bool

    return Answer


def by_openai(url: str) -> Found:
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    chat = client.chat.completions.create(model=CHAT, messages=MESSAGES, **OPTIONS)
    usage: dict[str, Any] = {"stream_options": {"include_usage": True}}
    stream = list(
        client.chat.completions.create(
            model=CHAT, messages=MESSAGES, stream=True, **usage, **OPTIONS
        )
    )
    plain = client.completions.create(model=CHAT, prompt=ASK, **OPTIONS)
    vectors = client.embeddings.create(model=EMBED, input=TEXTS)
    response = client.responses.create(
        model=CHAT, input=ASK, instructions=SYSTEM, temperature=0, max_output_tokens=24
    )
    following = client.responses.create(
        input=ASK, previous_response_id=response.id, temperature=0, max_output_tokens=24
    )
    events = client.responses.create(
        model=CHAT,
        input=MESSAGES,
        stream=True,
        temperature=0,
        max_output_tokens=24,
        store=False,
    )
    try:
        client.chat.completions.create(model=CHAT, messages=[{"role": "user", "content": LONG}])
        known = False
    except openai.BadRequestError as error:
        known = error.code == "context_length_exceeded"
    last: Any = list(events)[-1]
    shape = answer_class()
    parsed = client.chat.completions.parse(
        model=REAL, messages=MESSAGES, response_format=shape, max_tokens=400
    )
    responded = client.responses.parse(
        model=REAL, input=ASK, text_format=shape, max_output_tokens=400
    )
    return {
        "chat": chat.choices[0].message.content,
        "stream": "".join(c.choices[0].delta.content or "" for c in stream if c.choices),
        "usage": [chat.usage and chat.usage.total_tokens, stream[-1].usage.total_tokens],
        "completion": plain.choices[0].text,
        "embeddings": [item.embedding for item in vectors.data],
        "responses": response.output_text,
        "responses stream": last.response.output_text,
        "responses state": following.output_text,
        "bound": isinstance(parsed.choices[0].message.parsed, shape)
        and isinstance(responded.output_parsed, shape),
        "overflow": known,
    }


def by_langchain(url: str) -> Found:
    from langchain_core.exceptions import ContextOverflowError
    from langchain_openai import ChatOpenAI, OpenAIEmbeddings

    there: dict[str, Any] = {"base_url": f"{url}/v1", "api_key": "none", "max_retries": 0}
    model = ChatOpenAI(model=CHAT, **there, **OPTIONS)
    again = ChatOpenAI(model=CHAT, **there, temperature=0, max_tokens=24, use_responses_api=True)
    encoder = OpenAIEmbeddings(model=EMBED, check_embedding_ctx_length=False, **there)
    said, shape = [("system", SYSTEM), ("user", ASK)], answer_class()
    real = ChatOpenAI(model=REAL, **there, max_tokens=400)
    bound = real.with_structured_output(shape, method="json_schema")
    try:
        model.invoke(LONG)
        known = False
    except ContextOverflowError:
        known = True
    return {
        "bound": isinstance(bound.invoke(said), shape),
        "chat": model.invoke(said).content,
        "stream": "".join(str(chunk.content) for chunk in model.stream(said)),
        "responses": again.invoke(said).text,
        "responses stream": "".join(chunk.text for chunk in again.stream(said)),
        "embeddings": encoder.embed_documents(TEXTS),
        "overflow": known,
    }


def by_llama_index(url: str) -> Found:
    from llama_index.core.llms import ChatMessage
    from llama_index.embeddings.openai_like import OpenAILikeEmbedding
    from llama_index.llms.openai_like import OpenAILike

    there: dict[str, Any] = {"api_base": f"{url}/v1", "api_key": "none", "max_retries": 0}
    more = {"seed": 7}
    model = OpenAILike(
        model=CHAT,
        **there,
        temperature=0,
        max_tokens=24,
        is_chat_model=True,
        additional_kwargs=more,
    )
    plain = OpenAILike(model=CHAT, **there, temperature=0, max_tokens=24, additional_kwargs=more)
    encoder = OpenAILikeEmbedding(model_name=EMBED, **there)
    said = [ChatMessage(**message) for message in MESSAGES]
    return {
        "chat": model.chat(said).message.content,
        "stream": "".join(chunk.delta or "" for chunk in model.stream_chat(said)),
        "completion": plain.complete(ASK).text,
        "embeddings": encoder.get_text_embedding_batch(TEXTS),
    }


def by_litellm(url: str) -> Found:
    import litellm

    there: dict[str, Any] = {"api_base": f"{url}/v1", "api_key": "none", "num_retries": 0}
    name = f"openai/{CHAT}"
    chat = litellm.completion(model=name, messages=MESSAGES, **there, **OPTIONS)
    stream = litellm.completion(model=name, messages=MESSAGES, stream=True, **there, **OPTIONS)
    vectors = litellm.embedding(model=f"openai/{EMBED}", input=TEXTS, **there)
    ranked = litellm.rerank(
        model=f"cohere/{EMBED}",
        query=QUERY,
        documents=TEXTS,
        api_base=f"{url}/v2/rerank",
        api_key="none",
    )
    response = litellm.responses(
        model=name, input=ASK, instructions=SYSTEM, temperature=0, max_output_tokens=24, **there
    )
    try:
        litellm.completion(model=name, messages=[{"role": "user", "content": LONG}], **there)
        known = False
    except litellm.ContextWindowExceededError:
        known = True
    return {
        "chat": chat.choices[0].message.content,
        "stream": "".join(chunk.choices[0].delta.content or "" for chunk in stream),
        "embeddings": [item["embedding"] for item in vectors.data],
        "rerank": [item["index"] for item in ranked.results],
        "responses": response.output[0].content[0].text,
        "overflow": known,
    }


def by_cohere(url: str) -> Found:
    import cohere

    second = cohere.ClientV2(api_key="none", base_url=url)
    first = cohere.Client(api_key="none", base_url=url)
    asked: dict[str, Any] = {"model": EMBED, "query": QUERY, "documents": TEXTS}
    return {
        "rerank": [item.index for item in second.rerank(**asked).results],
        "rerank v1": [item.index for item in first.rerank(**asked).results],
    }


def by_instructor(url: str) -> Found:
    import instructor
    import openai

    client = instructor.from_openai(
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    )
    said = client.chat.completions.create(
        model=CHAT, messages=MESSAGES, response_model=None, **OPTIONS
    )
    shape = answer_class()
    strict = instructor.from_openai(
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0),
        mode=instructor.Mode.JSON_SCHEMA,
    )
    bound = strict.chat.completions.create(
        model=REAL, messages=MESSAGES, response_model=shape, max_tokens=400
    )
    return {"chat": said.choices[0].message.content, "bound": isinstance(bound, shape)}


def by_pydantic_ai(url: str) -> Found:
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    agent = Agent(OpenAIChatModel(CHAT, provider=provider), system_prompt=SYSTEM)
    other = Agent(OpenAIResponsesModel(CHAT, provider=provider), instructions=SYSTEM)
    shape, short = answer_class(), {"max_tokens": 400}
    bound = Agent(OpenAIChatModel(REAL, provider=provider), output_type=NativeOutput(shape))
    streamed = agent.run_stream_sync(ASK, model_settings=OPTIONS)
    few: Any = {"temperature": 0, "max_tokens": 24}
    return {
        "chat": agent.run_sync(ASK, model_settings=OPTIONS).output,
        "stream": list(streamed.stream_text())[-1],
        "responses": other.run_sync(ASK, model_settings=few).output,
        "bound": isinstance(bound.run_sync(ASK, model_settings=short).output, shape),
    }


def by_huggingface_hub(url: str) -> Found:
    import huggingface_hub

    client = huggingface_hub.InferenceClient(base_url=url, api_key="none")
    asked: dict[str, Any] = {"messages": MESSAGES, "model": CHAT, **OPTIONS}
    chat = client.chat_completion(**asked)
    stream = client.chat_completion(stream=True, **asked)
    encoder = huggingface_hub.InferenceClient(model=f"{url}/embed")
    vectors = [encoder.feature_extraction(text, truncate=True)[0].tolist() for text in TEXTS]
    there: Any = {"provider": "hf-inference", "model": url}
    info = huggingface_hub.InferenceClient(**there).get_endpoint_info()
    try:
        encoder.feature_extraction(LONG)
        known = False
    except Exception as error:  # noqa: BLE001 - of which class is for the client to choose
        known = "maximum context length" in str(error)
    return {
        "chat": chat.choices[0].message.content,
        "stream": "".join(c.choices[0].delta.content or "" for c in stream if c.choices),
        "embeddings": vectors,
        "info": info["model_id"],
        "overflow": known,
    }


def by_haystack(url: str) -> Found:
    from haystack.components.embedders import OpenAITextEmbedder
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.utils import Secret

    there: dict[str, Any] = {"api_base_url": f"{url}/v1", "api_key": Secret.from_token("none")}
    pieces: list[str] = []
    said = [ChatMessage.from_system(SYSTEM), ChatMessage.from_user(ASK)]
    model = OpenAIChatGenerator(model=CHAT, generation_kwargs=OPTIONS, **there)
    streaming = OpenAIChatGenerator(
        model=CHAT,
        generation_kwargs=OPTIONS,
        streaming_callback=lambda chunk: pieces.append(chunk.content),
        **there,
    )
    encoder = OpenAITextEmbedder(model=EMBED, **there)
    streaming.run(messages=said)
    return {
        "chat": model.run(messages=said)["replies"][0].text,
        "stream": "".join(pieces),
        "embeddings": [encoder.run(text=text)["embedding"] for text in TEXTS],
    }


CLIENTS: dict[str, Callable[[str], Found]] = {
    "openai": by_openai,
    "langchain-openai": by_langchain,
    "llama-index": by_llama_index,
    "litellm": by_litellm,
    "cohere": by_cohere,
    "instructor": by_instructor,
    "pydantic-ai": by_pydantic_ai,
    "huggingface_hub": by_huggingface_hub,
    "haystack": by_haystack,
}


def main() -> None:
    """Print what a client got, as the last line."""
    os.environ.update(
        HAYSTACK_TELEMETRY_ENABLED="False",
        LITELLM_LOCAL_MODEL_COST_MAP="True",
        HF_HUB_DISABLE_TELEMETRY="1",
        LANGSMITH_TRACING="false",
    )
    logging.disable(logging.ERROR)
    found = CLIENTS[sys.argv[1]](sys.argv[2])
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    main()
