"""A draft vocabulary from a corpus: the most frequent tokens, special words, a file that the engine reads."""

from __future__ import annotations

from collections import Counter

from strata.bench.__main__ import main
from strata.bench.draft_vocab import choose
from strata.engine.draft.vocabulary import read_vocabulary
from strata.server.chat.vocabulary import Vocabulary


def test_frequent_tokens_come_first_and_special_ones_always():
    counts = Counter({5: 9, 6: 9, 7: 30, 8: 1, 90: 2})
    assert choose(counts, {90, 91}, 4) == [5, 7, 90, 91]
    assert choose(counts, {90, 91}, 99) == [5, 6, 7, 8, 90, 91]


def test_the_engine_reads_what_the_tool_writes(packs, tmp_path):
    corpus, out = tmp_path / "corpus.txt", tmp_path / "vocab.txt"
    corpus.write_text("the value of the name is the value of the module, and the name of the value is a name\n" * 50)
    pack = packs["tiny-f32"]
    assert main(["draft-vocab", "--pack", str(pack), "--corpus", str(corpus), "-n", "80", "--out", str(out)]) == 0
    vocabulary = Vocabulary.load(pack)
    ids = read_vocabulary(out, len(vocabulary)).tolist()
    wanted = set(vocabulary.encode_plain(" the value of the name")) | set(vocabulary.special.values())
    assert wanted <= set(ids) and len(ids) <= 80
    assert main(["draft-vocab", "--pack", str(pack), "--corpus", str(corpus), "-n", "3", "--out", str(out)]) == 2
