"""Makes the word problems of `experiment=smollm2_word_problems_gpu`: one step each, with operands from 2 to 20.

usage: python scripts/make_word_problems.py [--out outputs/assets/word_problems] [--val-pairs 40] [--seed 0]

Writes train.jsonl and val.jsonl. No pair of operands in one occurs in the other.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    from rlhpc.data.word_problems import split
    from rlhpc.errors import DataError

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "outputs/assets/word_problems")
    parser.add_argument("--val-pairs", type=int, default=40, help="pairs of operands, of 190, kept for validation")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    try:
        sides = split(args.val_pairs, args.seed)
    except DataError as error:
        parser.error(str(error))
    args.out.mkdir(parents=True, exist_ok=True)
    for name, problems in zip(("train", "val"), sides, strict=True):
        path = args.out / f"{name}.jsonl"
        path.write_text("".join(json.dumps(problem.row()) + "\n" for problem in problems))
        print(f"{path}: {len(problems)} problems")


if __name__ == "__main__":
    main()
