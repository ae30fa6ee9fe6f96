"""What the types cannot say: values out of range, and combinations of values that cannot work.

Each rule yields whole sentences: what was set, why it cannot be, what to set instead.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from urllib.parse import urlsplit

from configs.errors import ConfigError
from configs.schema import (
    Config,
    Dtype,
    Features,
    Optimizer,
    Replies,
    Schedule,
    StopDrafting,
    Strategy,
    Tree,
    Verification,
)

COLDEST = 1e-5  # temperature above 0; below it logits would overflow

# Fields of a request for a reply that have settings of their own, or would ask for another kind of answer.
SENT = {"model", "messages", "max_tokens", "temperature", "top_p", "seed", "n", "stream"}


def check(config: Config) -> None:
    """Refuses, with a `ConfigError` that lists every problem, a configuration that cannot work."""
    rules = (
        *(_run, _data, _regenerate, _trainer, _decode, _eval, _predict, _profile, _ab, _plan, _validate),
        _logger,
    )
    if problems := [problem for rule in rules for problem in rule(config)]:
        raise ConfigError(" ".join(problems))


def _run(config: Config) -> Iterator[str]:
    if not re.fullmatch(r"[\w.-]+", config.experiment) or config.experiment in (".", ".."):
        yield f"experiment={config.experiment!r} names a folder: use only letters, digits, '_', '-' and '.'."
    if not re.fullmatch(r"[a-z]\w*", config.method.name):
        yield f"method.name={config.method.name!r} names models/<name>.py: use letters, digits and '_'."
    if config.seed < 0:
        yield f"seed={config.seed} cannot be negative: use 0 or more."
    yield from _at_least(1, config, "", "threads")
    if config.target.device == "cpu" and config.target.dtype is Dtype.float16:
        yield (
            "target.dtype=float16 with target.device=cpu: CPUs compute float16 slower than float32; "
            "use bfloat16, or float32 for exact comparisons."
        )
    if config.target.quantize is not None:
        yield from _quantize(config)
    if config.export.engines == []:
        yield "export.engines is empty, so nothing would be written: name one, as in export.engines=[vllm]."


def _quantize(config: Config) -> Iterator[str]:
    where = f"target.quantize={config.target.quantize.value}" if config.target.quantize else ""
    if config.target.gguf_file is not None:
        yield (
            f"{where} quantises while it reads safetensors, and target.gguf_file names a GGUF file: save "
            "that as safetensors first (models.target.write_target), or set target.quantize=null."
        )
    if config.trainer.target_parallel > 1:
        yield (
            f"{where} makes weights that trainer.target_parallel={config.trainer.target_parallel} cannot "
            "divide: set one of them alone."
        )
    if config.method.name == "medusa2":
        yield f"{where} freezes the target for good, and method=medusa2 trains it: set target.quantize=null."


def _data(config: Config) -> Iterator[str]:
    data = config.data
    yield from _at_least(
        1, data, "data.", "max_prompt_tokens", "max_length", "max_train_rows", "max_heldout_rows"
    )
    yield from _within("[0, 1]", data, "data.", "max_bad_fraction")
    yield from _within("[0, 1)", data, "data.", "heldout_fraction")
    if not data.folder:
        yield "data.folder is empty: name the folder that prepared data and caches are written to."
    if not data.sources:
        yield "data.sources is empty: name a file of traffic, as in data.sources=[{path: traffic.jsonl}]."
    if data.heldout_fraction == 0 and not data.heldout_sources:
        yield (
            "data.heldout_fraction=0 without data.heldout_sources leaves no prompts to measure on: "
            "set a fraction such as 0.05, or name held-out files."
        )
    for source in data.heldout_sources:
        if any((source.path, source.split) == (other.path, other.split) for other in data.sources):
            yield (
                f"'{source.path}' is in data.sources and in data.heldout_sources: all of its prompts "
                "would be held out and none trained on; name it in one of them."
            )
    if data.max_prompt_tokens >= data.max_length:
        yield (
            f"data.max_prompt_tokens={data.max_prompt_tokens} leaves no room for a reply in "
            f"data.max_length={data.max_length} (prompt and reply): lower the first or raise the second."
        )
    for source in [*data.sources, *data.heldout_sources]:
        yield from _at_least(1, source, f"'{source.path}': ", "max_rows")


def _regenerate(config: Config) -> Iterator[str]:
    regenerate, data = config.regenerate, config.data
    yield from _at_least(
        1, regenerate, "regenerate.", "max_new_tokens", "batch_size", "max_prompts", "concurrency"
    )
    yield from _sampling(regenerate.temperature, regenerate.top_p, "regenerate.")
    yield from _within("(0, inf)", regenerate, "regenerate.", "timeout", "patience")
    urls = [*([regenerate.server] if regenerate.server else []), *regenerate.servers]
    if data.replies is Replies.logged:
        if urls:
            yield (
                "regenerate.server is set, but data.replies=logged trains on the traffic's own replies, "
                "so the server would never be asked: set data.replies=target or remove the server."
            )
        return
    longest = data.max_prompt_tokens + regenerate.max_new_tokens
    if data.max_prompt_tokens < data.max_length < longest:
        yield (
            f"regenerate.max_new_tokens={regenerate.max_new_tokens} after a prompt of up to "
            f"data.max_prompt_tokens={data.max_prompt_tokens} exceeds data.max_length={data.max_length}, "
            f"so replies would be cut: set data.max_length={longest}, or lower one of the others."
        )
    for url in urls:
        if not is_address(url):
            yield (
                f"regenerate.server={url!r} is not a URL: write it with its scheme and a host, as in "
                "http://localhost:8000/v1."
            )
    if urls and not regenerate.server_model:
        yield "regenerate.server is set without regenerate.server_model: set the served name of the target."
    if not urls and (regenerate.server_model or regenerate.extra):
        what = "server_model" if regenerate.server_model else "extra"
        yield f"regenerate.{what} is set without regenerate.server: set its URL, or remove it."
    if regenerate.server and regenerate.servers:
        yield "regenerate.server and regenerate.servers are both set: name all of them in the second."
    if len({url.rstrip("/").removesuffix("/v1") for url in urls}) < len(urls):
        yield f"regenerate.servers={list(urls)} names a server twice: raise regenerate.concurrency instead."
    if said := sorted(set(regenerate.extra) & SENT):
        yield (
            f"regenerate.extra names {', '.join(said)}, which other settings decide: use "
            "regenerate.max_new_tokens, temperature, top_p and server_model, and seed."
        )


def _trainer(config: Config) -> Iterator[str]:
    trainer = config.trainer
    counts = (
        "epochs",
        "max_steps",
        "batch_tokens",
        "accumulation",
        "log_every",
        "save_every",
        "keep_checkpoints",
    )
    yield from _at_least(1, trainer, "trainer.", *counts, "eval_prompts", "eval_new_tokens", "patience")
    yield from _at_least(0, trainer, "trainer.", "eval_every", "weight_decay")
    yield from _within("(0, inf)", trainer, "trainer.", "lr", "clip_norm")
    yield from _within("[0, 1)", trainer, "trainer.", "warmup_ratio")
    yield from _within("[0, 1]", trainer, "trainer.", "final_lr_ratio")
    if trainer.muon_lr is not None:
        yield from _within("(0, inf)", trainer, "trainer.", "muon_lr")
        if trainer.optimizer is Optimizer.adamw:
            yield (
                f"trainer.muon_lr={trainer.muon_lr} is set, but trainer.optimizer=adamw has only trainer.lr: "
                "set trainer.optimizer=muon, or remove the rate."
            )
    if trainer.ema is not None and not 0 < trainer.ema < 1:
        yield (
            f"trainer.ema={trainer.ema} is the share of the average that a step keeps: use a number in "
            "(0, 1), as in 0.999; null switches it off."
        )
    if trainer.patience is not None and trainer.eval_every == 0:
        yield (
            f"trainer.patience={trainer.patience} counts held-out measurements, and trainer.eval_every=0 "
            "makes one only at the end: set trainer.eval_every, or trainer.patience=null."
        )
    if len(trainer.betas) != 2 or not all(0 <= beta < 1 for beta in trainer.betas):
        yield f"trainer.betas={list(trainer.betas)}: AdamW takes two numbers in [0, 1), as in [0.9, 0.95]."
    if trainer.schedule is Schedule.wsd:
        yield from _within("(0, 1]", trainer, "trainer.", "decay_ratio")
        if trainer.warmup_ratio + trainer.decay_ratio > 1:
            yield (
                f"trainer.warmup_ratio={trainer.warmup_ratio} and trainer.decay_ratio={trainer.decay_ratio} "
                "are shares of the same steps and add up to more than 1: lower one of them."
            )
    if trainer.autocast is Dtype.float16:
        yield (
            "trainer.autocast=float16 needs loss scaling, which training does not do, so small gradients "
            "would become 0: use bfloat16 or float32."
        )
    yield from _at_least(1, trainer, "trainer.", "target_parallel")
    yield from _strategy(config)
    yield from _target_parallel(config)
    if trainer.features_gb is not None:
        yield from _within("(0, inf)", trainer, "trainer.", "features_gb")
        if trainer.features is Features.online:
            yield (
                f"trainer.features_gb={trainer.features_gb} bounds features on the disk, and "
                "trainer.features=online keeps none there: set trainer.features=cached, or remove the bound."
            )


def _target_parallel(config: Config) -> Iterator[str]:
    trainer = config.trainer
    where = f"trainer.target_parallel={trainer.target_parallel}"
    if trainer.target_parallel <= 1:
        return
    if trainer.strategy is Strategy.none:
        yield (
            f"{where} divides the target over as many processes, and trainer.strategy=none uses one: choose "
            "how they share the draft, as in trainer=ddp."
        )
    if config.method.name == "medusa2":
        yield f"{where} leaves no process with a whole target, and method=medusa2 trains it: set it to 1."


def _strategy(config: Config) -> Iterator[str]:
    trainer, method = config.trainer, config.method
    where = f"trainer.strategy={trainer.strategy.value}"
    if trainer.strategy in (Strategy.zero2, Strategy.zero3) and trainer.optimizer is Optimizer.muon:
        yield (
            f"{where} cuts matrices into vectors, and trainer.optimizer=muon needs whole ones: set "
            "trainer.optimizer=adamw, or trainer.strategy=fsdp2."
        )
    if trainer.strategy not in (Strategy.fsdp2, Strategy.zero3):
        return
    if trainer.ema is not None:
        yield (
            f"{where} leaves no process with whole weights, which trainer.ema={trainer.ema} averages: set "
            "trainer.ema=null, or trainer.strategy=ddp."
        )
    if method.objective.get("on_policy"):
        yield (
            f"{where} leaves no process with whole weights, and method.objective.on_policy writes text with "
            "them: set it to 0, or trainer.strategy=ddp."
        )
    if method.name == "medusa2":
        yield f"{where} cuts a draft, and method=medusa2 trains the target too: set trainer.strategy=ddp."


def _decode(config: Config) -> Iterator[str]:
    decode = config.decode
    yield from _at_least(0, decode, "decode.", "draft_tokens", "top_k")
    yield from _at_least(1, decode, "decode.", "max_new_tokens", "batch_size", "tree_nodes", "tree_width")
    yield from _sampling(decode.temperature, decode.top_p, "decode.")
    yield from _within("[0, 1]", decode, "decode.", "min_p", "stop_threshold")
    yield from _within("(0, inf)", decode, "decode.", "repetition_penalty")
    if "" in decode.stop:
        yield "decode.stop contains an empty string, which would stop every reply at once: remove it."
    if 0 < decode.temperature < COLDEST:
        yield f"decode.temperature={decode.temperature}: set 0 (greedy), or at least {COLDEST:.5f}."
    if not decode.drafters:
        yield "decode.drafters is empty: name at least one, as in decode.drafters=[draft]."
    if decode.tree is Tree.static and decode.tree_file is None:
        yield (
            "decode.tree=static needs a shape: set decode.tree_file to a file that python -m eval.tree made, "
            "or set decode.tree to chain or dynamic."
        )
    if decode.stop_drafting is not StopDrafting.fixed and decode.tree is not Tree.chain:
        yield (
            f"decode.stop_drafting={decode.stop_drafting.value} says where a chain ends, and "
            f"decode.tree={decode.tree.value} makes trees, whose sizes are given: set decode.tree=chain, or "
            "decode.stop_drafting=fixed."
        )
    if decode.verification is Verification.block and decode.tree is not Tree.chain:
        yield (
            f"decode.verification=block judges a drawn chain as a whole, and decode.tree={decode.tree.value} "
            "makes trees, which go by rejection: set decode.tree=chain, or decode.verification=rejection."
        )


def _eval(config: Config) -> Iterator[str]:
    measure = config.eval
    counts = ("max_prompts", "repeats", "bootstrap", "tree_prompts", "tree_depth")
    yield from _at_least(1, measure, "eval.", *counts, "lossless_prompts", "lossless_replies")
    yield from _at_least(2, measure, "eval.", "tree_nodes")
    yield from _at_least(0, measure, "eval.", "warmup_prompts", "samples")
    yield from _within("(0, inf)", measure, "eval.", "max_load")
    yield from _within("(0, 1)", measure, "eval.", "confidence", "lossless_alpha")
    if not measure.lossless_temperature > 0:
        yield (
            f"eval.lossless_temperature={measure.lossless_temperature}: nothing is drawn at 0. Use 1.0, or "
            "what is served."
        )
    if measure.temperatures == []:
        yield "eval.temperatures is empty, so nothing would be measured: use eval.temperatures=[0.0]."
    for temperature in measure.temperatures or []:
        yield from _sampling(temperature, 1.0, "eval.")
    if measure.batch_sizes is not None and min(measure.batch_sizes, default=0) < 1:
        yield f"eval.batch_sizes={measure.batch_sizes}: name batch sizes, as in eval.batch_sizes=[1,4,8]."
    if measure.compare_generate and 0.0 not in (measure.temperatures or [config.decode.temperature]):
        yield (
            "eval.compare_generate compares greedy outputs token for token, and nothing is measured at 0.0: "
            "set eval.temperatures=[0.0], or switch the comparison off."
        )


def _predict(config: Config) -> Iterator[str]:
    predict = config.predict
    yield from _at_least(1, predict, "predict.", "devices", "draft_tokens", "context")
    if not predict.batches or min(predict.batches) < 1:
        yield f"predict.batches={predict.batches}: name batch sizes, as in predict.batches=[1,8]."
    if predict.acceptance is not None and not (
        predict.acceptance and all(0 <= one <= 1 for one in predict.acceptance)
    ):
        yield (
            f"predict.acceptance={predict.acceptance}: give shares in [0, 1] by position, as in "
            "predict.acceptance=[0.8,0.7]."
        )
    if predict.devices > 1 and predict.device is None:
        yield f"predict.devices={predict.devices} without predict.device: only data sheets can be split."


def _profile(config: Config) -> Iterator[str]:
    profile = config.profile
    for name, example in (("contexts", "[64,512]"), ("batch_sizes", "[1,4]")):
        values = getattr(profile, name)
        if not values or min(values) < 1:
            yield f"profile.{name}={values}: name one or more, each at least 1, as in {example}."
    yield from _at_least(4, profile, "profile.", "steps")
    if profile.bandwidth is not None:
        yield from _within("(0, inf)", profile, "profile.", "bandwidth")


def _ab(config: Config) -> Iterator[str]:
    ab = config.ab
    yield from _at_least(1, ab, "ab.", "concurrency", "block", "attempts")
    yield from _within("(0, inf)", ab, "ab.", "timeout")
    if ab.rate is not None:
        yield from _within("(0, inf)", ab, "ab.", "rate")
    elif ab.concurrency is None:
        yield "ab.concurrency and ab.rate are both null, so nothing would be sent: set one of them."
    for name, url in (("a", ab.a), ("b", ab.b)):
        if url and not url.startswith(("http://", "https://")):
            yield f"ab.{name}={url!r} is not a URL: write it with its scheme, as in http://localhost:8000/v1."


def _plan(config: Config) -> Iterator[str]:
    plan = config.plan
    yield from _at_least(1, plan, "plan.", "devices", "rows")
    yield from _at_least(2, plan, "plan.", "length")
    if plan.cost_per_hour is not None:
        yield from _within("[0, inf)", plan, "plan.", "cost_per_hour")
    if plan.length is not None and plan.length > config.data.max_length:
        yield (
            f"plan.length={plan.length} exceeds data.max_length={config.data.max_length}, at which rows are "
            "cut: lower it."
        )


def _validate(config: Config) -> Iterator[str]:
    validate = config.validate
    for name, example in (("draft_tokens", "[1,2,4]"), ("batch_sizes", "[1,4]"), ("drafts", "[latest]")):
        values = getattr(validate, name)
        if not values or (name != "drafts" and min(values) < 1):
            yield f"validate.{name}={values}: name one or more, as in validate.{name}={example}."
    if min(validate.tree_nodes, default=1) < 1:
        yield f"validate.tree_nodes={validate.tree_nodes}: each must be at least 1; [] leaves trees out."
    yield from _at_least(1, validate, "validate.", "prompts")


def _logger(config: Config) -> Iterator[str]:
    window = config.logger.profile
    if window and not (len(window) == 2 and 1 <= window[0] <= window[1]):
        yield (
            f"logger.profile={list(window)} is no window: name its first and last step, as in "
            "logger.profile=[20,22], or [] for none."
        )


def _sampling(temperature: float, top_p: float, prefix: str) -> Iterator[str]:
    if not 0 <= temperature < math.inf:
        yield f"{prefix}temperature={temperature}: use 0 for greedy decoding, or a positive number."
    if not 0 < top_p <= 1:
        yield f"{prefix}top_p={top_p} is a share of probability: use a number in (0, 1]; 1 switches it off."


def _at_least(least: int, part: object, prefix: str, *names: str) -> Iterator[str]:
    for name in names:
        value = getattr(part, name)
        if value is not None and not value >= least:
            yield f"{prefix}{name}={value}: must be at least {least}."


def _within(interval: str, part: object, prefix: str, *names: str) -> Iterator[str]:
    """`interval` as it is written, round brackets for an end that does not belong to it: "(0, 1]"."""
    low, high = (float(end) for end in interval[1:-1].split(","))
    for name in names:
        value = getattr(part, name)
        above = value >= low if interval[0] == "[" else value > low
        below = value <= high if interval[-1] == "]" else value < high
        if not (above and below):
            yield f"{prefix}{name}={value}: must be in {interval}."


def is_address(url: str) -> bool:
    """Whether it has a scheme, a host, and a port that there is, if any."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
