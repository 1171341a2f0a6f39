"""Windows of one sequence whose experts do not lie in VRAM, by the share of them that the card reads itself.

    python -m strata.bench.tier_windows_cuda --pack model.gguf [--expert-cache 1] [--threads 31 23 15] [--json FILE]

One start, then every share in turn with the most threads, the best one with fewer threads, and at last the share as it
corrects itself, from a bad one. Before, windows with all shares must sample the same ids. `waits`: of the answers that
the card looked for, those that were not there.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from strata.bench import marks
from strata.bench.report import Check, Record, Report, finish, pack_facts
from strata.bench.windows_cuda import CHECKED_DEPTH, Decode
from strata.engine.device.cuda import CudaDevice
from strata.engine.experts.balance import PARTS, Balance
from strata.engine.experts.helpers import LOOK_EVERY, HostExperts
from strata.engine.experts.plan import Asked
from strata.engine.model.resident import Resident
from strata.engine.pack import open_pack

SHARES = (256, 232, 206, 180, 155, 129, 104, 78)
"""Of ten missing experts, the card reads ten to three."""
CHECKED = 24
WARM = 8


class Case:
    """A sequence, and who computes beside the card."""

    def __init__(self, resident: Resident, helpers: HostExperts, steps: int) -> None:
        self.decode, self.resident, self.helpers, self.steps = Decode(resident, 1, 0), resident, helpers, steps

    def measure(self, name: str, share: float, steps: int = 0) -> list[Record]:
        """Windows with a share."""
        self.helpers.set_share(share)
        self.decode.run(WARM)
        before, steps = self.helpers.waits(), steps or self.steps
        spent = self.decode.run(steps)
        requests, waits = (new - old for new, old in zip(self.helpers.waits(), before, strict=True))
        found = [Record.of(name, "tok/s", [steps / spent.whole])]
        return [*found, Record.of(f"{name}: waits", "%", [100 * waits / requests])] if requests else found

    def correct(self, looks: int) -> float:
        """The share after so many corrections from half."""
        balance = Balance(PARTS // 2)
        self.helpers.set_share(0.5)
        before = self.helpers.waits()
        for _ in range(looks):
            self.decode.run(LOOK_EVERY)
            now = self.helpers.waits()
            self.helpers.set_share(balance.look(now[0] - before[0], now[1] - before[1]) / PARTS)
            before = now
        return self.helpers.share


def checked(resident: Resident, helpers: HostExperts) -> Check:
    """Whether the ids are the same with every share."""
    found = []
    for parts in SHARES:
        helpers.set_share(parts / PARTS)
        found.append(Decode(resident, 1, CHECKED_DEPTH).ids(CHECKED))
    return Check("windows with every share sample the same ids", all(ids == found[0] for ids in found))


def run(args: argparse.Namespace, console: Console) -> int:
    pack, most = open_pack(args.pack), max(args.threads)
    asked = Asked(args.expert_cache, prefill=512, pcie=None, threads=most)
    context = CHECKED_DEPTH + 64 + args.steps * (2 * len(SHARES) + 2 * len(args.threads)) + 16 * 64
    resident = Resident(pack, CudaDevice(), max_context=context, n_slots=1, experts=asked)
    helpers = None if resident.store is None else resident.store.helpers
    if helpers is None:
        console.print("all experts lie in VRAM; use a smaller --expert-cache")
        return 2
    start, records = helpers.share, []
    checks, case = [checked(resident, helpers)], Case(resident, helpers, args.steps)
    for parts in SHARES:
        name = f"{parts / PARTS:.2f} of the missing experts read by the card, {most} threads"
        records += case.measure(name, parts / PARTS)
    rates = {parts: records[i] for parts, i in zip(SHARES, _firsts(records), strict=True)}
    best = max(SHARES, key=lambda parts: rates[parts].median) / PARTS
    for n in args.threads:
        helpers.use(n)
        records += case.measure(f"{best:.2f}, {n} threads", best)
    helpers.use(most)
    records += case.measure(f"{start:.2f}, as measured at the start", start)
    share = case.correct(32)
    records += case.measure(f"{share:.2f}, corrected from 0.50 in {32 * LOOK_EVERY} windows", share)
    flags = {"expert_cache": args.expert_cache, "threads": args.threads, "steps": args.steps}
    report = Report(tool="tier_windows_cuda", records=records, checks=checks, flags=flags, pack=pack_facts(args.pack))
    return finish(marks.marked(report, args), args.json, console)


def _firsts(records: list[Record]) -> list[int]:
    """Where the rates stand among the records."""
    return [i for i, record in enumerate(records) if record.unit == "tok/s"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pack", type=Path, required=True)
    parser.add_argument("--expert-cache", type=int, default=1, help="experts in VRAM (1)")
    parser.add_argument("--threads", type=int, nargs="+", default=[31, 23, 15], help="of the processor (31 23 15)")
    parser.add_argument("--steps", type=int, default=96, help="windows of a case (96)")
    marks.add_arguments(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    return run(parser.parse_args(), Console())


if __name__ == "__main__":
    raise SystemExit(main())
