"""What a forward takes on hardware that is not here, from its data sheet (a roofline, Williams et al. 2009).

A forward over B sequences, each of m new tokens behind L of context, multiplies and moves at least

    FLOPs   2 P B m + 4 A B m (L + m)        P: parameters that meet a token, A: attention's width, all layers
    bytes   w P' + c B (L + m)               w P': bytes of the parameters read, c: bytes of K/V per token

and takes the longer of the two times, FLOPs at the device's peak and bytes at its bandwidth, of which kernels
reach a share. To that come the launches, and the exchange between devices that share the layers. Verifying
m tokens is nearly free as long as the bytes decide, that is up to B m of about (w / 2) peak / bandwidth.

`Device` and `Load` are plain numbers; `load_of` reads them off a model, on the meta device as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from configs.errors import ConfigError
from models.target import Target


@dataclass(frozen=True)
class Device:
    """One accelerator's data sheet."""

    flops: float  # per second, dense, bfloat16
    bandwidth: float  # bytes per second of its memory
    memory: float  # bytes
    link: float  # bytes per second to its neighbours, one way


DEVICES = {
    "a100": Device(312e12, 2.039e12, 80e9, 300e9),  # SXM, 80 GB
    "h100": Device(989e12, 3.35e12, 80e9, 450e9),  # SXM
    "h200": Device(989e12, 4.8e12, 141e9, 450e9),  # SXM
    "l40s": Device(362e12, 0.864e12, 48e9, 32e9),
    "rtx4090": Device(165e12, 1.008e12, 24e9, 32e9),
}


@dataclass(frozen=True)
class Reach:
    """What of a data sheet is reached, and what no data sheet names."""

    flops: float  # share of the peak
    bandwidth: float  # share
    launches: float  # seconds per layer and forward
    exchange: float  # seconds of an all-reduce's latency, two per layer
    host: float  # seconds per round outside all forwards


# Of well-kept engines: what they reach at best, and what is usual. Between them lie Llama-3.1-8B on an H100
# at 158 tokens/s, batch 1, and EAGLE-3's 1.81x there at batch 2 with chains of 3 (SGLang; Li et al. 2025).
BEST = Reach(flops=0.75, bandwidth=0.9, launches=2e-6, exchange=5e-6, host=1e-4)
USUAL = Reach(flops=0.4, bandwidth=0.6, launches=2e-5, exchange=2e-5, host=4e-3)


@dataclass(frozen=True)
class Load:
    """What one forward of a network reads and multiplies."""

    dense: float  # parameters that every token meets: all but embeddings and experts
    layers: int
    hidden: int  # width of what layers exchange
    attention: float = 0.0  # width of all layers' queries together
    cache: float = 0.0  # numbers of K/V that a token of context has in all layers
    embedding: float = 0.0  # parameters that are looked up only
    experts: float = 0.0  # parameters of all experts, of which a token meets `routed / routes`
    routes: int = 1
    routed: int = 1
    bytes: float = 2.0  # per parameter and number of K/V

    @property
    def weights(self) -> float:
        """Bytes of the parameters, without what is looked up only."""
        return self.bytes * (self.dense + self.experts)

    def seconds(
        self, device: Device, reach: Reach, tokens: int, batch: int = 1, context: int = 0, devices: int = 1
    ) -> float:
        """Of one forward: `tokens` of each of `batch` sequences behind `context`, layers split over
        `devices`."""
        met = batch * tokens
        share = self.routed / self.routes
        flops = 2 * (self.dense + share * self.experts) * met
        flops += 4 * self.attention * met * (context + tokens)
        # A route is read if any token takes it.
        read = self.dense + self.experts * (1 - (1 - share) ** met)
        moved = self.bytes * (read + self.cache * batch * (context + tokens))
        compute = flops / (devices * device.flops * reach.flops)
        memory = moved / (devices * device.bandwidth * reach.bandwidth)
        return max(compute, memory) + self.layers * (
            reach.launches + self.exchange(device, reach, met, devices)
        )

    def exchange(self, device: Device, reach: Reach, met: int, devices: int) -> float:
        """Seconds of a layer's two all-reduces."""
        if devices == 1:
            return 0.0
        moved = 2 * (devices - 1) / devices * met * self.hidden * self.bytes
        return 2 * (reach.exchange + moved / device.link)


def device_named(name: str) -> Device:
    if name not in DEVICES:
        raise ConfigError(f"No data sheet of '{name}' is here: use one of {', '.join(sorted(DEVICES))}.")
    return DEVICES[name]


def load_of(target: Target, bytes: float = 2.0) -> Load:
    """A target's load, from its parameters (which may be on the meta device) and its configuration."""
    config = target.config
    embedding = target.model.get_input_embeddings().weight
    head = target.head.weight
    sizes = {name: p.numel() for name, p in target.model.named_parameters() if p is not embedding}
    experts = float(sum(size for name, size in sizes.items() if ".experts." in name))
    tied = head.numel() if head is embedding else 0  # left out above, and read by the head
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    shared = getattr(config, "num_key_value_heads", None) or heads
    return Load(
        dense=sum(sizes.values()) - experts + tied,
        layers=target.num_layers,
        hidden=target.hidden_size,
        attention=float(target.num_layers * heads * width),
        cache=float(target.num_layers * 2 * shared * width),
        experts=experts,
        routes=first(config, "num_local_experts", "num_experts", "n_routed_experts"),
        routed=first(config, "num_experts_per_tok"),
        embedding=float(embedding.numel() - tied),
        bytes=bytes,
    )


def first(config: Any, *names: str) -> int:
    """The first of these numbers that a configuration has; 1 if it has none."""
    return next((int(value) for name in names if (value := getattr(config, name, None))), 1)
