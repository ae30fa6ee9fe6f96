"""Our EAGLE-3 against that of the package `speculators`: the same features, optimiser steps and tokens.

    python -m scripts.compare_speculators --peer-python PYTHON [--experiment NAME] [key=value ...]

PYTHON belongs to an environment of its own: pip install torch==2.13.0 (a CPU build), then speculators==0.9.0,
then pip uninstall torchvision torchaudio, which come with it and fit another build. What is compared is how
well and how fast each trains a draft, so everything before and after is one: rows, target features, draft
vocabulary, layer sizes and unrolled steps; our decoder, on held-out prompts that chose no checkpoint. Each
packs rows into batches, initialises and optimises in its own way. The peer runs with its own defaults, and
once more with each --peer-lr.

    ours     a finished run (--draft, or the newest that fits), else python -m train.distill
    data     the target's features as the peer reads them: HF hidden_states of the taps, and the last layer's
             output before the final norm, of every token
    peer     its own command line trains in PYTHON (speculators_driver.py), timed step by step
    draft    its checkpoint as a draft of ours, proved to give the peer's own logits
    result   tau of all drafts, with intervals over prompts; training tokens per second

What is done stays done, in artifacts/compare_speculators/; the same command goes on from there.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig

from configs.compose import compose
from configs.entry import paragraphs, quiet_libraries
from configs.errors import ConfigError, LeadoutError, TargetError, TrafficError
from configs.schema import Config
from data.tokens import Prompt, TokenRow, evenly, load_token_rows, prompts, split_file
from decoding.acceptance import (
    acceptance_by_position,
    bootstrap,
    bootstrap_ratio,
    mean_acceptance_length,
)
from decoding.build import build_decoder
from decoding.sequence import Generation, Params
from eval.machine import share_of_others
from models import load_draft, save_draft
from models.checkpoint import read_weights, refuse_misfit
from models.eagle3 import Eagle3, Eagle3Shape
from models.files import read_lines, sha256_file, write_folder, write_json, write_tensors
from models.layers import flat_rope
from models.provenance import provenance
from models.target import Target
from scripts.demo import trained
from train.batches import Batch, Plan, rounded
from train.distill import Method, feature_source, find_method
from train.features import Features, rows_digest
from train.objectives import Objective
from train.runs import contract, differences, read_contract
from train.store import contents, key
from train.unrolled import unroll

DRIVER = Path(__file__).with_name("speculators_driver.py")
FLAGS = (
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
)  # of the same names on both sides
PARITY = 1e-4  # the largest difference of float32 logits that rounding explains
CONFIDENCE, RESAMPLES = 0.95, 2000
OURS = "leadout"
PEER_CONDITIONS = ("total_seq_len", "attention", "threads", "load_average", "versions")  # of its training


class PeerError(LeadoutError):
    """The peer cannot be run, or gave something else than was asked for."""


@dataclass(frozen=True)
class Material:
    """What both sides learn from."""

    config: Config
    method: Method
    target: Target
    objective: Objective
    rows: Sequence[TokenRow]
    source: Features
    learnable: list[int]  # numbers of the rows that are trained on


@dataclass(frozen=True)
class Training:
    """How a draft was trained. `tokens` are the rows', prompts included; `trained_tokens` the replies'."""

    steps: int
    tokens: int
    trained_tokens: int
    seconds: float
    median_step: float

    def row(self) -> dict[str, Any]:
        return vars(self) | {
            "tokens_per_s": self.tokens / self.seconds,
            "trained_tokens_per_s": self.trained_tokens / self.seconds,
        }


def material(config: Config, console: Console) -> Material:
    """Target, rows, draft vocabulary and features, as `train.distill` gets them."""
    method = find_method(config.method)
    if method.name != "eagle3":
        raise ConfigError(f"method.name={method.name}: the peer is compared on eagle3.")
    target = Target.load(config.target)
    if target.device.type != "cpu":
        raise ConfigError("The peer is run on a CPU here. Add target.device=cpu, for our side too.")
    rows = load_token_rows(config, target, console)
    objective = method.build(target, rows, config.seed)
    source = feature_source(config, target, rows, objective, console)
    learnable = [n for n in source.usable() if any(rows[n].loss_mask[objective.first_label :])]
    return Material(config, method, target, objective, rows, source, learnable)


def our_run(config: Config, named: Path | None, command: Sequence[str]) -> Path:
    """The run's folder: the one named, the newest that was trained as `config` says, or a new one."""
    if named is not None:
        if not (named / "summary.json").is_file():
            raise ConfigError(f"--draft {named} is not the folder of a finished run: no summary.json.")
        return named
    if (run := trained(config)) is None:
        status = subprocess.run([sys.executable, "-m", "train.distill", *command], check=False).returncode
        if status:
            raise SystemExit(status)
        run = trained(config)
    assert run is not None
    return run


def our_training(run: Path, made: Material) -> tuple[Training, dict[str, Any]]:
    """How the run was trained, and its summary. Refuses a run on other data or with other settings."""
    wanted = contract(made.config, made.method.values(), rows_digest(made.rows), made.target.fingerprint())
    if changed := differences(read_contract(run), wanted):
        raise ConfigError(
            f"The run {run} was trained with other settings or on other rows: {', '.join(changed)} differ. "
            "Give the experiment and the overrides it was trained with."
        )
    summary = json.loads((run / "summary.json").read_text())
    steps = [line["seconds_per_step"] for line in read_lines(run / "train.jsonl") if "loss" in line]
    training = Training(
        steps=summary["steps"],
        tokens=tokens_of(made, summary["steps"]),
        trained_tokens=summary["tokens"],
        seconds=summary["wall_seconds"],
        median_step=statistics.median(steps),
    )
    return training, summary


def tokens_of(made: Material, steps: int) -> int:
    """How many tokens of rows, without padding, the loop's first `steps` optimiser steps go through."""
    trainer, sizes = made.config.trainer, [len(made.rows[n].input_ids) for n in made.learnable]
    plan = Plan(
        [rounded(size) for size in sizes],
        tokens=trainer.batch_tokens,
        accumulation=trainer.accumulation,
        epochs=trainer.epochs,
        seed=made.config.seed,
        max_steps=trainer.max_steps,
    )
    return sum(sizes[n] for step in range(steps) for batch in plan[step] for n in batch)


def save_data(made: Material, console: Console, folder: Path) -> None:
    """Writes what the peer trains on: a `datasets` table, one file of hidden states per row, its vocabulary.

    `hs_{i}.safetensors`: hidden_states [T, taps + 1, d] in the target's dtype, token_ids int64 [T]. The peer
    insists on rows to validate on, so the last row stands there once more.
    """
    import datasets  # here, because it takes a second

    chosen = [*made.learnable, made.learnable[-1]]
    rows = [made.rows[n] for n in chosen]
    columns = {
        "input_ids": [row.input_ids for row in rows],
        "loss_mask": [row.loss_mask for row in rows],
        "seq_len": [len(row.input_ids) for row in rows],
    }
    datasets.Dataset.from_dict(columns).with_format("torch").save_to_disk(folder)
    numbers = track(chosen, "the peer's data", console=console, disable=not console.is_terminal)
    for i, n in enumerate(numbers):
        write_tensors(states_file(folder, i), peer_row(made, n))
    draft = made.objective.draft
    if not draft.full_vocabulary:
        np.save(folder / "d2t.npy", draft.d2t.numpy())
        np.save(folder / "t2d.npy", draft.t2d.numpy())


def states_file(folder: Path, i: int) -> Path:
    return folder / "hidden_states" / f"hs_{i}.safetensors"


def peer_row(made: Material, number: int) -> dict[str, Tensor]:
    """One row's features, the taps read from where our training reads them."""
    tokens = torch.tensor(made.rows[number].input_ids)
    taps = made.source.batch([number]).taps[0, : len(tokens)]
    last = before_final_norm(made.target, tokens)
    return {
        "hidden_states": torch.cat([taps, last], dim=-1).unflatten(-1, (-1, made.target.hidden_size)),
        "token_ids": tokens,
    }


def before_final_norm(target: Target, tokens: Tensor) -> Tensor:
    """[T, d]: the last layer's output for `tokens` [T], which HF's hidden_states do not have."""
    if target.final_gain() is None:
        raise TargetError(f"Target {target.name} has no final norm by its usual name, which the peer needs.")
    caught: list[Tensor] = []
    hook = target.decoder.norm.register_forward_pre_hook(lambda module, inputs: caught.append(inputs[0]))
    try:
        target.forward(tokens[None], logits=False)
    finally:
        hook.remove()
    return caught[0][0]


def peer_job(
    made: Material, data: Path, folder: Path, training: Training, lr: float | None
) -> dict[str, Any]:
    """What the driver is to do: as many steps on as many tokens as ours, all else the peer's defaults."""
    name, network, draft = made.target.name, made.method.network, made.objective.draft
    layers = [*map(str, range(network.layers))]
    flags = [
        *("--verifier-name-or-path", str(Path(name).resolve()) if Path(name).is_dir() else name),
        *("--num-layers", str(network.layers)),
        *("--full-attention-indices", *layers),  # as decoded; rows are shorter than its window anyway
        *("--target-layer-ids", *map(str, draft.taps)),
        *("--ttt-steps", str(made.method.settings.steps)),
        *("--hidden-states-dtype", made.config.trainer.autocast.value),
        "--no-resume-from-checkpoint",  # it would go on from weights rounded to bfloat16
    ]
    if not draft.full_vocabulary:
        flags += ["--draft-vocab-size", str(len(draft.draft_ids))]
        flags += ["--d2t-path", str(data / "d2t.npy"), "--t2d-path", str(data / "t2d.npy")]
    if lr is not None:
        flags += ["--lr", str(lr)]
    return {
        "data": str(data),
        "save": str(folder / "checkpoints"),
        "result": str(folder / "trained.json"),
        "flags": flags,
        "steps": training.steps,
        "tokens": training.tokens,
        "seed": made.config.seed,
        "threads": torch.get_num_threads(),
    }


def train_peer(python: Path, job: dict[str, Any], console: Console) -> dict[str, Any]:
    """The peer's training by `job`: what the driver wrote of it, now or before."""
    result = Path(job["result"])
    if result.exists() and (done := json.loads(result.read_text()))["job"] == job:
        return done
    shutil.rmtree(result.parent, ignore_errors=True)
    console.print(f"the peer trains for {job['steps']} steps; watch {result.parent / 'train.log'}")
    drive(python, "train", result.parent, job)
    return json.loads(result.read_text())


def drive(python: Path, stage: str, folder: Path, job: dict[str, Any]) -> None:
    """Runs the driver in the peer's environment, with its output in `folder`/<stage>.log."""
    write_json(folder / f"{stage}.json", job)
    log = folder / f"{stage}.log"
    apart = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "PYTHONPATH": "", "TQDM_DISABLE": "1"}
    with open(log, "w") as out:
        command = [str(python), str(DRIVER), stage, str(folder / f"{stage}.json")]
        try:
            done = subprocess.run(
                command, stdout=out, stderr=out, cwd=folder, env=os.environ | apart, check=False
            )
        except OSError as error:
            raise PeerError(
                f"--peer-python {python} cannot be started: {error.strerror}. Name the interpreter of an "
                "environment in which speculators is installed."
            ) from error
    if done.returncode:
        last = log.read_text().strip().splitlines()[-1:] or ["no output"]
        raise PeerError(f"The peer stopped (status {done.returncode}): {last[0]} All it said is in {log}.")


def peer_training(done: Mapping[str, Any]) -> Training:
    return Training(
        steps=done["steps"],
        tokens=done["tokens"],
        trained_tokens=done["trained_tokens"],
        seconds=sum(done["seconds"]),
        median_step=statistics.median(done["seconds"]),
    )


def converted(checkpoint: Path, made: Material) -> Eagle3:
    """The peer's checkpoint as a draft of ours. Raises `PeerError` for other sizes or another vocabulary."""
    config = json.loads((checkpoint / "config.json").read_text())
    network = replace(made.method.network, **{flag: config[flag] for flag in FLAGS})
    shape = Eagle3Shape.resolve(network, made.target)
    if wrong := {name: pair for name, pair in sizes(shape, config).items() if pair[0] != pair[1]}:
        told = "; ".join(f"{name} is {theirs} and ours {ours}" for name, (ours, theirs) in wrong.items())
        raise PeerError(f"The peer trained a draft of other sizes in {checkpoint}: {told}.")
    draft = Eagle3(shape, made.target.embedding)
    state = read_weights(checkpoint / "model.safetensors")
    if not torch.equal(state.pop("embed_tokens.weight").to(made.target.dtype), made.target.embedding):
        raise PeerError(f"{checkpoint} has another token embedding than target {made.target.name}.")
    refuse_misfit(state, draft.state_dict(), checkpoint / "model.safetensors")
    draft.load_state_dict(state)
    if not torch.equal(draft.draft_ids, made.objective.draft.draft_ids):
        raise PeerError(f"{checkpoint} has another draft vocabulary than ours.")
    return draft


def sizes(shape: Eagle3Shape, config: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What our shape and the peer's config.json say of each size."""
    layer = LlamaConfig(**config["transformer_layer_config"])  # written as what differs from the defaults
    theirs = {
        "hidden_size": layer.hidden_size,
        "vocab_size": layer.vocab_size,
        "draft_vocab_size": config["draft_vocab_size"],
        "layers": layer.num_hidden_layers,
        "intermediate_size": layer.intermediate_size,
        "num_heads": layer.num_attention_heads,
        "num_kv_heads": layer.num_key_value_heads,
        "head_dim": layer.head_dim,
        "rope_parameters": flat_rope(layer),
        "rms_norm_eps": layer.rms_norm_eps,
        "taps": config["eagle_aux_hidden_state_layer_ids"],
    }
    return {name: (getattr(shape, name), value) for name, value in theirs.items()}


def peer_draft(
    python: Path, done: Mapping[str, Any], made: Material, folder: Path, console: Console
) -> tuple[Eagle3, float]:
    """The peer's draft, and by how much its logits differ from those that the peer itself computes."""
    proof = folder / "parity.json"
    if not proof.exists():
        draft = converted(Path(done["checkpoint"]), made)
        difference = parity(draft, batch_of_first(made), peer_logits(python, done, made, folder))
        if difference > PARITY:
            raise PeerError(
                f"The converted draft is not the peer's: from the same hidden states their float32 logits "
                f"differ by up to {difference:.2g}. See {folder}."
            )
        training = {key: value for key, value in done.items() if key != "seconds"}
        save_draft(folder / "draft", draft, made.target, training)
        write_json(proof, {"largest_difference": difference, "allowed": PARITY})
    difference = json.loads(proof.read_text())["largest_difference"]
    console.print(f"the converted draft gives the peer's logits to {difference:.1e}")
    return load_draft(folder / "draft", made.target), difference


def peer_logits(python: Path, done: Mapping[str, Any], made: Material, folder: Path) -> Tensor:
    """[steps, T - 1, Vd] float32: the peer's own logits for the first row, at each unrolled step."""
    job = {
        "checkpoint": done["checkpoint"],
        "row": str(states_file(Path(done["job"]["data"]), 0)),
        "steps": made.method.settings.steps,
        "threads": torch.get_num_threads(),
        "result": str(folder / "logits.safetensors"),
    }
    drive(python, "logits", folder, job)
    return load_file(job["result"])["logits"]


def batch_of_first(made: Material) -> Batch:
    return made.source.batch([made.learnable[0]])


@torch.no_grad()
def parity(draft: Eagle3, batch: Batch, theirs: Tensor) -> float:
    """The largest difference between our logits of a batch of one row and `theirs` [steps, T - 1, Vd],
    at the rows and steps that train."""
    unrolled = unroll(draft, batch, len(theirs))
    differences = []
    for step, their_logits in zip(unrolled.steps, theirs, strict=True):
        taught = step.mask[0]
        ours = draft.logits(step.states[0][taught])
        differences.append((ours - their_logits[unrolled.rows[0][taught]]).abs().max().item())
    return max(differences)


def held_out(config: Config, count: int) -> list[Prompt]:
    """At most `count` held-out prompts, without the first ones, which chose our checkpoint."""
    found = evenly(prompts(config, "heldout"), config.trainer.eval_prompts + count)
    if len(found) <= config.trainer.eval_prompts:
        raise TrafficError(
            f"All {len(found)} held-out prompts are among the {config.trainer.eval_prompts} that choose our "
            "checkpoint. Lower trainer.eval_prompts, or raise data.heldout_fraction and prepare again."
        )
    return found[config.trainer.eval_prompts :]


def decode(
    made: Material, drafts: Mapping[str, Eagle3], heldout: Sequence[Prompt], console: Console
) -> dict[str, list[Generation]]:
    """Every draft's generations of the prompts, each prompt by all drafts before the next."""
    decoders = {name: build_decoder(made.target, draft, made.config.decode) for name, draft in drafts.items()}
    params = Params.of(made.config.decode, made.config.seed)
    found: dict[str, list[Generation]] = {name: [] for name in drafts}
    for prompt in track(heldout, "decoding", console=console, disable=not console.is_terminal):
        for name, decoder in decoders.items():
            found[name].append(decoder.generate(prompt.ids, params))
    return found


def acceptance(generations: Sequence[Generation], ours: Sequence[Generation], seed: int) -> dict[str, Any]:
    """τ of a draft and how many times it ours is, with intervals by bootstrap over prompts."""
    rounds = [played for generation in generations for played in generation.rounds]
    emitted, played = counts(generations)
    sums = np.array([*counts(ours), emitted, played], dtype=float).T  # [prompts, 4]
    total = sums.sum(0)
    return {
        "mean_acceptance_length": mean_acceptance_length(rounds),
        "mean_acceptance_length_ci": bootstrap_ratio(emitted, played, CONFIDENCE, RESAMPLES, seed),
        "acceptance_by_position": acceptance_by_position(rounds),
        "rounds": len(rounds),
        "new_tokens": sum(len(generation.tokens) for generation in generations),
        "ours_over_it": float(ratio_of_lengths(total)),
        "ours_over_it_ci": bootstrap(ratio_of_lengths, sums, CONFIDENCE, RESAMPLES, seed),
        "outputs_as_ours": sum(a.tokens == b.tokens for a, b in zip(generations, ours, strict=True)),
    }


def counts(generations: Sequence[Generation]) -> tuple[list[int], list[int]]:
    """Tokens and rounds of each generation; tokens as τ counts them, the bonus token of every round too."""
    emitted = [sum(1 + played.accepted for played in generation.rounds) for generation in generations]
    return emitted, [len(generation.rounds) for generation in generations]


def ratio_of_lengths(sums: Any) -> Any:
    """τ of the first over τ of the second, of [..., 4] sums: tokens and rounds of each."""
    return (sums[..., 0] / sums[..., 1]) / (sums[..., 2] / sums[..., 3])


def table(rows: Mapping[str, Mapping[str, Any]]) -> Table:
    made = Table("trained by", "steps", "tokens", "tokens/s", "ours ÷ it", "τ (95 %)", "ours ÷ it (95 %)")
    speed = rows[OURS]["training"]["tokens_per_s"]
    for name, row in rows.items():
        training, peer = row["training"], name != OURS
        made.add_row(
            name,
            f"{training['steps']:,}",
            f"{training['tokens']:,}",
            f"{training['tokens_per_s']:,.0f}",
            f"{speed / training['tokens_per_s']:.2f}" if peer else "",
            figure(row, "mean_acceptance_length"),
            figure(row, "ours_over_it") if peer else "",
        )
    return made


def figure(row: Mapping[str, Any], name: str) -> str:
    """A value and its interval, where two prompts or more give one."""
    interval = row[f"{name}_ci"]
    return f"{row[name]:.3f}" + (" ({:.3f}-{:.3f})".format(*interval) if interval else "")


def compare(options: argparse.Namespace) -> None:
    width = None if sys.stdout.isatty() else 110  # in a file, room for the table
    console = Console(width=width, markup=False, highlight=False)
    command = [f"+experiment={options.experiment}", *options.overrides]
    config = compose(command)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    others = share_of_others()
    if others > config.eval.max_load:
        console.print(f"Other processes use {others:.0%} of this machine: the speeds will be off.")
    heldout = held_out(config, options.prompts)
    run = our_run(config, options.draft, command)
    made = material(config, console)
    training, summary = our_training(run, made)

    if (threads := summary["provenance"]["hardware"]["threads"]) != torch.get_num_threads():
        console.print(
            f"Our run had {threads} threads, the peer gets {torch.get_num_threads()}: the speeds are not "
            f"comparable. Set threads={threads}, or train again."
        )
    work = options.work.resolve() / key(contents(made.target, made.rows, made.objective.taps))
    data = work / f"data-{len(made.objective.draft.draft_ids)}"
    if not data.exists():
        write_folder(data, partial(save_data, made, console))

    drafts = {OURS: load_draft(run / "draft", made.target)}
    rows: dict[str, dict[str, Any]] = {
        OURS: {"training": training.row(), "run": str(run), "best_step": summary["best_step"]}
    }
    for lr in [None, *options.peer_lr]:
        name = "speculators" if lr is None else f"speculators, lr {lr:g}"
        folder = work / f"{training.steps}-steps-lr-{'default' if lr is None else f'{lr:g}'}"
        done = train_peer(options.peer_python, peer_job(made, data, folder, training, lr), console)
        drafts[name], difference = peer_draft(options.peer_python, done, made, folder, console)
        rows[name] = {"training": peer_training(done).row(), "largest_logit_difference": difference}
        rows[name] |= {word: done[word] for word in PEER_CONDITIONS}
        rows[name]["flags"] = done["job"]["flags"]

    found = decode(made, drafts, heldout, console)
    for name, generations in found.items():
        rows[name] |= acceptance(generations, found[OURS], config.seed)
    console.print(table(rows))
    written = {
        "conditions": provenance(),
        "others_before": others,
        "our_training_conditions": summary["provenance"],
        "settings": {word: str(value) for word, value in vars(options).items()},
        "dtype": config.target.dtype.value,
        "autocast": config.trainer.autocast.value,
        "temperature": config.decode.temperature,
        "draft_tokens": config.decode.draft_tokens,
        "max_new_tokens": config.decode.max_new_tokens,
        "prompts": len(heldout),
        "prompts_sha256": sha256_file(split_file(config, "heldout")),
        "confidence": CONFIDENCE,
        "rows": rows,
    }
    write_json(options.out, written)
    console.print(f"written: {options.out}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.compare_speculators", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--peer-python", type=Path, required=True, help="interpreter that has speculators")
    parser.add_argument("--experiment", default="smollm2_cpu")
    parser.add_argument("--draft", type=Path, help="a finished run of ours, trained with the same overrides")
    parser.add_argument(
        "--peer-lr", type=float, action="append", default=[], help="also with this rate; may be repeated"
    )
    parser.add_argument("--prompts", type=int, default=96, help="held-out prompts")
    parser.add_argument("--work", type=Path, default=Path("artifacts/compare_speculators"))
    parser.add_argument("--out", type=Path, default=Path("artifacts/compare_speculators.json"))
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the configuration")
    with paragraphs():
        quiet_libraries()
        compare(parser.parse_intermixed_args(arguments))


if __name__ == "__main__":
    main()
