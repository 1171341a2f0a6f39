"""What the options ask of drafts, and what they get: rules and log lines; the draft layer's file is opened."""

from __future__ import annotations

from dataclasses import replace

from strata.engine.draft.vocabulary import read_vocabulary
from strata.engine.options import Options, Refused
from strata.engine.pack import DraftPack, Pack, PackError, open_draft
from strata.engine.schedule.ports import DraftRules


def draft_pack(options: Options, pack: Pack) -> DraftPack | None:
    """The draft layer that was asked for; None where no window would have drafts. Raises Refused."""
    if options.mtp is None or options.spec < 2:
        return None
    try:
        draft = open_draft(pack, options.mtp or None)
        if options.draft_vocab == "none":
            return draft
        return replace(draft, names=read_vocabulary(options.draft_vocab, pack.spec.vocab))
    except (OSError, ValueError) as error:
        raise Refused(f"--draft-vocab: {error}; strata-bench draft-vocab makes such a file") from None
    except PackError as error:
        where = (
            "name a file of the draft layer: --mtp FILE" if not options.mtp else "name the draft layer of this model"
        )
        raise Refused(f"--mtp: {error}; {where}") from None


def slots_draft(options: Options, n_slots: int) -> str | None:
    """Why slots have no drafts, or None when they have."""
    if n_slots < 2:
        return "there are no slots"
    if options.mtp is None:
        return "there is no draft layer: add --mtp"
    return "a window has one row: add --spec 4" if options.spec < 2 else None


def draft_rules(options: Options, n_slots: int) -> tuple[DraftRules, list[str]]:
    """Drafts of an engine with so many slots; for the log, which they are and what of the options comes to nothing."""
    said = []
    if options.mtp is not None and options.spec < 2:
        said.append("--mtp: no window has drafts with --spec 1; ask for more rows: --spec 4")
    reason = slots_draft(options, n_slots)
    if options.batch_mtp and reason is not None:
        said.append(f"--batch-mtp is off: {reason}")
    if options.spec < 2:
        return DraftRules(), said
    slots = options.batch_mtp and reason is None
    where = f", one in each of {n_slots} slots" if slots else ""
    said.append(f"drafts: up to {options.mtp_max} of the draft layer and {options.lookup} of the text{where}")
    return DraftRules(options.spec, options.spec_min_p, options.suffix_draft, slots), said
