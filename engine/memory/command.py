"""`strata-engine --plan`: looks at headers and at the machine, and says what would lie where. Loads nothing.

Errors   Refused: no plan, a profile or a draft layer that cannot be read, no card to ask and no size given
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from strata.engine import environment
from strata.engine.device.arena import ALIGNMENT, GIB, MIB, padded
from strata.engine.device.base import Memory
from strata.engine.device.host import ram
from strata.engine.drafts import draft_pack
from strata.engine.experts.learned import Keeping
from strata.engine.flags import WINDOW_ROWS
from strata.engine.memory import show
from strata.engine.memory.advice import advise
from strata.engine.memory.figures import DoesNotFit, Figures, Switches
from strata.engine.memory.plan import plan_memory
from strata.engine.memory.profile import ProfileError, read_profile
from strata.engine.memory.sizes import draft_bytes, model_sizes
from strata.engine.memory.state import draft_slot_bytes
from strata.engine.model.tape import tape_bytes
from strata.engine.options import Options, Refused
from strata.engine.pack import Pack
from strata.engine.state.pages import pages_for
from strata.kernels.cuda.compile import DeviceError


def plan_text(pack: Pack, options: Options, environ: Mapping[str, str]) -> str:
    """What `--plan` prints."""
    figures, switched = gather(pack, options), switches(environ)
    try:
        plan = plan_memory(figures, options, switched)
    except DoesNotFit as error:
        raise Refused(str(error)) from None
    advised = advise(figures, options, switched, plan)
    return (show.as_json if options.json else show.table)(figures, options, plan, advised)


def switches(environ: Mapping[str, str]) -> Switches:
    """What the environment changes; a value that is no number of its range is as if it were not there."""
    pct = environment.number_of(environ, environment.LEND_PCT)
    return Switches(
        own=environment.is_on(environ.get(environment.OWN_AUTO, "") or "1"),
        lend_pct=None if pct is None else int(pct),
        headroom=_gib(environ, environment.RESIDENT_HEADROOM),
        forms=environment.card_forms(environ),
        arena_pin="auto" if environment.pins_auto(environ) else _gib(environ, environment.ARENA_PIN) or None,
        free=environment.number_of(environ, environment.CACHE_HEADROOM) or 0.0,
        ring=int(environment.number_of(environ, environment.RING) or 0),
        stream_min=int(environment.number_of(environ, environment.STREAM_MIN) or 0),
    )


def _gib(environ: Mapping[str, str], name: str) -> int | None:
    """Bytes of a number of GiB; None: it is none, or of no machine."""
    number = environment.number_of(environ, name)
    return None if number is None else int(number * GIB)


def gather(pack: Pack, options: Options) -> Figures:
    """The figures of a pack, the machine, and the files that the options name."""
    draft, draft_slot = _draft(pack, options)
    return Figures(
        spec=pack.spec,
        sizes=model_sizes(pack.spec, pack),
        types={name: tensor.type for name, tensor in pack.items()},
        vram=_vram(options),
        ram=_ram(options),
        draft=draft,
        draft_slot=draft_slot,
        draft_in_slots=options.batch_mtp,
        mtp=options.mtp is not None,
        tape=tape_bytes(pack.spec, WINDOW_ROWS, ALIGNMENT) if options.spec > 1 else 0,
        profile=profile_of(pack, options),
    )


def _draft(pack: Pack, options: Options) -> tuple[int, int]:
    """Bytes of the draft layer and of what it remembers of a sequence; 0 where none is loaded."""
    found = draft_pack(options, pack)
    if found is None:
        return 0, 0
    table = padded(pages_for(options.draft_context) * np.dtype(np.int32).itemsize)
    pages = draft_slot_bytes(pack.spec, found.spec, options.kv, options.draft_context)
    return draft_bytes(found), pages + table


def profile_of(pack: Pack, options: Options) -> tuple[tuple[int, int], ...] | None:
    """The pairs of `--expert-profile`, hottest first; None without one, or where `--expert-profile-save` makes it."""
    path = Path(options.expert_profile)
    if options.expert_profile == "none" or (_both(options) and not path.exists()):
        return None
    try:
        return read_profile(path, pack.spec.layers, pack.spec.experts).pairs
    except ProfileError as error:
        raise Refused(f"--expert-profile: {error}; name another file, or leave the option out") from None


def keeping_of(options: Options, former: tuple[tuple[int, int], ...] | None) -> Keeping | None:
    """Where `--expert-profile-save` keeps the order of experts, which was `former` at the start; None without one."""
    if options.expert_profile_save == "none":
        return None
    path = Path(options.expert_profile_save)
    if path.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
        raise Refused(f"--expert-profile-save: {path} cannot be written; name a file in a folder that can")
    return Keeping(path, options.expert_profile_save_every, former)


def _both(options: Options) -> bool:
    """Whether the profile is read from the file that it is written to."""
    saved = options.expert_profile_save
    return saved != "none" and Path(options.expert_profile).absolute() == Path(saved).absolute()


def _ram(options: Options) -> Memory:
    return Memory(options.ram_limit_mib * MIB, options.ram_limit_mib * MIB) if options.ram_limit_mib else ram()


def _vram(options: Options) -> Memory | None:
    """The card's memory: as the limit says, or what the card says."""
    if options.device != "cuda":
        return None
    if options.vram_limit_mib:
        return Memory(options.vram_limit_mib * MIB, options.vram_limit_mib * MIB)
    from strata.engine.device.driver import CupyDriver

    try:
        free, total = CupyDriver().memory()
    except DeviceError as error:
        raise Refused(f"--device cuda: {error}; or say how much memory a card has: --vram-limit-mib N") from None
    return Memory(total, free)
