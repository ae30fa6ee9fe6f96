"""The typed shape of every configuration: one dataclass per group of `configs/`.

It imports no other room, so that every room may import it. Hydra composes the YAML files against these
classes: an unknown key or a wrong type fails before any model loads, and so does a combination that cannot
work (`rules.py`).
A method's own fields live with the method, in `models/<method>.py: NetworkConfig` and in
`train/objectives/<method>.py: ObjectiveConfig`, and are checked by `typed`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import Enum
from typing import Any, TypeVar

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from configs.errors import ConfigError

T = TypeVar("T")


class Dtype(Enum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Quantize(Enum):
    int8 = "int8"  # weights alone, a scale for each row of a matrix


class MaskTurns(Enum):
    all = "all"  # every assistant turn is trained on
    last = "last"  # only the last one: for templates that rewrite earlier turns


class Replies(Enum):
    target = "target"  # data.regenerate lets the target answer; drafts learn the target's own law
    logged = "logged"  # the traffic's own assistant turns are trained on


class Features(Enum):
    cached = "cached"  # computed once, written to disk, reused over the epochs
    online = "online"  # the target runs beside the draft


class Optimizer(Enum):
    adamw = "adamw"
    muon = "muon"  # for matrices between hidden states, AdamW for the rest (train/optimizers.py)


class Schedule(Enum):
    cosine = "cosine"
    wsd = "wsd"  # warmup, stable, linear decay over the last `decay_ratio` of the steps
    constant = "constant"


class Strategy(Enum):  # how training is shared by several processes (train/strategies.py)
    none = "none"  # one process
    ddp = "ddp"  # each has everything; gradients are averaged
    fsdp2 = "fsdp2"  # weights, gradients and optimiser states are cut over them
    zero2 = "zero2"  # DeepSpeed: gradients and optimiser states are cut
    zero3 = "zero3"  # DeepSpeed: weights too


class Proposal(Enum):
    sampled = "sampled"  # draw from the draft's warped law; accepted with min(1, p/q)
    greedy = "greedy"  # take the draft's argmax; accepted with p


class Tree(Enum):
    chain = "chain"  # one token after another
    dynamic = "dynamic"  # EAGLE-2: expand the likeliest nodes, keep the likeliest `tree_nodes`
    static = "static"  # the shape in `tree_file`, drawn without replacement or by rank


class Verification(Enum):
    rejection = "rejection"  # token by token: Leviathan et al. 2023, Sequoia 2024
    block = "block"  # a chain as a whole: Sun et al. 2024 (2403.10444); never accepts less
    typical = "typical"  # Medusa's; lossy, and said so wherever it is reported


class Drafting(Enum):
    draft = "draft"  # the trained draft, or a small language model
    lookup = "lookup"  # what followed the last tokens when they stood in the text before
    lookahead = "lookahead"  # n-grams of the target's own Jacobi trajectory


class StopDrafting(Enum):
    fixed = "fixed"  # always `draft_tokens`
    confidence = "confidence"  # once the draft's probability of its token is below `stop_threshold`
    joint = "joint"  # once the product of the predicted acceptances is below 1 - `stop_threshold` (SpecDec++)
    marginal = "marginal"  # while one more token is expected to pay, by measured costs


class Embedding(Enum):
    auto = "auto"  # the target's if the draft's is a copy of it; otherwise what models/imports can tell
    own = "own"  # the one in the draft's files
    target = "target"  # the target's, whatever the files hold


class WandbMode(Enum):
    disabled = "disabled"
    offline = "offline"
    online = "online"


@dataclass
class TargetConfig:
    name: str = MISSING  # hub name, or a folder
    revision: str | None = None  # hub revision; None is the default branch
    gguf_file: str | None = None  # load this GGUF file of `name`, dequantised
    dtype: Dtype = Dtype.bfloat16
    device: str = "auto"  # auto: cuda if there is one, else cpu
    attention: str = "sdpa"
    trust_remote_code: bool = False
    pack: bool = True  # on a CPU: linear weights also in its kernels' layout, faster for twice their memory
    quantize: Quantize | None = None  # linear layers, by torchao (models/quantization.py); None: as they are


@dataclass
class Source:
    path: str = MISSING  # a JSONL file, or a `datasets` name
    split: str = "train"  # for `datasets` names
    category: str | None = None  # for rows that carry none
    streaming: bool = False  # for `datasets` names: read rows as they come, without downloading all first
    max_rows: int | None = None  # read only the first ones


@dataclass
class DataConfig:
    folder: str = MISSING  # prepared prompts, replies, token and feature caches
    sources: list[Source] = field(default_factory=list)  # read and split by content hash
    heldout_sources: list[Source] = field(
        default_factory=list
    )  # never trained on; their prompts leave `sources`
    heldout_fraction: float = 0.05
    max_prompt_tokens: int = 1024  # longer prompts are dropped and counted
    max_length: int = 2048  # prompt and reply, in tokens; longer rows are cut at the end and counted
    max_train_rows: int | None = None
    max_heldout_rows: int | None = None
    replies: Replies = Replies.target
    mask_turns: MaskTurns = MaskTurns.all
    max_bad_fraction: float = 0.5  # more unreadable lines than this share stops the run


@dataclass
class RegenerateConfig:
    max_new_tokens: int = 512
    temperature: float = 0.0
    top_p: float = 1.0
    batch_size: int = 32
    max_prompts: int | None = None  # answer only the first ones
    server: str | None = None  # base URL of an OpenAI-compatible server; None: in process
    server_model: str | None = None  # model name to ask the server for
    concurrency: int = 16  # requests in flight against each server
    servers: list[str] = field(default_factory=list)  # base URLs of several that serve the same model
    timeout: float = 600.0  # seconds without a byte after which a request to a server has failed
    patience: float = 600.0  # seconds without an answer of any server that end the run
    extra: dict[str, Any] = field(default_factory=dict)  # further fields of each request to a server


@dataclass
class MethodConfig:
    name: str = MISSING  # models/<name>.py, train/objectives/<name>.py, decoding/drafters/<name>.py
    network: dict[str, Any] = field(default_factory=dict)
    objective: dict[str, Any] = field(default_factory=dict)


@dataclass
class TrainerConfig:
    epochs: int = 2
    max_steps: int | None = None  # optimiser steps; ends the run early
    batch_tokens: int = 8192  # padded tokens per micro-batch; a longer row is a batch of its own
    accumulation: int = 1  # micro-batches per optimiser step, of all processes together
    optimizer: Optimizer = Optimizer.adamw
    lr: float = 1e-4  # AdamW's; the schedule multiplies both rates
    muon_lr: float | None = None  # Muon's, whose updates are scaled to the size of AdamW's; None: lr
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])  # AdamW's
    weight_decay: float = 0.0  # of matrices only
    clip_norm: float = 0.5
    schedule: Schedule = Schedule.cosine
    warmup_ratio: float = 0.03
    decay_ratio: float = 0.2  # wsd only
    final_lr_ratio: float = 0.0
    ema: float | None = None  # decay of averaged weights, which are then measured and saved; None: no average
    autocast: Dtype = Dtype.bfloat16  # compute dtype; master weights and optimiser state stay float32
    features: Features = Features.cached
    log_every: int = 10
    save_every: int = 200  # steps
    keep_checkpoints: int = 2
    eval_every: int = 200  # steps; 0: only at the end
    eval_prompts: int = 16
    eval_new_tokens: int = 64
    patience: int | None = None  # held-out measurements without a new best that end the run; None: never
    resume: str = "auto"  # auto: go on with this configuration's unfinished run; never; or a run's folder
    strategy: Strategy = Strategy.none  # `accumulation` and `batch_tokens` mean the same in all of them
    target_parallel: int = 1  # processes that hold the target in parts and run it together (train/sharded.py)
    features_gb: float | None = None  # cached: most that stands on the disk at a time, in GB; None: all of it


@dataclass
class DecodeConfig:
    draft_tokens: int = 4  # K
    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # least share of the likeliest token's probability; 0: off
    repetition_penalty: float = 1.0  # 1: off
    proposal: Proposal = Proposal.sampled  # at temperature 0 both are the argmax
    drafters: list[Drafting] = field(
        default_factory=lambda: [Drafting.draft]
    )  # merged into one tree, in this order
    tree: Tree = Tree.chain
    tree_nodes: int = 16  # dynamic: drafted tokens of a tree
    tree_width: int = 4  # dynamic: children per node, and nodes expanded per level
    tree_file: str | None = None  # static: a shape, as eval.tree writes it
    tree_replacement: bool = False  # static: draw siblings with replacement (SpecInfer) instead of without
    verification: Verification = Verification.rejection
    stop_drafting: StopDrafting = StopDrafting.fixed
    stop_threshold: float = 0.4
    batch_size: int = 1  # sequences decoded together
    pad_trees: bool = False  # to the sizes that measured forwards say are fastest (float32 on some CPUs)
    govern: bool = False  # measure while decoding, and draft only where it pays
    compile: bool = (
        False  # forwards over trees at fixed shapes: CUDA graphs, on a CPU Inductor (minutes at first)
    )
    stop: list[str] = field(default_factory=list)


@dataclass
class EvalConfig:
    draft: str = (
        "latest"  # a run's folder, a draft's, its name on the hub, or latest: this experiment's newest
    )
    output: str | None = None  # None: measure/ in the draft's run
    max_prompts: int = 48  # taken evenly over the categories
    repeats: int = 1  # paired repeats per prompt
    warmup_prompts: int = 2
    temperatures: list[float] | None = None  # to measure at; None: decode.temperature alone
    confidence: float = 0.95
    bootstrap: int = 2000
    compare_generate: bool = (
        False  # also run transformers' generate on each prompt and compare token for token
    )
    max_load: float = 0.15  # share of the processors that other processes may use before we warn and record
    tree_prompts: int = 32  # eval.tree: training prompts on which acceptance by depth and rank is measured
    tree_nodes: int = 64  # eval.tree: the largest tree considered, its root included
    tree_depth: int = 6  # eval.tree: the deepest
    lossless_prompts: int = 32  # eval.lossless: decoded greedily, and drawn from
    lossless_replies: int = 4  # eval.lossless: drawn for each prompt, of decode.max_new_tokens at most
    lossless_temperature: float = 1.0  # eval.lossless: what they are drawn at, where decode.temperature is 0
    lossless_alpha: float = 1e-3  # eval.lossless: chance of an alarm for a draft that is lossless
    batch_sizes: list[int] | None = None  # eval.measure: to measure at; None: decode.batch_size alone
    recall_tokens: list[int] = field(default_factory=list)  # eval.measure: lengths of prompts to be made
    samples: int = 6  # eval.measure: replies whose text is kept for the report; 0: no text of the traffic


@dataclass
class PredictConfig:
    device: str | None = None  # a data sheet's name (models/roofline.py); None: this machine, measured
    devices: int = 1  # that share the target's layers; of a data sheet
    acceptance: list[float] | None = None  # conditional, by position; None: the draft's measure.json
    draft_tokens: int = 8  # longest chain considered
    batches: list[int] = field(default_factory=lambda: [1, 2, 4, 8])
    context: int = 256  # tokens behind which a round happens
    output: str | None = None  # None: beside measure.json, or in the experiment's folder where none is read


@dataclass
class ProfileConfig:
    contexts: list[int] = field(default_factory=lambda: [64, 512])  # tokens of prompt behind which rounds run
    batch_sizes: list[int] = field(default_factory=lambda: [1, 4])
    steps: int = 16  # rounds timed with nothing but a clock around them, and as many by part
    bandwidth: float | None = None  # of memory, in GB/s, as from a data sheet; None: measured here
    trace: bool = False  # also write trace.json, for Perfetto
    output: str | None = None  # None: beside measure.json, or in the experiment's folder without a draft


@dataclass
class AbConfig:
    a: str | None = None  # base URL of an OpenAI-compatible server, the one that ratios B / A compare with
    b: str | None = None  # of the other
    model: str | None = None  # name to ask both for; None: the first that each lists
    concurrency: int | None = 1  # requests under way in the closed loop; None: no closed loop
    rate: float | None = None  # requests per second of an open loop, Poisson arrivals; None: no open loop
    block: int | None = None  # prompts to one side before the other gets them; None: by the load (eval/ab.py)
    attempts: int = 1  # tries of a request; what is asked again is counted, and the wait is in its times
    timeout: float = 600.0  # seconds without a byte after which a request has failed
    output: str | None = None  # None: ab/ in the experiment's folder


@dataclass
class ExportConfig:
    engines: list[str] | None = None  # None: vllm and sglang, whichever of them serve the method
    draft: str = "latest"
    output: str | None = None  # None: export/ in the draft's run
    llama_cpp: str | None = None  # a llama.cpp checkout, to convert to GGUF with; None: print the command
    licence: str | None = None  # the target's, for the model card; None: what the target's own card says
    push: str | None = None  # also upload the folder to this repository of the hub, org/name


@dataclass
class ImportsConfig:
    draft: str | None = None  # models.imports: a published draft's folder, or its name on the hub
    output: str | None = None  # None: imports/ and the draft's name, below runs
    taps: list[int] | None = None  # HF hidden_states indices, for files that do not say, or say it wrongly
    norm_before_residual: bool | None = None  # EAGLE-3's, likewise
    embedding: Embedding = Embedding.auto


@dataclass
class PlanConfig:
    device: str | None = (
        None  # a data sheet's name (models/roofline.py); None: h100, or this machine for a CPU
    )
    devices: int = 1  # that the run has
    rows: int | None = None  # training rows; None: those prepared, else 100 000
    length: int | None = None  # their mean tokens; None: those prepared, else half of data.max_length
    cost_per_hour: float | None = None  # of one device
    output: str | None = None  # None: the experiment's folder


@dataclass
class ValidateConfig:
    drafts: list[str] = field(default_factory=lambda: ["latest"])  # each named as in eval.draft
    draft_tokens: list[int] = field(default_factory=lambda: [1, 2, 4, 6])  # chains of these lengths
    tree_nodes: list[int] = field(default_factory=lambda: [8, 16])  # static trees of so many drafted tokens
    lookup: bool = True  # prompt lookup too
    batch_sizes: list[int] = field(default_factory=lambda: [1, 2, 4])
    prompts: int = 12  # held-out ones, decoded in every setting
    output: str | None = None  # None: beside measure.json of the first draft


@dataclass
class LoggerConfig:
    wandb: WandbMode = WandbMode.disabled
    project: str = "leadout"
    profile: list[int] = field(default_factory=list)  # first and last step under torch's profiler; []: none


@dataclass
class Config:
    experiment: str = MISSING
    seed: int = 0
    threads: int | None = None  # torch threads; None: torch's default
    runs: str = "runs"
    target: TargetConfig = field(default_factory=TargetConfig)
    method: MethodConfig = field(default_factory=MethodConfig)
    data: DataConfig = field(default_factory=DataConfig)
    regenerate: RegenerateConfig = field(default_factory=RegenerateConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    predict: PredictConfig = field(default_factory=PredictConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    ab: AbConfig = field(default_factory=AbConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    imports: ImportsConfig = field(default_factory=ImportsConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    validate: ValidateConfig = field(default_factory=ValidateConfig)


def typed(cls: type[T], values: dict[str, Any], where: str) -> T:
    """`values` as an instance of the dataclass `cls`; an unknown key or a wrong type is a `ConfigError`.

    `where` is the dotted place of `values` in the configuration, for the message.
    """
    schema = OmegaConf.structured(cls)
    known = sorted(str(key) for key in schema)
    for key in values:
        if key not in known:
            raise ConfigError(
                f"{where}: unknown key '{key}'.{nearest(key, known)} Known keys: {', '.join(known)}."
            )
    try:
        made = OmegaConf.to_object(OmegaConf.merge(schema, OmegaConf.create(values)))
    except OmegaConfBaseException as error:
        place = f"{where}.{error.full_key}" if error.full_key else where
        raise ConfigError(f"{place}: {str(error).splitlines()[0].rstrip('.')}.") from None
    assert isinstance(made, cls)
    for name, value in vars(made).items():
        if isinstance(value, float) and math.isnan(value):
            raise ConfigError(f"{where}.{name}=nan is no number.")
    return made


def nearest(key: str, known: Iterable[str]) -> str:
    """The sentence " Did you mean ...?" with the dotted keys whose last part is closest to `key`'s, or ""."""
    parent, _, name = key.rpartition(".")
    by_name: dict[str, list[str]] = {}
    for other in known:
        by_name.setdefault(other.rpartition(".")[2], []).append(other)
    close = [other for match in get_close_matches(name, by_name, cutoff=0.6) for other in by_name[match]]
    siblings = [other for other in close if parent and other.startswith(f"{parent}.")]
    quoted = [f"'{other}'" for other in (siblings or close)[:3]]
    return f" Did you mean {' or '.join(quoted)}?" if quoted else ""
