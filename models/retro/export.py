"""Write the model directory that the engine loads, from a checkpoint: `python -m models.retro.export`."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from engine.models.retro.files import save_retro
from engine.models.retro.network import RetroConfig, RetroNetwork
from models.retro.train import DIRECTORY


def main() -> None:
    """Export a checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=DIRECTORY / ".checkpoints" / "last.pt")
    parser.add_argument("--directory", type=Path, default=DIRECTORY)
    args = parser.parse_args()
    saved = torch.load(args.checkpoint, weights_only=True)
    config = RetroConfig(**saved["config"] | {"cross": tuple(saved["config"]["cross"])})
    network = RetroNetwork(config)
    network.load_state_dict(saved["net"])
    save_retro(network, args.directory)
    print(saved["state"])


if __name__ == "__main__":
    main()
