"""`strata-bench draft-vocab`: a draft vocabulary from a corpus, for `--draft-vocab`.

The draft layer proposes the most likely token, and most of a vocabulary is never that. With the tokens that a corpus
has most often it reads a tenth of the output matrix; a token outside is simply never drafted. The corpus is text files,
encoded with the pack's own vocabulary; special words are always in.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from rich.console import Console

from strata.server.chat.vocabulary import Vocabulary

PIECE: Final = 1 << 20
"""Characters that are encoded at once."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pack", type=Path, required=True, help="GGUF file of the model, for its vocabulary")
    parser.add_argument("--corpus", type=Path, nargs="+", required=True, metavar="FILE", help="text files, UTF-8")
    parser.add_argument("-n", "--n", type=int, default=32768, help="tokens at most (32768)")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the draft vocabulary")


def run(args: argparse.Namespace, console: Console) -> int:
    vocabulary = Vocabulary.load(args.pack)
    always = set(vocabulary.special.values())
    if args.n <= len(always):
        console.print(f"-n: the special words alone are {len(always)} tokens; ask for more")
        return 2
    counts = count(vocabulary, args.corpus)
    chosen = choose(counts, always, args.n)
    args.out.write_text(text_of(chosen, f"{len(chosen)} of {len(vocabulary)} tokens of {args.pack.name}"))
    covered, whole = sum(counts[token] for token in chosen), max(1, counts.total())
    console.print(f"{args.out}: {len(chosen)} tokens, {100 * covered / whole:.2f} % of the corpus's {whole:,}")
    return 0


def count(vocabulary: Vocabulary, paths: Iterable[Path]) -> Counter[int]:
    """How often each token comes in the files."""
    counts: Counter[int] = Counter()
    for path in paths:
        for piece in pieces(path):
            counts.update(vocabulary.encode_plain(piece))
    return counts


def pieces(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8", errors="replace") as file:
        while piece := file.read(PIECE):
            yield piece


def choose(counts: Counter[int], always: set[int], n: int) -> list[int]:
    """At most n tokens in ascending order: those that must be in, then by falling count; of equals the lower id."""
    by_count = sorted((token for token in counts if token not in always), key=lambda token: (-counts[token], token))
    return sorted([*always, *by_count[: max(0, n - len(always))]])


def text_of(tokens: list[int], title: str) -> str:
    """The file: an id a line."""
    return "".join([f"# draft vocabulary: {title}\n", *(f"{token}\n" for token in tokens)])
