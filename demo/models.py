"""The checkpoint folders that the demo pushes, made once and sealed."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from demo.commands import program
from demo.model_source import SourceModel, Stamp, Wanted, is_fresh, obtain_model, replacing

MODEL = "smollm2"
_RECIPE = 1  # counts up when the folders below would come out otherwise


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """The folders below one model root, and what is wrong with the broken ones."""

    root: Path
    source: SourceModel
    nan_tensor: str  # v3
    flipped_tensor: str  # v4
    flipped_file: str  # v4

    def folder(self, version: str) -> Path:
        """The folder of `version`."""
        return self.root / f"{MODEL}-{version}"


def prepare_checkpoints(build: Path, wanted: Wanted, say: Callable[[str], None]) -> Checkpoints:
    """All folders below `build`, made now if they are missing or of an older recipe.

    v1: as downloaded.  v2: a merged low-rank update in all layers.  v3: sealed over NaN weights.
    v4: one bit flipped after sealing.  v5: a model of another shape.
    """
    source = obtain_model(build / "models", wanted, say)
    root = build / "demo" / ("models" if source.is_real else "models-tiny")
    stamp: Stamp = {"recipe": _RECIPE, "source": source.stamp}
    if not is_fresh(root, stamp):
        say("deriving and sealing the demo's five versions")
        with replacing(root, stamp) as fresh:
            _make_all(source.folder, fresh)
    facts = json.loads((root / "facts.json").read_text())
    return Checkpoints(root, source, facts["nan_tensor"], facts["flipped_tensor"], facts["flipped_file"])


def _make_all(source: Path, root: Path) -> None:
    from transformers import LlamaConfig

    from demo.conversion import save_random_llama
    from demo.variants import derive, flip_a_bit, layer_count, low_rank_update, not_a_number, unchanged

    layers = layer_count(source)
    last = range(layers - 1, layers)
    victim = f"model.layers.{layers - 1}.mlp.down_proj.weight"

    def folder(version: str) -> Path:
        path = root / f"{MODEL}-{version}"
        path.mkdir()
        return path

    v1 = folder("v1")
    derive(source, v1, unchanged)
    _seal(v1)

    v2 = folder("v2")
    derive(v1, v2, low_rank_update(2, range(layers)))
    _seal(v2)

    v3 = folder("v3")
    derive(v2, v3, not_a_number(victim))
    _seal(v3)

    # Other weights than v2 in the last layer: bytes that are resident already would not be read again,
    # and so the damage would rightly go unnoticed.
    v4 = folder("v4")
    derive(v2, v4, low_rank_update(4, last))
    _seal(v4)
    place = flip_a_bit(v4, victim)

    v5 = folder("v5")
    config = LlamaConfig.from_pretrained(source)
    config.hidden_size, config.intermediate_size, config.head_dim = 32, 64, 8
    config.num_attention_heads, config.num_key_value_heads, config.num_hidden_layers = 4, 2, 2
    save_random_llama(config, v5, seed=5)
    for path in source.glob("tokenizer*"):
        (v5 / path.name).write_bytes(path.read_bytes())
    for path in v5.iterdir():
        path.chmod(0o644)
    _seal(v5)

    facts = {"nan_tensor": victim, "flipped_tensor": place.tensor, "flipped_file": place.file}
    (root / "facts.json").write_text(json.dumps(facts))


def _seal(folder: Path) -> None:
    result = subprocess.run(
        [*program("loaderctl"), "seal", str(folder)], capture_output=True, text=True, check=False
    )
    if result.returncode != 0:
        raise RuntimeError(
            f"loaderctl seal {folder.name} ended with {result.returncode}: {result.stderr.strip()}"
        )


def main() -> None:
    """`python -m demo.models`: prepare the folders without running the demo."""
    parser = argparse.ArgumentParser(
        prog="python -m demo.models", description="Prepare the demo's checkpoints."
    )
    parser.add_argument("--build", type=Path, default=Path("build"))
    parser.add_argument("--model", type=Wanted, choices=list(Wanted), default=Wanted.AUTO)
    parser.add_argument(
        "--source-only",
        action="store_true",
        help="Only download and convert the model.",
    )
    options = parser.parse_args()

    def say(text: str) -> None:
        print(text, file=sys.stderr)

    if options.source_only:
        print(obtain_model(options.build / "models", options.model, say).folder)
    else:
        print(prepare_checkpoints(options.build, options.model, say).root)


if __name__ == "__main__":
    main()
