"""What the transcripts hold: every route of docs/openapi.yaml, used rightly and wrongly, in a fixed order."""

from __future__ import annotations

import base64
import json
import struct
from typing import Any

from tests.guards import plain
from tests.guards.checkout import Instance
from tests.guards.script import Reply, Script
from tests.support.waiting import until_sync

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12}
QUESTION = {"role": "user", "content": "What can you do?"}
WATER, FIRE, AIR = "water over the dam", "fire in the hills", "air and light"
LONG = {"max_tokens": 3500, "min_tokens": 3500, "ignore_eos": True, "temperature": 0}
# Some pages of 32 tokens.
TALK = " ".join(["Remember the old mill by the river, and the dam above it."] * 8)
CHAT, COMPLETE, EMBED = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
COLLECTIONS, SESSIONS = "/v1/collections", "/v1/sessions"
BASE_ROUTES = (
    CHAT, COMPLETE, EMBED, "/v1/rerank", "/rerank", "/v1/models", "/v1/models/minilm", COLLECTIONS,
    f"{COLLECTIONS}/facts", f"{COLLECTIONS}/facts/reembed", f"{COLLECTIONS}/facts/search",
    f"{COLLECTIONS}/facts/map",
    f"{COLLECTIONS}/facts/documents", f"{COLLECTIONS}/facts/documents/delete",
    f"{COLLECTIONS}/facts/documents/a", SESSIONS, f"{SESSIONS}/import", f"{SESSIONS}/x",
    f"{SESSIONS}/x/export", f"{SESSIONS}/x/pages", f"{SESSIONS}/x/export/pages",
    f"{SESSIONS}/x/import/pages", "/v1/requests/x", "/v1/requests/x/cancel",
    "/v1/requests/x/events", "/v1/requests/x/timeline", "/embed", "/v2/rerank", "/tokenize",
    "/detokenize", "/decode", "/v1/responses", "/v1/responses/x", "/info",
    "/metrics", "/v1/mesh", "/livez", "/readyz", "/health", "/openapi.json",
)  # fmt: skip


def chat(more: dict[str, Any] | None = None, text: str = "") -> dict[str, Any]:
    """Return the body of a short greedy chat."""
    said = {"role": "user", "content": text} if text else QUESTION
    return {"messages": [said], **GREEDY, **(more or {})}


def health(script: Script) -> None:
    """The probes, the models and the mesh."""
    for path in ("/livez", "/readyz", "/readyz?wait=1", "/health"):
        script.call(f"GET {path}", "GET", path, key="")
    script.call("bad wait", "GET", "/readyz?wait=soon", key="")
    script.call("models", "GET", "/v1/models")
    script.call("one model", "GET", "/v1/models/spillway-demo")
    script.call("no such model", "GET", "/v1/models/none/such")
    script.call("info", "GET", "/info", shape=True)
    script.call("metrics", "GET", "/metrics")
    script.call("openapi", "GET", "/openapi.json", key="")
    script.call("dashboard", "GET", "/", key="")
    script.call("head", "HEAD", "/v1/models")
    script.call("options", "OPTIONS", "/v1/models")


def refusals(script: Script) -> None:
    """No key, a wrong key, no such route, a method no route takes."""
    for path in BASE_ROUTES:
        script.call(f"PUT {path}", "PUT", path, {})
    read = ("/v1/models", "/v1/mesh", "/v1/requests", "/v1/responses/", "/info", "/metrics")
    for path in BASE_ROUTES[:-4]:
        method = "GET" if path.startswith(read) else "POST"
        reply = script.ask(method, path, {} if method == "POST" else None, key="")
        script.add(f"no key: {method} {path}", [reply.status, _code(reply)])
    script.call("no key", "GET", "/v1/models", key="")
    script.call("wrong key", "GET", "/v1/models", key="sk-sw-aaaaaaaaaaaa-" + "a" * 32)
    script.call("no route", "GET", "/v1/nothing")
    script.call("no route at all", "GET", "/nothing", key="")
    script.call("not JSON", "POST", EMBED, b"{")
    script.call("a list", "POST", EMBED, [])
    script.call("too large", "POST", EMBED, b"[" + b" " * 1_100_000 + b"]")
    bad = {
        "Spillway-Timeout": "soon",
        "Spillway-Priority": "high",
        "Spillway-Resume": "301",
        "Idempotency-Key": "x" * 256,
        "Last-Event-ID": "x",
    }
    for name, text in bad.items():
        script.call(f"bad {name}", "POST", CHAT, chat(), headers={name: text})
    script.raw("no HTTP", b"nonsense\r\n\r\n")
    top = f"POST {EMBED} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {script.key}\r\n"
    script.raw("a body that does not come", f"{top}Content-Length: 9\r\n\r\n{{".encode())


def _code(reply: Reply) -> str:
    return str(reply.json["error"]["code"])


def generation(script: Script) -> None:
    """Answers and continuations, whole and as streams."""
    script.call("chat", "POST", CHAT, chat())
    script.call(
        "chat logprobs", "POST", CHAT, chat({"logprobs": True, "top_logprobs": 2, "max_tokens": 3})
    )
    script.call("chat n", "POST", CHAT, chat({"n": 2}))
    script.call("chat stop", "POST", CHAT, chat({"stop": ["model"]}))
    script.call("chat seed", "POST", CHAT, chat({"seed": 7, "temperature": 0.5, "top_p": 0.01}))
    for name, regex in (("chat response_format", "(yes|no), [0-9]"), ("chat bad format", "(")):
        form = {"type": "regex", "regex": regex}
        script.call(name, "POST", CHAT, chat({"response_format": form}))
    script.call(
        "chat tools",
        "POST",
        CHAT,
        chat({"tools": [{"type": "function", "function": {"name": "f"}}]}),
    )
    script.call("chat bias", "POST", CHAT, chat({"logit_bias": {"40": -100}}))
    parts = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
    ]
    script.call("chat parts", "POST", CHAT, {"messages": parts, **GREEDY})
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    script.call("chat stream", "POST", CHAT, chat({"stream": True}))
    script.call("chat stream usage", "POST", CHAT, chat(usage))
    script.call(
        "chat stream n logprobs",
        "POST",
        CHAT,
        chat({**usage, "n": 2, "logprobs": True, "max_tokens": 3}),
    )
    prompt = {"prompt": "The dam is", **GREEDY}
    script.call("completion", "POST", COMPLETE, prompt)
    script.call("completion stream", "POST", COMPLETE, {**prompt, **usage})
    script.call("completion logprobs", "POST", COMPLETE, {**prompt, "logprobs": 1, "max_tokens": 3})
    script.call("completion echo", "POST", COMPLETE, {**prompt, "echo": True})
    script.call("completion many", "POST", COMPLETE, {**prompt, "prompt": ["One", "Two"]})
    script.call("completion tokens", "POST", COMPLETE, {**prompt, "prompt": [[40, 41, 42]]})
    _responses(script)
    _wrong_generation(script, prompt)


def _responses(script: Script) -> None:
    """Responses, whole and as a stream, stored and gone on from."""
    here = "/v1/responses"
    body = {"input": QUESTION["content"], "temperature": 0, "max_output_tokens": 12}
    made = script.call("response", "POST", here, {**body, "instructions": "Be short."}).json
    name = made["id"]
    again = {**body, "input": [{"role": "user", "content": "And now?"}]}
    script.call("response goes on", "POST", here, {**again, "previous_response_id": name})
    script.call("response not stored", "POST", here, {**body, "store": False})
    script.call("response stored", "GET", f"{here}/{name}")
    unstored = {**body, "stream": True, "store": False}
    streamed = script.ask("POST", here, unstored).body.decode()
    kinds = [event["event"] for event in plain.events(streamed)]
    script.add("response stream", list(dict.fromkeys(kinds)))
    script.call("response unknown", "GET", f"{here}/resp_none")
    script.call("response of unknown", "POST", here, {**body, "previous_response_id": "resp_none"})
    script.call("response tools", "POST", here, {**body, "tools": [{"type": "web_search"}]})
    script.call("response of a conversation", "DELETE", f"{here}/{name}")
    alone = script.call("response alone", "POST", here, body).json["id"]
    script.call("response deleted", "DELETE", f"{here}/{alone}")
    script.call("response is gone", "GET", f"{here}/{alone}")
    script.ask("DELETE", f"{SESSIONS}/{made['session']['id']}")


def _wrong_generation(script: Script, prompt: dict[str, Any]) -> None:
    wrong: dict[str, Any] = {
        "messages": [],
        "temperature": 3,
        "top_p": 0,
        "max_tokens": 0,
        "n": 17,
        "stop": [""],
        "model": "none-such",
        "top_logprobs": 2,
        "session": "chat.spillway-demo~0~01m00000000000000000000000",
        "stream_options": {"include_usage": True},
        "retrieval": {"collection": "none-such"},
    }
    for name, value in wrong.items():
        script.call(f"chat wrong {name}", "POST", CHAT, chat({name: value}))
    for name, value in {"prompt": "", "suffix": "x", "best_of": 3, "logprobs": 21}.items():
        script.call(f"completion wrong {name}", "POST", COMPLETE, {**prompt, name: value})
    script.call("chat no messages", "POST", CHAT, {})
    script.call("chat of an encoder", "POST", CHAT, chat({"model": "minilm"}))
    script.call("chat unknown role", "POST", CHAT, {"messages": [{"role": "x", "content": "y"}]})
    script.call("chat context exceeded", "POST", CHAT, chat(text="word " * 5000))
    script.call(
        "chat stream context exceeded", "POST", CHAT, chat({"stream": True}, text="word " * 5000)
    )


def encoding(script: Script) -> None:
    """Embeddings and both shapes of rerank."""
    small = {"dimensions": 4}
    script.call("embed", "POST", EMBED, {"input": WATER, **small})
    script.call("embed many", "POST", EMBED, {"input": [WATER, FIRE], **small})
    script.call("embed tokens", "POST", EMBED, {"input": [[101, 2300, 102]], **small})
    whole = script.ask("POST", EMBED, {"input": WATER}).json["data"][0]["embedding"]
    script.add("embed whole", {"length": len(whole), "norm": round(sum(x * x for x in whole), 3)})
    coded = script.call(
        "embed base64", "POST", EMBED, {"input": WATER, **small, "encoding_format": "base64"}
    )
    script.exchanges["embed base64"]["body"]["data"][0]["embedding"] = _numbers(coded)
    script.call(
        "embed all or nothing", "POST", EMBED, {"input": [WATER], **small, "all_or_nothing": True}
    )
    script.call(
        "embed truncate", "POST", EMBED, {"input": "word " * 400, **small, "truncate": True}
    )
    wrong: dict[str, Any] = {
        "input": [],
        "model": "none-such",
        "encoding_format": "hex",
        "dimensions": 1000,
        "nothing": 1,
    }
    for name, value in wrong.items():
        script.call(f"embed wrong {name}", "POST", EMBED, {"input": WATER, **small, name: value})
    script.call("embed too long", "POST", EMBED, {"input": "word " * 400})
    script.call("embed of a generator", "POST", EMBED, {"input": WATER, "model": "spillway-demo"})
    cohere = {"query": "water", "documents": [FIRE, {"text": WATER}, AIR]}
    script.call("rerank", "POST", "/v1/rerank", cohere)
    script.call(
        "rerank top", "POST", "/v1/rerank", {**cohere, "top_n": 1, "return_documents": True}
    )
    texts = {"query": "water", "texts": [FIRE, WATER]}
    script.call("rerank texts", "POST", "/rerank", texts)
    script.call(
        "rerank texts whole", "POST", "/rerank", {**texts, "return_text": True, "raw_scores": True}
    )
    script.call("rerank v2", "POST", "/v2/rerank", {**cohere, "top_n": 2})
    script.call(
        "embed in TEI's shape", "POST", "/embed", {"inputs": [WATER, FIRE], "dimensions": 4}
    )
    script.call("embed not normalised", "POST", "/embed", {"inputs": WATER, "normalize": False})
    script.call("tokenize", "POST", "/tokenize", {"prompt": WATER, "return_token_strs": True})
    script.call("tokenize messages", "POST", "/tokenize", {"messages": [QUESTION]})
    script.call("tokenize in TEI's shape", "POST", "/tokenize", {"inputs": [WATER, "fire"]})
    script.call("tokenize both", "POST", "/tokenize", {"inputs": WATER, "prompt": WATER})
    script.call("detokenize", "POST", "/detokenize", {"tokens": [40, 41, 42]})
    script.call("decode", "POST", "/decode", {"ids": [[101, 2300, 102]]})
    script.call("rerank nothing", "POST", "/v1/rerank", {"query": "water"})
    script.call("rerank both", "POST", "/v1/rerank", {**cohere, **texts})


def _numbers(reply: Reply) -> list[float]:
    raw = base64.b64decode(reply.json["data"][0]["embedding"])
    return [round(each, 3) for each in struct.unpack(f"<{len(raw) // 4}f", raw)]


def collections(script: Script, other: str) -> None:
    """A collection from its creation to its deletion; `other` is another tenant's key."""
    here = f"{COLLECTIONS}/facts"
    script.call("create", "POST", COLLECTIONS, {"name": "facts"})
    script.call("create again", "POST", COLLECTIONS, {"name": "facts"})
    script.call("create bad name", "POST", COLLECTIONS, {"name": "No"})
    script.call(
        "create vectors",
        "POST",
        COLLECTIONS,
        {"name": "points", "model": None, "dimension": 3, "metric": "l2"},
    )
    script.call("create no dimension", "POST", COLLECTIONS, {"name": "flat", "model": None})
    texts = {"a": WATER, "b": FIRE, "c/d": AIR}
    documents = [
        {"id": name, "text": text, "metadata": {"n": number, "deep": {"x": name}}}
        for number, (name, text) in enumerate(texts.items())
    ]
    stored = script.call("store", "POST", f"{here}/documents", {"documents": documents})
    script.call("store again", "POST", f"{here}/documents", {"documents": documents[:1]})
    script.call(
        "store without id", "POST", f"{here}/documents", {"documents": [{"text": "a nameless one"}]}
    )
    script.call("store nothing", "POST", f"{here}/documents", {"documents": []})
    script.call("store no text", "POST", f"{here}/documents", {"documents": [{"id": "e"}]})
    points = [{"id": str(n), "vector": [n, 0, 1]} for n in range(4)]
    script.call("store vectors", "POST", f"{COLLECTIONS}/points/documents", {"documents": points})
    script.call(
        "store wrong vector",
        "POST",
        f"{COLLECTIONS}/points/documents",
        {"documents": [{"vector": [1]}]},
    )
    _searches(script, here, stored.json["applied"])
    script.call("list", "GET", COLLECTIONS)
    script.call("describe", "GET", here)
    stats = script.exchanges["describe"]["body"]["stats"]
    stats["bytes"], stats["searches"] = "<bytes>", sorted(stats["searches"])
    until_sync(
        lambda: script.ask("GET", f"{COLLECTIONS}/points/map").status == 200, "a map is drawn"
    )
    _told(script, "map", "GET", f"{COLLECTIONS}/points/map")
    _told(script, "place", "POST", f"{COLLECTIONS}/points/map", {"ids": ["1"]})
    script.call("map bad sample", "GET", f"{here}/map?sample=0")
    script.call("place nothing", "POST", f"{here}/map", {})
    script.call("place bad basis", "POST", f"{here}/map", {"ids": ["a"], "basis": "AAAA"})
    script.call("explain", "GET", f"{here}/explain")
    script.call("explain filter", "GET", f"{here}/explain?k=3&filter=%7B%22n%22%3A1%7D")
    script.call("explain bad k", "GET", f"{here}/explain?k=0")
    script.call("tuning none", "GET", f"{here}/tune")
    script.call("tune bad recall", "POST", f"{here}/tune", {"recall": 2})
    _told(script, "tune", "POST", f"{COLLECTIONS}/points/tune", {"plan_only": True})
    _told(script, "tuning", "GET", f"{COLLECTIONS}/points/tune")
    script.call("tuning none to cancel", "DELETE", f"{here}/tune")
    _told(script, "tuning cancelled", "DELETE", f"{COLLECTIONS}/points/tune")
    script.call("documents", "GET", f"{here}/documents?limit=2")
    script.call("documents after", "GET", f"{here}/documents?limit=2&after=b&include=text,metadata")
    script.call("documents filter", "GET", f"{here}/documents?filter=%7B%22n%22%3A1%7D")
    script.call("documents bad limit", "GET", f"{here}/documents?limit=0")
    script.call("document", "GET", f"{here}/documents/a")
    script.call("document slash", "GET", f"{here}/documents/c%2Fd?include=metadata")
    script.call("document none", "GET", f"{here}/documents/none")
    script.call("delete document", "DELETE", f"{here}/documents/b")
    script.call("delete document again", "DELETE", f"{here}/documents/b")
    script.call("delete documents", "POST", f"{here}/documents/delete", {"ids": ["c/d", "none"]})
    script.call("reembed", "POST", f"{here}/reembed", {})
    script.call("reembed vectors", "POST", f"{COLLECTIONS}/points/reembed", {})
    for method, path in (("GET", here), ("DELETE", here), ("GET", f"{here}/documents")):
        script.call(f"of another tenant: {method} {path}", method, path, key=other)
    script.call("list of another tenant", "GET", COLLECTIONS, key=other)
    _shards(script)


def _shards(script: Script) -> None:
    """The shards of a placed collection on the only process; what needs another process is refused."""
    here = f"{COLLECTIONS}/spread"
    body = {"name": "spread", "model": None, "dimension": 3, "shards": 2, "replicas": 1}
    script.call("create placed", "POST", COLLECTIONS, body)
    _told(script, "shards", "GET", f"{here}/shards")
    _told(script, "replicas", "POST", f"{here}/replicas", {"replicas": 1})
    _told(script, "move", "POST", f"{here}/shards/0/move", {})
    _told(script, "drop", "POST", f"{here}/shards/0/drop", {"replica": "none"})
    _told(script, "reset", "POST", f"{here}/shards/0/reset", {})
    _told(script, "split", "POST", f"{here}/shards/0/split", {})
    _told(script, "split none", "POST", f"{here}/shards/9/split", {})
    script.call("delete placed", "DELETE", here)


def _told(script: Script, name: str, method: str, path: str, body: Any = None) -> None:
    """Write down which fields an answer has, where their values are of this one start."""
    reply = script.ask(method, path, body)
    script.add(
        name,
        {"asked": f"{method} {path}", "status": reply.status, "fields": sorted(reply.json)},
    )


def _searches(script: Script, here: str, applied: str) -> None:
    at = f"{here}/search"
    script.call("search", "POST", at, {"text": "water", "k": 2, "after": applied})
    script.call(
        "search bare",
        "POST",
        at,
        {"text": "water", "include_text": False, "include_metadata": False},
    )
    script.call("search filter", "POST", at, {"text": "water", "filter": {"n": {"$gte": 1}}})
    script.call(
        "search deep filter", "POST", at, {"text": "water", "filter": {"deep.x": {"$in": ["a"]}}}
    )
    script.call("search texts", "POST", at, {"texts": ["water", "light"], "k": 1, "exact": True})
    script.call("search least score", "POST", at, {"text": "water", "min_score": 0.3})
    points = f"{COLLECTIONS}/points/search"
    script.call("search vector", "POST", points, {"vector": [0, 0, 1], "k": 2})
    script.call("search vectors", "POST", points, {"vectors": [[3, 0, 1], [0, 0, 0]], "k": 1})
    script.call("search base64", "POST", points, {"vector": "AAAAAAAAAAAAAIA/", "k": 1})
    script.call("search text of vectors", "POST", points, {"text": "water"})
    script.call("search wrong dimension", "POST", points, {"vector": [0, 1]})
    script.call("search nothing", "POST", at, {})
    script.call("search both", "POST", at, {"text": "a", "vector": [1]})
    script.call("search bad filter", "POST", at, {"text": "a", "filter": {"n": {"$near": 1}}})
    script.call("search bad k", "POST", at, {"text": "a", "k": 0})
    script.call("search none", "POST", f"{COLLECTIONS}/none/search", {"text": "a"})


def grounding(script: Script) -> None:
    """Answers from a collection, and the collection's end."""
    asked = chat(
        {"retrieval": {"collection": "facts", "k": 1, "include_passages": True}},
        "Where is the water?",
    )
    script.call("grounded", "POST", CHAT, asked)
    script.call("grounded stream", "POST", CHAT, {**asked, "stream": True})
    script.call(
        "grounded bad k", "POST", CHAT, chat({"retrieval": {"collection": "facts", "k": 0}})
    )
    reply = script.ask("POST", CHAT, asked)
    script.call("grounded timeline", "GET", f"/v1/requests/{reply.request}/timeline", shape=True)
    script.call("delete collection", "DELETE", f"{COLLECTIONS}/facts")
    script.call("delete collection again", "DELETE", f"{COLLECTIONS}/facts")
    script.call("describe deleted", "GET", f"{COLLECTIONS}/facts")


def requests(script: Script) -> None:
    """What became of a request, its events, its cancellation."""
    body = {"input": WATER, "dimensions": 2}
    made = script.call("embed", "POST", EMBED, body, headers={"Idempotency-Key": "one"})
    name = script.know("request", made.request)
    script.call("embed again", "POST", EMBED, body, headers={"Idempotency-Key": "one"})
    script.call(
        "embed other body",
        "POST",
        EMBED,
        {**body, "input": FIRE},
        headers={"Idempotency-Key": "one"},
    )
    script.call("request", "GET", f"/v1/requests/{name}")
    trace = "0af7651916cd43dd8448eb211c80319c"
    traced = {"traceparent": f"00-{trace}-b7ad6b7169203331-01"}
    other = script.ask("POST", EMBED, body, headers={**traced, "Idempotency-Key": "trace"}).request
    script.call("request with a trace", "GET", f"/v1/requests/{other}")
    script.call("timeline", "GET", f"/v1/requests/{name}/timeline")
    script.call("events", "GET", f"/v1/requests/{name}/events")
    script.call("cancel what is over", "POST", f"/v1/requests/{name}/cancel")
    _resumed(script)
    for method, path in (
        ("GET", ""),
        ("DELETE", ""),
        ("POST", "/cancel"),
        ("GET", "/events"),
        ("GET", "/timeline"),
    ):
        script.call(
            f"none: {method} {path}", method, f"/v1/requests/req-01m00000000000000000000000{path}"
        )
    script.call("no id: GET", "GET", "/v1/requests/none")
    _cancelled(script)
    late = {"Spillway-Timeout": "0.001"}
    script.call("too late", "POST", CHAT, chat(LONG), headers=late)
    script.call(
        "low priority",
        "POST",
        EMBED,
        body,
        headers={"Spillway-Priority": "low", "Spillway-Timeout": "60"},
    )


def _resumed(script: Script) -> None:
    """A stream is read again from its middle, by its request's id and by its Idempotency-Key."""
    body, headers = chat({"stream": True, "max_tokens": 40}), {"Idempotency-Key": "two"}
    first = script.ask("POST", CHAT, body, headers=headers)
    name = script.know("generation", first.request)
    script.call("generation", "GET", f"/v1/requests/{name}")
    whole = list(plain.events(first.body.decode()))
    marks = [event["id"] for event in whole if "id" in event]
    middle = marks[min(1, len(marks) - 1)]  # a fast engine sends all its tokens at once
    at = next(number for number, event in enumerate(whole) if event.get("id") == middle)
    before = _content(whole[: at + 1])
    again = {**headers, "Last-Event-ID": middle}
    events = script.ask("GET", f"/v1/requests/{name}/events", headers={"Last-Event-ID": middle})
    query = script.ask("GET", f"/v1/requests/{name}/events?last_event_id={middle}")
    posted = script.ask("POST", CHAT, body, headers=again)
    for kind, reply in (("events", events), ("query", query), ("POST", posted)):
        rest = list(plain.events(reply.body.decode()))
        joined = before + _content(rest) == _content(whole)
        script.add(f"resumed by {kind}", {"status": reply.status, "joins": joined})
    script.call("whole events", "GET", f"/v1/requests/{name}/events")
    script.call("stream again", "POST", CHAT, body, headers=headers)
    script.call("bad event id", "GET", f"/v1/requests/{name}/events?last_event_id=x")


def _content(events: list[dict[str, str]]) -> str:
    """Return the text of a generation's events."""
    found = [json.loads(event["data"]) for event in events if event.get("data", "").startswith("{")]
    choices = [choice for data in found for choice in data.get("choices", ())]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def _cancelled(script: Script) -> None:
    """A stream is cancelled from outside and ends with an error."""
    for method, path in (("DELETE", ""), ("POST", "/cancel")):
        with script.open("POST", CHAT, chat({**LONG, "stream": True})) as answer:
            name = script.know(f"{method} cancelled", answer.headers["x-request-id"])
            script.begun(answer)
            script.call(f"cancel by {method}", method, f"/v1/requests/{name}{path}")
            # The worker may have heard of it before the answer is written.
            script.exchanges[f"cancel by {method}"]["body"]["state"] = "<state>"
            last = list(plain.events(answer.read().decode()))[-1]
        error = json.loads(last["data"])["error"]
        script.add(f"cancelled by {method}", [error["code"], error["type"], error["status"]])
        script.call(f"request cancelled by {method}", "GET", f"/v1/requests/{name}")


def sessions(script: Script, other: str) -> None:
    """A session's life: turns, what is kept of it, another's copy, its end."""
    made = script.call("create", "POST", SESSIONS, {"ttl_s": 3600, "metadata": {"title": "talk"}})
    name = script.know("session", made.json["id"])
    here = f"{SESSIONS}/{name}"
    script.call("turn", "POST", CHAT, chat({"session": name, "max_tokens": 40}, TALK))
    streamed = chat(
        {"session": name, "stream": True, "stream_options": {"include_usage": True}}, "And now?"
    )
    script.call("turn stream", "POST", CHAT, streamed)
    script.call("get", "GET", here)
    script.call("get messages", "GET", f"{here}?include=messages")
    script.call("get bad include", "GET", f"{here}?include=all")
    script.call("change", "POST", here, {"metadata": {"title": "other"}, "ttl_s": 7200})
    script.call("patch", "PATCH", here, {"ttl_s": 3600})
    script.call("change unknown", "POST", here, {"nothing": 1})
    script.call("list", "GET", f"{SESSIONS}?limit=1")
    script.call("list bad limit", "GET", f"{SESSIONS}?limit=0")
    script.call("list of another tenant", "GET", SESSIONS, key=other)
    script.call("get of another tenant", "GET", here, key=other)
    script.call("delete of another tenant", "DELETE", here, key=other)
    _busy(script, name)
    document = script.call("export", "GET", f"{here}/export").json
    pages = _pages(script, here)
    _imported(script, document, pages, other)
    script.call("delete", "DELETE", here, shape=True)
    for method, path in (
        ("GET", ""),
        ("DELETE", ""),
        ("POST", ""),
        ("GET", "/export"),
        ("GET", "/pages"),
    ):
        script.call(
            f"gone: {method} {path}", method, f"{here}{path}", {} if method == "POST" else None
        )
    script.call("gone: turn", "POST", CHAT, chat({"session": name}))
    script.call("create unknown model", "POST", SESSIONS, {"model": "none-such"})
    script.call("create bad ttl", "POST", SESSIONS, {"ttl_s": 0})


def _busy(script: Script, name: str) -> None:
    """A second turn beside a running one is refused, and the running one, cancelled, leaves nothing."""
    body = chat({**LONG, "session": name, "stream": True})
    with script.open("POST", CHAT, body) as answer:
        running = script.know("running turn", answer.headers["x-request-id"])
        script.begun(answer)
        script.call("busy", "POST", CHAT, chat({"session": name}))
        script.call("get running", "GET", f"{SESSIONS}/{name}")
        script.ask("DELETE", f"/v1/requests/{running}")
        answer.read()
    script.call("get after cancel", "GET", f"{SESSIONS}/{name}")


def _pages(script: Script, here: str) -> bytes:
    """The pages of a session, once all have come to Redis."""

    def told() -> Any:
        found = script.ask("GET", f"{here}/pages").json
        return found["pages"] and found["tiers"]["redis"] == found["pages"]

    until_sync(told, "a session's pages are in Redis")
    script.call("pages", "GET", f"{here}/pages", shape=True)
    script.call("pin", "POST", here, {"pin": True})
    script.call("unpin", "POST", here, {"pin": False})
    pages = script.call("export pages", "GET", f"{here}/export/pages").body
    script.call("import no pages", "POST", f"{here}/import/pages", b"nonsense")
    script.call("import own pages", "POST", f"{here}/import/pages", pages)
    return pages


def _imported(script: Script, document: Any, pages: bytes, other: str) -> None:
    """Another tenant takes over a session with its pages and goes on with it."""
    made = script.call("import", "POST", f"{SESSIONS}/import", document, key=other)
    name = script.know("imported session", made.json["id"])
    script.call("import pages", "POST", f"{SESSIONS}/{name}/import/pages", pages, key=other)
    script.call("imported turn", "POST", CHAT, chat({"session": name}, "And then?"), key=other)
    script.call("imported messages", "GET", f"{SESSIONS}/{name}?include=messages", key=other)
    script.call("import nothing", "POST", f"{SESSIONS}/import", {})
    script.call(
        "import unknown format", "POST", f"{SESSIONS}/import", {**document, "format": "x/1"}
    )
    script.call("import unknown model", "POST", f"{SESSIONS}/import?model=none-such", document)


def quotas(script: Script, key: str) -> None:
    """A key of one request a minute; and the mesh, now that all of it has worked."""
    script.call("within quota", "POST", EMBED, {"input": WATER, "dimensions": 2}, key=key)
    script.call("over quota", "POST", EMBED, {"input": WATER, "dimensions": 2}, key=key)
    until_sync(
        lambda: any(each["measured"] for each in script.ask("GET", "/v1/mesh").json["workers"]),
        "the router has noted a worker's batch",
    )
    script.call("mesh", "GET", "/v1/mesh", shape=True)


def tiers(script: Script) -> None:
    """Pages where there is no tier for them, or one that is away."""
    name = script.know("session", script.ask("POST", SESSIONS, {}).json["id"])
    here = f"{SESSIONS}/{name}"
    script.call("turn", "POST", CHAT, chat({"session": name, "max_tokens": 40}, TALK))
    script.call("pages", "GET", f"{here}/pages", shape=True)
    script.call("pin", "POST", here, {"pin": True})
    script.call("export pages", "GET", f"{here}/export/pages")
    script.call("import pages", "POST", f"{here}/import/pages", _no_pages(script))
    script.call("embed without an encoder", "POST", EMBED, {"input": WATER})
    script.call("create without an encoder", "POST", COLLECTIONS, {"name": "facts"})
    script.call("delete", "DELETE", here, shape=True)


def _no_pages(script: Script) -> bytes:
    """Return an export of no pages of the model that is served."""
    models = script.ask("GET", "/v1/models").json["data"]
    (model,) = [each for each in models if each["kind"] == "generate"]
    head = {"format": "spillway.pages/1", "model": model["id"], "fingerprint": model["fingerprint"]}
    return json.dumps({**head, "root": "", "pages": 0}).encode() + b"\n"


def keys(instance: Instance) -> dict[str, str]:
    """Make the tenants' keys."""
    made = {
        "alpha": (),
        # A sixteenth of it holds in a partition: twelve pages, whether kv_store has told Redis of it yet or not.
        "beta": ("--page-bytes", "64000000"),
        "gamma": ("--requests-per-minute", "1"),
    }
    return {
        tenant: instance.said("keys", "create", "--tenant", tenant, *more)
        for tenant, more in made.items()
    }


def whole(instance: Instance) -> dict[str, dict[str, Any]]:
    """Return the transcripts of an instance with every tier, by name."""
    made = keys(instance)
    told = {}
    for part in (health, refusals, generation, encoding, requests):
        script = Script(instance.url, made["alpha"])
        part(script)
        told[part.__name__] = script.exchanges
    script = Script(instance.url, made["alpha"])
    collections(script, made["beta"])
    grounding(script)
    told["collections"] = script.exchanges
    script = Script(instance.url, made["alpha"])
    sessions(script, made["beta"])
    told["sessions"] = script.exchanges
    script = Script(instance.url, made["alpha"])
    quotas(script, made["gamma"])
    told["quotas"] = script.exchanges
    return told


def bare(instance: Instance) -> dict[str, Any]:
    """Return the transcript of an instance whose pages have no place below the worker."""
    script = Script(instance.url)
    tiers(script)
    return script.exchanges
