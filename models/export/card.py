"""The model card of an exported folder: what the draft is, what it was trained on, what it is worth, and the
command that serves it. Every figure stands with its conditions, and what is not known is said.

README.md is the card behind the front matter that the Hugging Face hub reads; MODEL_CARD.md is the card.
Sources: the native checkpoint's config.json, the run's config.yaml and measure/measure.json, and what
`data.prepare` wrote into the data folder.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.file_download import try_to_load_from_cache
from omegaconf import OmegaConf

from configs.schema import Config
from models.checkpoint import draft_hash, read_config
from models.export.layout import Layout
from models.provenance import provenance
from models.target import Target

TITLES = {
    "eagle1": "EAGLE",
    "eagle3": "EAGLE-3",
    "peagle": "P-EAGLE",
    "dflash": "DFlash",
    "medusa": "Medusa",
    "medusa2": "Medusa-2",
    "mlp_speculator": "MLP speculator",
    "small": "Small language model",
}
ENGINES = {
    "vllm": "vLLM",
    "speculators": "vLLM (speculators format)",
    "sglang": "SGLang",
    "tensorrt_llm": "TensorRT-LLM",
    "llama_cpp": "llama.cpp",
    "openvino": "OpenVINO GenAI",
    "transformers": "transformers",
    "medusa": "the Medusa authors' code",
    "portable": "vLLM, SGLang, llama.cpp and OpenVINO GenAI",
}
# A card's own licence entries; "other" needs the two that follow.
LICENCE = ("license", "license_name", "license_link")


@dataclass(frozen=True)
class Facts:
    """What all cards of one draft say."""

    draft: dict[str, Any]  # the native checkpoint's config.json
    target: Target
    parameters: int  # trained ones
    licence: dict[str, str]  # of the target, as front matter; empty: not known
    sources: list[dict[str, Any]]  # prepare.json's: path, rows; config.yaml's have no rows
    counts: dict[str, dict[str, int]]  # prompts by split and category
    replies: str  # whose they are that were trained on
    confidence: float | None  # of the intervals that training measured
    measure: dict[str, Any] | None  # measure.json of this draft
    made: dict[str, Any]  # provenance of the export

    @property
    def training(self) -> dict[str, Any]:
        return self.draft.get("training") or {}

    @property
    def method(self) -> str:
        """Of the run: a draft of Medusa-2 is a Medusa network."""
        return self.training.get("method", {}).get("name", self.draft["method"])


def facts(config: Config, source: Path, target: Target, draft: Any) -> Facts:
    """Collects what is on the disk around the native draft in `source`."""
    native = read_config(source)
    trained = run_config(source)
    data = trained.get("data") or {"folder": config.data.folder, "sources": [], "replies": "target"}
    prepared = read_json(Path(data["folder"]) / "prepare.json") or {}
    if prepared.get("tokenizer") != native["target"]["tokenizer_fingerprint"]:
        prepared = {}  # another job's data has come to lie there
    return Facts(
        draft=native,
        target=target,
        parameters=sum(weight.numel() for weight in draft.parameters()),
        licence=licence(config, target),
        sources=prepared.get("sources") or list(data["sources"]),
        counts=prepared.get("counts", {}),
        replies=replies(data),
        confidence=(trained.get("eval") or {}).get("confidence"),
        measure=measured(source),
        made=provenance(),
    )


def texts(facts: Facts, engine: str, layout: Layout, commands: str) -> dict[str, str]:
    """The files by name."""
    card = "\n".join(lines(facts, engine, layout, commands)) + "\n"
    return {
        "README.md": f"---\n{front_matter(facts, engine).to_yaml()}\n---\n\n{card}",
        "MODEL_CARD.md": card,
    }


# ---- what is on the disk ----


def read_json(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def run_config(source: Path) -> dict[str, Any]:
    """The configuration that the run of this draft was made with; empty for a draft that lies elsewhere."""
    path = source.with_name("config.yaml")
    if source.name != "draft" or not path.is_file():
        return {}
    plain = OmegaConf.to_container(OmegaConf.load(path))
    return {str(name): part for name, part in plain.items()} if isinstance(plain, dict) else {}


def replies(data: dict[str, Any]) -> str:
    """Whose the replies are, and how many prompts have one: `data.regenerate` may have answered a part."""
    if data.get("replies") == "logged":
        return "the traffic's own"
    path = Path(data["folder"]) / "replies.jsonl"
    if not path.is_file():
        return "the target's own"
    with path.open(encoding="utf-8") as lines:
        return f"the target's own, to {sum(1 for line in lines if line.strip()):,} prompts"


def measured(source: Path) -> dict[str, Any] | None:
    """The measurement of exactly these weights, where `eval.measure` puts it by default."""
    name = "measure" if source.name == "draft" else f"{source.name}-measure"
    found = read_json(source.with_name(name) / "measure.json")
    return found if found and found["draft"]["sha256"] == draft_hash(source) else None


def licence(config: Config, target: Target) -> dict[str, str]:
    """The target's licence as its own card's front matter has it; `export.licence` goes before."""
    if config.export.licence:
        return {"license": config.export.licence}
    path: Any = Path(target.name) / "README.md"
    if not path.is_file():
        path = None if Path(target.name).exists() else cached_card(target)
    if path is None:
        return {}
    try:
        data = ModelCard.load(path, ignore_metadata_errors=True).data.to_dict()
    except (OSError, ValueError):
        return {}
    return {key: data[key] for key in LICENCE if isinstance(data.get(key), str)}


def cached_card(target: Target) -> Path | None:
    """The hub's card of the target if it was ever fetched; nothing is fetched for it."""
    try:
        found = try_to_load_from_cache(target.name, "README.md", revision=target.revision)
    except ValueError:  # no name of the hub's
        return None
    return Path(found) if isinstance(found, str) else None


# ---- the card ----


def front_matter(facts: Facts, engine: str) -> ModelCardData:
    hub = not Path(facts.target.name).exists()
    names = [str(source["path"]) for source in facts.sources]
    return ModelCardData(
        license=facts.licence.get("license"),
        license_name=facts.licence.get("license_name"),
        license_link=facts.licence.get("license_link"),
        base_model=facts.target.name if hub else None,
        datasets=[name for name in names if is_hub_name(name)] or None,
        library_name="transformers" if facts.method == "small" else None,
        pipeline_tag="text-generation",
        tags=["speculative-decoding", "leadout", facts.method, engine],
    )


def lines(facts: Facts, engine: str, layout: Layout, commands: str) -> Iterator[str]:
    target = facts.target
    title, served = TITLES.get(facts.method, facts.method), ENGINES.get(engine, engine)
    yield f"# {title} draft for {Path(target.name).name}, for {served}"
    yield ""
    yield (
        f"A draft for speculative decoding: it proposes tokens that the target verifies. It belongs to this "
        f"target and tokenizer alone, and is in the format of {served}. Made with Leadout."
    )
    for heading, part in (
        ("Serve", serving(layout, commands)),
        ("Target", describe_target(facts)),
        ("Network", network(facts, layout)),
        ("Data", data(facts)),
        ("Training", training(facts)),
        ("Measured", measurement(facts)),
        ("This folder", folder(facts)),
    ):
        yield from ("", f"## {heading}", "", *part)


def serving(layout: Layout, commands: str) -> Iterator[str]:
    yield from ("```sh", *commands.splitlines(), "```")
    yield ""
    yield "Paths are those of the machine that wrote this folder: put in where target and folder lie now."
    if layout.needs:
        yield ""
        yield f"Note: {layout.needs}."


def describe_target(facts: Facts) -> Iterator[str]:
    target, known = facts.target, facts.draft["target"]
    yield f"- name: {target.name}" + (f", revision {target.revision}" if target.revision else "")
    yield f"- fingerprint of its weights: `{known['fingerprint']}`"
    yield f"- fingerprint of its tokenizer: `{known['tokenizer_fingerprint']}`"
    named = facts.licence.get("license_name") or facts.licence.get("license")
    link = f" ({facts.licence['license_link']})" if "license_link" in facts.licence else ""
    yield f"- licence: {named}{link}" if named else "- licence: not known here; see the target's own card"
    if facts.method == "medusa2":
        yield "- it was trained together with this draft, and is not the model it comes from"


def network(facts: Facts, layout: Layout) -> Iterator[str]:
    written = sum(tensor.numel() for tensor in layout.tensors.values())
    size = sum(tensor.numel() * tensor.element_size() for tensor in layout.tensors.values())
    shape = facts.draft["network"]
    dtypes = sorted({str(t.dtype)[6:] for t in layout.tensors.values() if t.is_floating_point()})
    yield f"- method: {facts.method}"
    yield (
        f"- parameters: {facts.parameters:,}; written: {written:,} in {', '.join(dtypes)}, "
        f"{size / 1e6:,.1f} MB"
    )
    covered = facts.training.get("draft_vocabulary_coverage")
    share = "" if covered is None else f", {covered:.2%} of the tokens trained on"
    yield f"- draft vocabulary: {shape['draft_vocab_size']:,} of {shape['vocab_size']:,} tokens{share}"
    settings = facts.training.get("method", {}).get("network", {})
    if settings:
        yield f"- settings: `{json.dumps(settings)}`"


def data(facts: Facts) -> Iterator[str]:
    if not facts.sources and not facts.counts:
        yield "Not known: the run's data folder is not there any more."
        return
    for source in facts.sources:
        rows = f": {source['rows']:,} rows" if "rows" in source else ""
        yield f"- {public(str(source['path']))}{rows}"
    yield f"- replies trained on: {facts.replies}"
    if facts.counts:
        splits = sorted(facts.counts, reverse=True)  # train, heldout
        yield ""
        yield f"| prompts | {' | '.join(splits)} |"
        yield f"|---|{'---:|' * len(splits)}"
        for category in sorted({name for counts in facts.counts.values() for name in counts}):
            yield row(category, [facts.counts[split].get(category, 0) for split in splits])
        yield row("all", [sum(facts.counts[split].values()) for split in splits])


def row(name: str, numbers: list[int]) -> str:
    return f"| {name} | {' | '.join(f'{number:,}' for number in numbers)} |"


def training(facts: Facts) -> Iterator[str]:
    made = facts.training
    if not made:
        yield "Not known."
        return
    for key, label in (("steps", "steps"), ("best_step", "step kept"), ("epochs", "epochs")):
        if key in made:
            yield f"- {label}: {made[key]:,}"
    if "tokens" in made:
        yield f"- tokens trained on, over all epochs: {made['tokens']:,}"
    if "wall_seconds" in made:
        yield f"- time: {made['wall_seconds'] / 60:,.1f} min"
    objective = made.get("method", {}).get("objective")
    if objective:
        yield f"- objective: `{json.dumps(objective)}`"
    yield from conditions(made.get("provenance"))


def measurement(facts: Facts) -> Iterator[str]:
    """Rows of measure.json over all prompts; without one, what training measured on the way."""
    if facts.measure is not None:
        yield from rows(facts.measure)
        return
    yield "Not measured with `eval.measure`: no speedup is claimed."
    held = facts.training.get("heldout")
    if held:
        # One prompt has no interval.
        known = facts.confidence is not None and held["mean_acceptance_length_ci"] is not None
        sure = f" at {facts.confidence:.0%} confidence" if known else ""
        yield ""
        yield (
            f"While training, Leadout's decoder accepted {shown(held['acceptance_rate'], '.1%')} of what was "
            f"drafted on {held['prompts']} held-out prompts ({held['rounds']:,} rounds, greedily, at most "
            f"{held['draft_tokens']} tokens drafted a round), making "
            f"{spread(held, 'mean_acceptance_length')} tokens a round{sure}."
        )


def rows(measure: dict[str, Any]) -> Iterator[str]:
    """One line for each temperature and batch size, then the conditions."""
    whole = [
        found
        for found in measure["rows"]
        if found["method"] != "plain" and found["category"] == found["context_bucket"] == "all"
    ]
    yield (
        "Held-out prompts, Leadout's own decoder; speedup is over plain decoding of the same prompts. What "
        "an engine gains depends on its own costs."
    )
    yield ""
    yield "| temperature | batch | prompts | tokens a round | accepted | by position | speedup | same text |"
    yield "|---:|---:|---:|---|---:|---|---|---|"
    for found in whole:
        same, count = found.get("identical_outputs"), found.get("identical_count")
        cells = [
            f"{found['temperature']:g}",
            str(found["batch_size"]),
            str(found["prompts"]),
            spread(found, "mean_acceptance_length"),
            shown(found["acceptance_rate"], ".1%"),
            " ".join(f"{share:.2f}" for share in found["acceptance_by_position"] or []) or "–",
            spread(found, "speedup"),
            "–" if same is None else f"{count} of {found['prompts']}" if count is not None else str(same),
        ]
        yield f"| {' | '.join(cells)} |"
    yield ""
    for setting in sorted({decoding(found) for found in whole}):
        yield f"- decoded: {setting}"
    yield f"- confidence of the intervals: {whole[0]['confidence']:.0%}" if whole else "- no rows"
    yield f"- measured: {measure['created']}" + (
        ", while other work used the machine" if measure.get("load", {}).get("busy") else ""
    )
    yield from conditions(measure)


def decoding(found: dict[str, Any]) -> str:
    drafters = " and ".join(found.get("drafters") or ["draft"])
    tree = "chain" if found.get("tree") in (None, "chain") else f"{found['tree']} tree"
    nodes = f" of {found['tree_nodes']} nodes" if found.get("tree") == "dynamic" else ""
    kept = "" if found["lossless"] else "; this rule is not lossless"
    return f"{drafters}, {tree}{nodes}, at most {found['draft_tokens']} deep, in {found['dtype']}{kept}"


def spread(found: dict[str, Any], key: str) -> str:
    value, ends = found[key], found[f"{key}_ci"]
    return "–" if value is None else f"{value:.2f}" + (f" {interval(ends)}" if ends else "")


def interval(ends: list[float]) -> str:
    return f"[{ends[0]:.2f}, {ends[1]:.2f}]"


def shown(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def conditions(where: dict[str, Any] | None) -> Iterator[str]:
    """Hardware, versions and commit, of a provenance or of measure.json."""
    if not where:
        yield "- hardware, versions and commit: not recorded"
        return
    machine = where["hardware"]
    gpus = ", ".join(gpu["name"] for gpu in machine.get("gpu") or [])
    threads = f"{machine['threads']} threads on {machine['cores']} cores"
    yield f"- hardware: {machine['cpu']}, {threads}" + (f"; {gpus}" if gpus else "; no GPU")
    versions = {name: version for name, version in where["versions"].items() if version}
    yield f"- versions: {', '.join(f'{name} {version}' for name, version in versions.items())}"
    yield f"- Leadout commit: {commit(where['git'])}"


def commit(git: dict[str, Any] | None) -> str:
    if git is None:
        return "not recorded"
    return git["commit"] + (" with local changes" if git["dirty"] else "")


def folder(facts: Facts) -> Iterator[str]:
    yield (
        "Read back by names and config alone before it got its name, and equal to the trained draft; no "
        "tensor is missing, and none goes unread."
    )
    yield ""
    yield from conditions(facts.made)


def public(path: str) -> str:
    """A source's name: a file's own, without the folders of the machine it lay on."""
    return path if is_hub_name(path) else Path(path).name


def is_hub_name(path: str) -> bool:
    """`owner/name` of a data set, as against a file."""
    plain = not path.startswith(("/", ".", "~")) and path.count("/") == 1 and not Path(path).exists()
    return plain and not path.endswith((".jsonl", ".json", ".gz", ".zst"))
