"""`python -m eval.lossless`: does this pair still say what the target alone would say?

At temperature 0 every prompt is decoded plainly and speculatively: the outputs must be equal, or part where
the target's two best logits are as close as rounding moves them. At a temperature above it, replies are drawn
speculatively, and every token is held against the target's own law after the text before it
(eval/uniform.py). Plainly drawn replies go through the same tests: where they fail too, the target's law is
not the same from one forward to the next, and nothing can be said.

Ends with one line, and exits with 0 if nothing was found, 3 if something was, or if nothing can be said. Each
prompt is on the disk before the next begins; the same command goes on after the last one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from configs.compose import as_plain
from configs.entry import entry
from configs.errors import TrafficError
from configs.schema import Config, Verification
from data.tokens import Prompt, evenly, prompts, split_file
from decoding.law import Law
from decoding.sequence import Generation, Request
from eval.bench import Bench, dtype_name, first_difference, run_key, seed_of
from eval.measure import default_output
from eval.terminal import bar, wide_console
from eval.uniform import Result, Sample, examined, least_bias, place
from models.checkpoint import draft_hash, find_draft, load_draft
from models.files import append_line, ensure_writable, lines_under, read_lines, write_json
from models.provenance import provenance
from models.target import Target

SCHEMA = "leadout.lossless/1"
PARTIAL = "lossless.partial.jsonl"
POWER = 0.99
FOUND = 3  # exit status
# Logits of 16 bits have steps of eps; in float32 the sums before them round, not the logits themselves.
STEPS, SHARE = 4, 1e-5
SIDES = ("plain", "draft")


@entry()
def main(config: Config) -> None:
    if not lossless(config, wide_console())["lossless"]:
        sys.exit(FOUND)


def lossless(config: Config, console: Console) -> dict[str, Any]:
    """Decodes, judges, writes lossless.json beside the draft, prints the verdict; returns what was written.

    Raises `CheckpointError` (no draft, or another target's), `TrafficError` (no held-out prompts) and
    `StorageError`.
    """
    folder = find_draft(config.eval.draft, Path(config.runs), config.experiment)
    output = Path(config.eval.output) if config.eval.output else default_output(folder)
    ensure_writable(output)
    chosen = evenly(prompts(config, "heldout"), config.eval.lossless_prompts)
    if not chosen:
        raise TrafficError(
            f"There are no held-out prompts in {split_file(config, 'heldout')}. Raise data.heldout_fraction, "
            "and run data.prepare again."
        )
    where = provenance()
    target = Target.load(config.target)
    pair = Pair(config, target, Bench(config, target, load_draft(folder, target), draft_hash(folder)))
    key = hashlib.sha256(
        f"{run_key(config, where, folder, target, chosen)} {config.eval.lossless_replies} "
        f"{config.eval.lossless_temperature}".encode()
    ).hexdigest()
    lines = decoded(pair, chosen, output / PARTIAL, key, console)
    written = {
        "schema": SCHEMA,
        **{name: where[name] for name in ("git", "hardware", "versions")},
        "dtype": dtype_name(target),
        "draft": {"folder": str(folder), "sha256": draft_hash(folder)},
        "config": as_plain(config),
        **judged(lines, config),
    }
    write_json(output / "lossless.json", written)
    (output / PARTIAL).unlink()
    show(written, output / "lossless.json", console)
    return written


# ---- decoding ----


@dataclass(frozen=True)
class Pair:
    """The two decoders, and what is asked of them."""

    config: Config
    target: Target
    bench: Bench

    @property
    def temperature(self) -> float:
        return self.config.decode.temperature or self.config.eval.lossless_temperature

    def line(self, prompt: Prompt) -> dict[str, Any]:
        """What is found at one prompt."""
        greedy = self.bench.params(prompt, 0.0, 0)
        plain, drafted = (self.bench.decoders[side].generate(prompt.ids, greedy).tokens for side in SIDES)
        return {
            "prompt": prompt.id,
            "tokens": len(plain),
            "parting": self.parting(prompt, plain, drafted),
            **{side: self.drawn(prompt, side) for side in SIDES},
        }

    def parting(self, prompt: Prompt, plain: list[int], drafted: list[int]) -> dict[str, Any] | None:
        """Where greedy outputs part, with the gap that was there and the one that rounding explains."""
        index = first_difference(plain, drafted)
        if index is None:
            return None
        best, second = self.bench.two_best([*prompt.ids, *plain[:index]])
        step = max(STEPS * torch.finfo(self.target.dtype).eps, SHARE)
        return {"index": index, "gap": best - second, "explained": step * abs(best)}

    def drawn(self, prompt: Prompt, side: str) -> list[dict[str, Any]]:
        """The places of the tokens of several replies; plain ones have random numbers of their own."""
        requests = [
            Request(
                prompt.ids, dataclasses.replace(self.bench.params(prompt, self.temperature, 0), seed=seed)
            )
            for seed in (
                seed_of(self.config.seed, 2 * turn + SIDES.index(side) + 1, prompt)
                for turn in range(self.config.eval.lossless_replies)
            )
        ]
        made = self.bench.decoders[side].generate_all(requests)
        return [self.placed(prompt, *each) for each in zip(requests, made, strict=True)]

    @torch.inference_mode()
    def placed(self, prompt: Prompt, request: Request, generation: Generation) -> dict[str, Any]:
        """The tokens' places under the target's own law, from one forward over the whole text."""
        tokens = generation.tokens
        ids = torch.tensor([[*prompt.ids, *tokens[:-1]]], device=self.target.device)
        hidden = self.target.forward(ids, logits=False).last_hidden[0, len(prompt.ids) - 1 :]
        law = Law(request.params.warp, prompt.ids)
        chance = np.random.default_rng(request.params.seed)
        u, largest, impossible = [], [], 0
        for i, (row, token) in enumerate(zip(hidden, tokens, strict=True)):
            probs = law(self.target.lm_head(row), tokens[:i])
            u.append(place(probs, token, chance.random()))
            largest.append(float(probs.max()))
            impossible += probs[token] == 0
        return {
            "u": u,
            "rounds": numbers(generation),
            "largest": largest,
            "impossible": int(impossible),
        }


def numbers(generation: Generation) -> list[int]:
    """The number that each token has in its round, from 1; 0: the prefill's."""
    return [0, *(i + 1 for played in generation.rounds for i in range(played.emitted))]


def decoded(
    pair: Pair, chosen: Sequence[Prompt], partial: Path, key: str, console: Console
) -> list[dict[str, Any]]:
    """A line for each prompt, an interrupted run's included."""
    done = len(lines_under(partial, {"key": key}))
    if not console.is_terminal:
        console.print(f"{len(chosen) - done} prompts to decode.")
    with bar(console) as progress:
        task = progress.add_task("decoding", total=len(chosen), completed=done)
        for prompt in chosen[done:]:
            append_line(partial, pair.line(prompt))
            progress.advance(task)
    return read_lines(partial)[1:]


# ---- judging ----


def judged(lines: Sequence[dict[str, Any]], config: Config) -> dict[str, Any]:
    alpha = config.eval.lossless_alpha
    partings = [line["parting"] for line in lines if line["parting"] is not None]
    unexplained = [one for one in partings if one["gap"] > one["explained"]]
    by_round = config.decode.verification is not Verification.block
    results = {
        side: examined([sample(one) for line in lines for one in line[side]], by_round) for side in SIDES
    }
    level = alpha / max(len(results["draft"]), 1)  # Bonferroni: any of the tests may find something
    fails = {side: [one.name for one in found if one.p < level] for side, found in results.items()}
    largest = np.array([one for line in lines for reply in line["draft"] for one in reply["largest"]])
    found = {
        "greedy": {
            "prompts": len(lines),
            "tokens": sum(line["tokens"] for line in lines),
            "identical": len(lines) - len(partings),
            "largest_gap": max((one["gap"] for one in partings), default=None),
            "unexplained": len(unexplained),
        },
        "sampled": {
            "temperature": config.decode.temperature or config.eval.lossless_temperature,
            "replies": sum(len(line["draft"]) for line in lines),
            "alpha": alpha,
            "level": level,
            "finds_bias": least_bias(largest, level, POWER),
            **{
                side: {
                    "tokens": sum(len(one["u"]) for line in lines for one in line[side]),
                    "impossible": sum(one["impossible"] for line in lines for one in line[side]),
                    "tests": [dataclasses.asdict(one) for one in results[side]],
                    "fails": fails[side],
                }
                for side in SIDES
            },
        },
    }
    text, passed = verdict(len(unexplained), results, fails)
    return {"lossless": passed, "verdict": text, **found}


def sample(line: dict[str, Any]) -> Sample:
    return Sample(line["u"], line["rounds"])


def verdict(
    unexplained: int, results: dict[str, list[Result]], fails: dict[str, list[str]]
) -> tuple[str, bool]:
    """One line, and whether it is good news."""
    if unexplained:
        return f"NOT LOSSLESS: {unexplained} greedy outputs part where rounding does not explain it.", False
    if fails["draft"] and not fails["plain"]:
        return (
            f"NOT LOSSLESS: what was drawn fails {', '.join(fails['draft'])}; plain decoding passes.",
            False,
        )
    if fails["plain"]:
        return (
            f"UNDECIDED: plain decoding itself fails {', '.join(fails['plain'])}, so the target's law is not "
            "the same from one forward to the next. Try target.dtype=float32.",
            False,
        )
    if not results["draft"]:
        return (
            "UNDECIDED: too few tokens were drawn for a test. Raise eval.lossless_prompts or _replies.",
            False,
        )
    return "LOSSLESS as far as was looked: nothing was found.", True


def show(written: dict[str, Any], path: Path, console: Console) -> None:
    greedy, sampled = written["greedy"], written["sampled"]
    equal = (
        f"temperature 0, {written['dtype']}: {greedy['identical']} of {greedy['prompts']} outputs are equal"
    )
    parted = (
        ""
        if greedy["largest_gap"] is None
        else f"; where others part, the target's two best logits differ by at most "
        f"{greedy['largest_gap']:.3g}, which rounding does not explain in {greedy['unexplained']}"
    )
    console.print(f"{equal}{parted}.", markup=False)
    made = Table(
        title=f"temperature {sampled['temperature']:g}: p-values, at level {sampled['level']:.2g} each",
        title_justify="left",
    )
    for name in ("", "drawn", *(one["name"] for one in sampled["draft"]["tests"])):
        made.add_column(name, justify="right" if name else "left")
    for side in SIDES:
        found = sampled[side]
        made.add_row(side, str(found["tokens"]), *(f"{one['p']:.3g}" for one in found["tests"]))
    console.print(made)
    if sampled["finds_bias"] is not None:
        console.print(
            f"If {sampled['finds_bias']:.1%} of the tokens were the likeliest ones instead of drawn, this "
            f"would be found with probability {POWER:g}.",
            markup=False,
        )
    console.print(written["verdict"], style="bold", markup=False)
    console.print(str(path), markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
