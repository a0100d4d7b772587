"""The chat kinds of `python -m loadgen`: single requests, conversations, grounded questions."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from loadgen.chat.client import Chat
from loadgen.chat.load import Asking, ChatLoad, Talk
from loadgen.chat.replies import Goal, Reply, summary
from loadgen.chat.scripts import Lengths, ScriptShape, scripts
from loadgen.driving import driven
from loadgen.target import Target

KINDS = ("chat", "multi-turn", "grounded")


def arguments(parser: argparse.ArgumentParser, seconds: Callable[[str], float]) -> None:
    """Declare the options of chat alone; `seconds` parses durations."""
    add = parser.add_argument_group("chat").add_argument
    add("--prompt", type=float, default=38.0, help="mean words of a turn (log-normal)")
    add("--output", type=float, default=205.0, help="mean tokens of an answer (log-normal)")
    add("--sigma", type=float, default=1.0, help="sigma of both lengths' logarithm; 0: constant")
    add("--turns", type=float, default=5.56, help="mean turns of a conversation (multi-turn)")
    add("--think", type=seconds, default=60.0, help="mean pause before a later turn")
    add("--stateless", action="store_true", help="send the whole history instead of a session")
    add("--temperature", type=float, default=0.0, help="0: greedy")
    add("--free-length", action="store_true", help="let the model end its answers")
    add("--resume", type=seconds, default=0.0, help="resumable requests; 0: attached")
    add("--ttft", type=seconds, default=1.0, help="first tokens within this count as goodput")
    add("--tpot", type=seconds, default=0.1, help="later tokens within this count as goodput")


def shape(options: argparse.Namespace) -> ScriptShape:
    """Return the shape of the conversations by the options."""
    return ScriptShape(
        prompt=Lengths(options.prompt, options.sigma),
        output=Lengths(options.output, options.sigma),
        turns=options.turns if options.kind == "multi-turn" else 1.0,
        think_s=options.think,
    )


def asking(options: argparse.Namespace) -> Asking:
    """Return the form of the turns' requests by the options."""
    grounded = options.kind == "grounded"
    return Asking(
        how="stateless" if options.stateless else "session",
        model=options.model,
        temperature=options.temperature,
        exact_length=not options.free_length,
        retrieval={"collection": options.collection, "k": options.k} if grounded else None,
    )


async def drive(options: argparse.Namespace, urls: list[str]) -> Talk:
    """Run the loop of the options, and print a line a second on standard error."""
    async with (
        Chat(urls, key=options.key, resume_s=options.resume, timeout_s=options.timeout) as chat,
        Target(urls, key=options.key, timeout_s=options.timeout) as target,
    ):
        load = ChatLoad(chat, target, scripts(shape(options), options.seed), asking(options))

        def told(fresh: Sequence[Reply]) -> tuple[dict[str, Any], str]:
            part = summary(list(fresh), 1.0, goal(options))
            first = part["ttft_s"]
            return part, f"  TTFT p50 {first['p50'] * 1e3:.1f} ms" if first else ""

        return await driven(load, options, lambda: load.replies, told)


def goal(options: argparse.Namespace) -> Goal:
    """Return the limits of goodput."""
    return Goal(options.ttft, options.tpot)


def report(found: dict[str, Any]) -> str:
    """Return a run's summary as lines for people."""
    s = found
    lines = [
        "requests {requests}  ok {ok}  refused {refused}  errors {errors}  resumes {resumes}".format(
            **s
        ),
        "rate {requests_per_s:.2f} requests/s  {output_tokens_per_s:.1f} output tokens/s".format(
            **s
        ),
    ]
    lines += [
        row(name, s[key])
        for name, key in (
            ("TTFT", "ttft_s"),
            ("TPOT", "tpot_s"),
            ("ITL", "itl_s"),
            ("latency", "latency_s"),
            ("latency/token", "normalized_s"),
        )
        if s[key]
    ]
    lines += [
        "goodput at TTFT {ttft_s:g} s, TPOT {tpot_s:g} s: ".format(**s["goal"])
        + "{goodput_per_s:.2f}/s".format(**s),
        "load generator: {loadgen_cpu_s:.2f} CPU s in {seconds:.1f} s".format(**s),
    ]
    return "\n".join(lines + [f"  {code}: {count}" for code, count in sorted(s["codes"].items())])


def row(name: str, found: dict[str, float]) -> str:
    """Return one line of percentiles in milliseconds."""
    part = "  ".join(f"{key} {value * 1e3:.2f} ms" for key, value in found.items())
    return f"{name:<14} {part}"


def finish(options: argparse.Namespace, talk: Talk, argv: Sequence[str]) -> int:
    """Print and store a run of these arguments; 0 if any answer came whole, else 1."""
    found = talk.summary(goal(options))
    print(report(found))
    if options.json:
        raw = [sample(each) for each in talk.replies]
        options.json.write_bytes(msgspec.json.encode({"summary": found, "samples": raw}))
    if options.html:
        from loadgen.html import runs  # noqa: PLC0415 - only reports need what plots need

        about = runs.About.now(argv)
        runs.chat_page(talk.replies, found, goal(options), about).save(options.html)
    return 0 if found["ok"] else 1


def sample(each: Reply) -> list[Any]:
    """Return one request as a row: due, sent, first, done, status, code, then turn, tokens and gaps."""
    moments = [each.due_s, each.sent_s, each.first_s, each.done_s, each.status, each.code]
    tokens = [each.prompt_tokens, each.cached_tokens, each.output_tokens]
    return [*moments, each.turn, *tokens, list(each.gaps_s)]
