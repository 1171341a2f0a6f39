"""Write the table of distances in docs/exactness.md: how far 8-bit activations put the logits from float32 arithmetic.

    python docs/distances.py            # unpacks the test packs to a temporary folder; about half a minute

For each quantised test pack: root mean square and largest distance of the logits after three prompts from those of
transformers on the same weights dequantised, of the fast host kernels and of llama.cpp's recording.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np

from strata.engine.device.host import HostDevice
from strata.engine.model import Model, Rows
from strata.engine.pack import open_pack

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "tests" / "data"
PAGE = ROOT / "docs" / "exactness.md"
BEGIN, END = "<!-- distances -->", "<!-- end of distances -->"
PROMPTS = ("len17", "eos", "len130")
CONTEXT = 256


def distances(pack: Path) -> tuple[np.ndarray, np.ndarray, int]:
    """Differences of our logits and of llama.cpp's, (prompts, vocab) each, and prompts whose first token is equal."""
    recorded = {kind: np.load(DATA / "golden" / f"{pack.stem}-{kind}.npz") for kind in ("hfdq", "llama")}
    ids = np.load(DATA / "golden" / f"{pack.stem.split('-')[0]}-hf.npz")
    model, ours, theirs, equal = Model(open_pack(pack), HostDevice("cpu", 1), CONTEXT), [], [], 0
    for prompt in PROMPTS:
        tokens = ids[f"{prompt}.ids"]
        wanted = recorded["hfdq"][f"{prompt}.last_logits"][-1]
        logits = model.forward(Rows.of([(0, 0, tokens)]), model.new_state(1), [len(tokens) - 1])[0]
        ours.append(logits - wanted)
        theirs.append(recorded["llama"][f"{prompt}.last_logits"][-1] - wanted)
        equal += int(logits.argmax() == wanted.argmax())
    return np.stack(ours), np.stack(theirs), equal


def table(packs: list[Path]) -> str:
    lines = ["| pack | ours | llama.cpp | ours, largest | llama.cpp, largest |", "| --- | --- | --- | --- | --- |"]
    equal = larger = 0
    for pack in packs:
        ours, theirs, same = distances(pack)
        rms = [float(np.sqrt(np.mean(np.square(d)))) for d in (ours, theirs)]
        most = [float(np.abs(d).max()) for d in (ours, theirs)]
        lines.append(f"| `{pack.stem}` | {rms[0]:.4f} | {rms[1]:.4f} | {most[0]:.3f} | {most[1]:.3f} |")
        equal += same
        larger += int((np.abs(ours).max(1) > np.abs(theirs).max(1)).sum())
    cases = len(packs) * len(PROMPTS)
    lines += [
        "",
        f"The first token is equal in {equal} of {cases} cases. The largest distance of a single prompt is above",
    ]
    lines += [f"llama.cpp's in {larger} of them."]
    return "\n".join(lines)


def main() -> int:
    sys.path.insert(0, str(DATA))
    from unpack import Archive

    archive = Archive()
    stems = sorted(p.name.removesuffix("-hfdq.npz") for p in (DATA / "golden").glob("*-hfdq.npz"))
    with tempfile.TemporaryDirectory() as folder:
        text = table([archive.unpack(stem, Path(folder)) for stem in stems])
    head, _, rest = PAGE.read_text().partition(BEGIN)
    tail = rest.partition(END)[2]
    PAGE.write_text(f"{head}{BEGIN}\n{text}\n{END}{tail}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
