"""The demo pack's own byte-level BPE: trained on its own text, kept as a list of merges.

Tokens   256 byte letters, one for each merge, then Qwen's control and added tokens; N_TOKENS in all
Words    cut by the pattern of the "qwen35" pre-tokenizer: every digit is a token of its own
Kept     merges.txt belongs to the trained weights, also when what is learned has changed since
Again    `python -m strata.bench.demo_pack.tokenizer` trains it from SEED and writes merges.txt, for weights that begin
         anew; the same text gives the same merges
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from random import Random

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from strata.bench.demo_pack.data.about import FACTS
from strata.bench.demo_pack.data.mixture import draw
from strata.bench.demo_pack.data.sample import Sample
from strata.server.chat.vocabulary import CONTROL, NORMAL, PRE_TOKENIZERS, USER_DEFINED, Vocabulary

SEED = 20261129
N_TOKENS = 4096
N_SAMPLES = 12_000
PRE = "qwen35"
CONTEXT = 8192
FACT_TIMES = 20
CODES = re.compile(r"\b[A-Z]{2,4}\b")
MERGES = Path(__file__).with_name("merges.txt")
TEMPLATE = Path(__file__).with_name("template.jinja")

CONTROL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
ADDED_TOKENS = (
    "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>",
    "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>",
)  # fmt: skip
N_NORMAL = N_TOKENS - len(CONTROL_TOKENS) - len(ADDED_TOKENS)


def tokens_of(merges: list[str]) -> list[str]:
    """`tokenizer.ggml.tokens` for these merges."""
    words = dict.fromkeys(sorted(pre_tokenizers.ByteLevel.alphabet()))
    words.update(dict.fromkeys(merge.replace(" ", "", 1) for merge in merges))
    if len(words) != N_NORMAL:
        raise ValueError(f"{len(words)} normal tokens, {N_NORMAL} are wanted: train the tokenizer again")
    return [*words, *CONTROL_TOKENS, *ADDED_TOKENS]


def token_types() -> list[int]:
    """`tokenizer.ggml.token_type`."""
    return [NORMAL] * N_NORMAL + [CONTROL] * len(CONTROL_TOKENS) + [USER_DEFINED] * len(ADDED_TOKENS)


def load_merges() -> list[str]:
    """`tokenizer.ggml.merges`."""
    return MERGES.read_text(encoding="utf-8").splitlines()


def chat_template() -> str:
    """`tokenizer.chat_template`: without the line break that ends the file, which some renderers would keep."""
    return TEMPLATE.read_text(encoding="utf-8").rstrip("\n")


def vocabulary_of(merges: list[str]) -> Vocabulary:
    tokens = tokens_of(merges)
    return Vocabulary(
        tokens,
        token_types(),
        merges,
        pre=PRE,
        end_ids=[tokens.index("<|im_end|>")],
        words={"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        name="strata-demo",
        architecture="qwen4exp",
        context_length=CONTEXT,
        chat_template=chat_template(),
    )


@cache
def vocabulary() -> Vocabulary:
    """The vocabulary that the pack carries, with its chat template; what a server reads from the exported file."""
    return vocabulary_of(load_merges())


def texts(n_samples: int = N_SAMPLES, seed: int = SEED) -> Iterator[str]:
    """What the merges are learned from: everything that is said in samples for training, without the letters of random
    codes, whose pairs would fill the vocabulary; the fixed answers more often than they are drawn."""
    for i in range(n_samples):
        for text in _said(draw(Random(f"{seed}/{i}"), "train", 300)):
            yield CODES.sub("", text)
    for fact in FACTS:
        yield from [" ".join((*fact.asks, fact.answer))] * FACT_TIMES


def _said(sample: Sample) -> Iterator[str]:
    for message in sample.messages:
        yield message["content"] or ""
        yield message.get("reasoning_content", "")
        for call in message.get("tool_calls", ()):
            yield json.dumps(call["function"]["arguments"], ensure_ascii=False)
    for tool in sample.tools:
        yield json.dumps(tool, ensure_ascii=False)


def train_merges(n_samples: int = N_SAMPLES) -> list[str]:
    """The merges of N_NORMAL tokens, most frequent pair first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRE_TOKENIZERS[PRE]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=N_NORMAL, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator(texts(n_samples), trainer)
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]


def main() -> None:
    merges = train_merges()
    tokens_of(merges)
    MERGES.write_text("\n".join(merges) + "\n", encoding="utf-8")
    print(f"{MERGES}: {len(merges)} merges")


if __name__ == "__main__":
    main()
