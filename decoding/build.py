"""The decoder and the drafter that a configuration asks for."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from configs.errors import ConfigError
from configs.schema import DecodeConfig, Drafting, StopDrafting, Tree
from decoding.compiled import Compiled
from decoding.costs import Costs, measured_costs
from decoding.decoder import Decoder
from decoding.drafters import Drafter, foreign, small
from decoding.drafters.forced import ForcedDrafter
from decoding.drafters.lookahead import LookaheadDrafter
from decoding.drafters.lookup import LookupDrafter
from decoding.drafters.merged import MergedDrafter
from decoding.governor import Governor
from decoding.growth import ChainGrowth, DynamicGrowth, Growth, StaticGrowth
from decoding.shapes import TreeShape, read_shape
from decoding.stopping import rule_of
from models.packing import pack
from models.target import Target


def build_decoder(
    target: Target,
    draft: Any,
    decode: DecodeConfig,
    name: str = "draft",
    compiled: Compiled | None = None,
) -> Decoder:
    """A decoder as `decode` says.

    name: tells the draft from others where costs are measured and kept. compiled: the target's forwards,
    where another decoder has them already.
    """
    compiled = compiled or compiled_forward(target, decode)
    costs = None
    if decode.pad_trees or decode.stop_drafting is StopDrafting.marginal:
        fixed = DecodeConfig(drafters=decode.drafters, proposal=decode.proposal)
        drafter = build_drafter(target, draft, fixed)
        named = " ".join([name, *(kind.value for kind in decode.drafters)])
        costs = measured_costs(target, drafter, named, decode.batch_size, compiled=compiled)
    return Decoder(
        target,
        build_drafter(target, draft, decode, costs),
        decode.batch_size,
        governor=Governor() if decode.govern else None,
        padded=costs.target.padded if costs is not None and decode.pad_trees else None,
        compiled=compiled,
    )


def compiled_forward(target: Target, decode: DecodeConfig) -> Compiled | None:
    """The target's forwards as `decode.compile` asks: at one node, and at as many as a tree has at most."""
    if not decode.compile:
        return None
    return Compiled(target, (1, 1 + sum(most_drafted(kind, decode) for kind in decode.drafters)))


def most_drafted(kind: Drafting, decode: DecodeConfig) -> int:
    """How many tokens a drafter proposes at most."""
    match kind:
        case Drafting.draft:
            return largest_tree(decode)
        case Drafting.lookup:
            return decode.draft_tokens
        case Drafting.lookahead:
            return LookaheadDrafter().largest


def largest_tree(decode: DecodeConfig) -> int:
    """How many tokens a network proposes at most, by `decode.tree`."""
    match decode.tree:
        case Tree.chain:
            return decode.draft_tokens
        case Tree.dynamic:
            return decode.tree_nodes
        case Tree.static:
            return len(shape_of(decode.tree_file)) - 1


def build_drafter(target: Target, draft: Any, decode: DecodeConfig, costs: Costs | None = None) -> Drafter:
    """The drafters of `decode.drafters`, merged if there are several.

    draft: a network of models/, or a `Target`, a small language model; None if `decode.drafters` has no use
    for it. It is packed for a CPU. costs: for the marginal rule of `decode.stop_drafting`.
    """
    if not decode.drafters:
        raise ConfigError("decode.drafters is empty: name at least one, as in decode.drafters=[draft].")
    if draft is None and Drafting.draft in decode.drafters:
        raise ConfigError(
            "decode.drafters names the draft, and there is none. Give one, or set decode.drafters=[lookup]."
        )
    made: list[Drafter] = []
    for kind in decode.drafters:
        match kind:
            case Drafting.draft:
                made.append(network_drafter(target, draft, growth_of(decode, costs)))
            case Drafting.lookup:
                made.append(LookupDrafter(target.eos_ids))
            case Drafting.lookahead:
                made.append(LookaheadDrafter(target.eos_ids, seed=0))
    return ForcedDrafter(made[0] if len(made) == 1 else MergedDrafter(made))


def network_drafter(target: Target, draft: Any, growth: Growth) -> Drafter:
    """The drafter of a network, or of a small language model in the target's or in another vocabulary."""
    if isinstance(draft, Target):
        same = draft.tokenizer.get_vocab() == target.tokenizer.get_vocab()
        return (small if same else foreign).build(draft, growth, target.eos_ids, target)
    pack(draft)
    return import_module(f"decoding.drafters.{draft.method}").build(draft, growth, target.eos_ids)


def growth_of(decode: DecodeConfig, costs: Costs | None = None) -> Growth:
    """How a network's tree grows, by `decode.tree`."""
    match decode.tree:
        case Tree.chain:
            return ChainGrowth(decode.proposal, rule_of(decode, costs))
        case Tree.dynamic:
            return DynamicGrowth(decode.tree_nodes, decode.tree_width)
        case Tree.static:
            return StaticGrowth(shape_of(decode.tree_file), decode.proposal, decode.tree_replacement)


def shape_of(file: str | None) -> TreeShape:
    if file is None:
        raise ConfigError(
            "decode.tree=static needs a shape: set decode.tree_file to a file that python -m eval.tree made, "
            "or set decode.tree to chain or dynamic."
        )
    if not Path(file).is_file():
        raise ConfigError(
            f"decode.tree_file={file} does not exist. Give the path of a shape, as python -m eval.tree makes "
            "it, or set decode.tree to chain or dynamic."
        )
    return read_shape(Path(file))[0]
