"""Train the cross-encoder that row Q2 measures: `python scripts/train_reranker.py`. Seeded.

It goes on where it was cut off, takes less than 40 minutes on one core and needs no network: the texts are docstrings
and readmes of the packages that `requirements.lock` names, the first weights those of the default encoder.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "client")]


def main() -> None:
    """Make the corpus, train, judge on held-out pages, and write the model's directory."""
    import torch  # noqa: PLC0415 - after the arguments, so that --help is quick

    from bench.ranker.corpus import Corpus, made  # noqa: PLC0415
    from bench.ranker.training import Training, TrainingPlan, figures  # noqa: PLC0415
    from bench.workloads.trained_ranker import DEFAULT  # noqa: PLC0415

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=DEFAULT, help="the model's directory")
    parser.add_argument("--lists", type=int, default=TrainingPlan().lists, help="lists to train on")
    parser.add_argument(
        "--rate", type=float, default=TrainingPlan().rate, help="learning rate of the layers"
    )
    parser.add_argument("--seed", type=int, default=TrainingPlan().seed)
    args = parser.parse_args()
    torch.set_num_threads(1)
    plan = replace(TrainingPlan(), lists=args.lists, rate=args.rate, seed=args.seed)
    working = args.out.with_name(f"{args.out.name}.training")
    working.mkdir(parents=True, exist_ok=True)
    path = working / f"corpus-{plan.seed}.json"
    if not path.exists():
        part = path.with_suffix(".part")
        made(plan.seed).save(part)
        part.replace(path)
    corpus = Corpus.load(path)
    say(
        f"{len(corpus.passages)} passages, {len(corpus.training)} lists, {len(corpus.judged)} held out"
    )
    training = Training(plan, corpus, working / f"{plan.seed}-{plan.lists}-{plan.rate:g}.pt")
    for told in training.go():
        say(" ".join(f"{name} {value:.4g}" for name, value in told.items()))
    training.export(args.out)
    text = figures(training)
    (args.out / "training.json").write_text(text + "\n", encoding="utf-8")
    say(text)


def say(text: str) -> None:
    """Print a line at once, for logs that are followed."""
    print(text, flush=True)


if __name__ == "__main__":
    main()
