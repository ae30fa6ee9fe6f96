"""Whether a rehearsed step holds what a real one does, and what is made of it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM

from configs.compose import compose
from configs.errors import ConfigError
from configs.schema import Config, Dtype, Strategy
from data.tokens import TokenRow
from models.roofline import Device, Reach
from models.target import Target
from tests.conftest import tiny_model
from tests.eval.samples import LLAMA_70B
from train import plan as planning
from train.distill import find_method
from train.features import Online
from train.memory import Phase, Rehearsal
from train.optimizers import optimizers
from train.plan import (
    ACTIVATIONS,
    CACHE,
    CAPTURE,
    FEATURES,
    FORWARD,
    GRADIENTS,
    LEARN,
    MEASURE,
    STATES,
    TARGET,
    UPDATE,
    WEIGHTS,
    Rehearsals,
    batch_of,
    cut,
    cut_target,
    plan,
    planned_method,
    rehearse,
    traffic_of,
)


class Ledger:
    """Bytes that the CPU's allocator holds for tensors, as torch's profiler saw them come and go."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        """tensors: what is held at the beginning."""
        held = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
        self.now = sum(held.values())
        self.peaks: dict[str, int] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            yield
        assert seen.profiler is not None
        events: Any = seen.profiler.kineto_results
        moves = sorted((e.start_ns(), e.nbytes()) for e in events.events() if e.name() == "[memory]")
        self.peaks[name] = self.now
        for _, size in moves:
            self.now += size
            self.peaks[name] = max(self.peaks[name], self.now)


def measured(config: Config, rows: list[TokenRow]) -> dict[str, int]:
    """The peak of each phase of a real optimiser step on random weights, in bytes."""
    shape = AutoConfig.from_pretrained(config.target.name)
    model = AutoModelForCausalLM.from_config(shape, dtype=getattr(torch, config.target.dtype.value))
    target = Target(model, SimpleNamespace(eos_token_id=None), "random")
    objective = find_method(config.method).build(target, rows, config.seed)
    made = optimizers(objective, config.trainer)
    trained = [p for p in objective.parameters() if p.requires_grad]
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    for one in made.values():
        one.step()
    objective.zero_grad()
    states = [v for one in made.values() for state in one.state.values() for v in state.values()]
    ledger = Ledger(
        [
            *model.parameters(),
            *model.buffers(),
            *objective.parameters(),
            *objective.buffers(),
            objective.supervision.teacher.weight,  # pyright: ignore
            *(state for state in states if isinstance(state, Tensor)),
        ]
    )
    objective.begin(0)
    with ledger.phase(FORWARD):
        batch = objective.batch(Online(target, rows, objective.taps), range(len(rows)))
    positions = objective.positions(batch)
    with ledger.phase(LEARN):
        with torch.autocast("cpu", torch.bfloat16, enabled=config.trainer.autocast is Dtype.bfloat16):
            loss = objective(batch, positions)
        loss.value.backward()
    with ledger.phase(UPDATE):
        torch.nn.utils.clip_grad_norm_(trained, config.trainer.clip_norm)
        for one in made.values():
            one.step()
        objective.zero_grad()
    return ledger.peaks


def both(folder: Path, method: str, tokens: int, *overrides: str) -> tuple[dict[str, int], dict[str, int]]:
    """(predicted, measured) peaks by phase of a step on one row of `tokens`, half of them a reply."""
    config = compose(
        [
            f"+experiment=smollm2_{'cpu' if method == 'eagle3' else method}",
            f"target.name={folder}",
            "trainer.features=online",
            "target.pack=false",
            f"trainer.batch_tokens={tokens}",
            *overrides,
        ]
    )
    rows = batch_of([(tokens, tokens // 2)], tokens)
    step = rehearse(config, planned_method(config), rows)
    return {name: phase.peak for name, phase in step.phases.items()}, measured(config, rows)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config.json of a target whose draft's memory is mostly activations."""
    path = tmp_path_factory.mktemp("target")
    tiny_model(vocab=2048, hidden=64, layers=8, heads=4, kv_heads=2).config.save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("method", "overrides"),
    [
        ("eagle3", ["method.network.draft_vocab_size=1024", "method.objective.steps=3"]),
        ("medusa", ["method.network.draft_vocab_size=1024"]),
        ("small", ["method.network.draft_vocab_size=1024", "trainer.optimizer=adamw"]),
        ("peagle", ["method.network.draft_vocab_size=1024"]),
    ],
)
def test_a_rehearsed_step_holds_what_a_real_one_does(folder: Path, method: str, overrides: list[str]) -> None:
    predicted, found = both(folder, method, 512, *overrides)
    for name in (FORWARD, LEARN, UPDATE):
        assert predicted[name] == pytest.approx(found[name], rel=0.1), name


# ---- the rehearsal ----


def test_memory_is_counted_when_it_comes_and_when_it_goes() -> None:
    scene = Rehearsal()
    with scene, scene.part("kept"):
        a = torch.zeros(1024)  # 4096 bytes
        with scene.part("activations"), scene.phase("one") as one:
            b = a + 1
            del b
            c = (a * 2)[:512]  # a view holds all of it
        assert one.held == {"kept": 4096, "activations": 4096}
        assert scene.held == {"kept": 4096, "activations": 4096}
        assert scene.claim([c], "claimed") == 4096
        del c
        assert +scene.held == {"kept": 4096}


def test_what_a_logsumexp_makes_and_drops_is_counted() -> None:
    with Rehearsal() as scene:
        logits = torch.zeros(4, 256)  # 4096 bytes, and as many within
        with scene.phase("") as phase:
            logits.logsumexp(-1)  # 16 bytes
    assert phase.peak == 4096 + 4096 + 16


def test_masks_have_values_and_weights_have_none() -> None:
    with Rehearsal():
        mask = torch.tensor([True, False, True])
        weight = torch.randn(3, 5)
        assert weight[mask].shape == (2, 5)
        assert int(mask.sum()) == 2
        assert bool(torch.isfinite(weight).all())  # nobody knows: yes


def test_work_is_flops_and_bytes_and_a_view_is_none() -> None:
    with Rehearsal() as scene:
        a, b = torch.zeros(64, 32, dtype=torch.bfloat16), torch.zeros(32, 16, dtype=torch.bfloat16)
        with scene.phase("") as phase:
            (a @ b).view(-1)
    # 2 x 64 x 32 x 16; reads 64 x 32 and 32 x 16 numbers, writes 64 x 16, two bytes each.
    assert phase.work == [(65_536.0, 2 * (2048 + 512 + 1024))]
    assert phase.flops == 65_536


def test_an_operation_takes_its_arithmetic_or_its_memory_whichever_is_longer() -> None:
    phase = Phase("", work=[(100.0, 1.0), (1.0, 40.0)])
    device = Device(flops=20, bandwidth=10, memory=0, link=0)
    reach = Reach(flops=0.5, bandwidth=0.8, launches=0, exchange=0, host=0)
    assert phase.seconds(device, reach) == 100 / 10 + 40 / 8


# ---- a step ----


def config_of(folder: Path, *overrides: str) -> Config:
    return compose(
        [
            "+experiment=smollm2_cpu",
            f"target.name={folder}",
            "target.pack=false",
            "method.network.draft_vocab_size=1024",
            "trainer.optimizer=adamw",
            "trainer.features=online",
            "trainer.batch_tokens=256",
            *overrides,
        ]
    )


def phases(config: Config) -> dict[str, dict[str, float]]:
    return rehearse(config, planned_method(config), batch_of([(128, 64)], 128)).peaks(config)


def test_adamw_keeps_two_numbers_for_each_weight_and_muon_one_of_matrices(folder: Path) -> None:
    held = phases(config_of(folder))[UPDATE]
    assert held[GRADIENTS] == held[WEIGHTS]
    steps = held[STATES] - 2 * held[WEIGHTS]  # and a step count for each tensor, 4 bytes
    assert 0 < steps < 100
    by_muon = phases(config_of(folder, "trainer.optimizer=muon"))[UPDATE][STATES]
    # AdamW goes on with the head [1024, 64] and the norms; everything else has one number.
    assert held[WEIGHTS] < by_muon < held[STATES]


def test_averaged_weights_are_there_if_asked_for(folder: Path) -> None:
    held = phases(config_of(folder, "trainer.ema=0.99"))[LEARN]
    assert held[planning.AVERAGE] == held[WEIGHTS]


def test_cached_features_are_captured_before_there_are_optimiser_states(folder: Path) -> None:
    held = phases(config_of(folder, "trainer.features=cached"))
    assert FORWARD not in held
    assert STATES not in held[CAPTURE]
    assert held[LEARN][FEATURES] == phases(config_of(folder))[LEARN][FEATURES]


def test_all_micro_batches_of_a_step_lie_in_memory_and_the_second_meets_gradients(folder: Path) -> None:
    one, two = phases(config_of(folder)), phases(config_of(folder, "trainer.accumulation=2"))
    assert two[LEARN][FEATURES] == 2 * one[LEARN][FEATURES]
    assert two[LEARN][GRADIENTS] == one[UPDATE][GRADIENTS]


def test_a_quantised_target_takes_a_byte_for_a_number_and_one_matrix_whole_while_it_is_multiplied(
    folder: Path,
) -> None:
    whole = phases(config_of(folder, "target.dtype=bfloat16"))
    int8 = phases(config_of(folder, "target.dtype=bfloat16", "target.quantize=int8"))
    # Eight layers, each with 36,864 numbers in 512 rows; the widest matrices are [128, 64].
    less = 8 * (2 * 36_864 - (36_864 + 5 * 512))
    assert {name: held[TARGET] - int8[name][TARGET] for name, held in whole.items()} == dict.fromkeys(
        whole, less
    )
    grown = {name: int8[name].get(ACTIVATIONS, 0) - held.get(ACTIVATIONS, 0) for name, held in whole.items()}
    assert grown == dict.fromkeys(whole, 0) | {FORWARD: 2 * 128 * 64, MEASURE: 2 * 128 * 64}


def test_a_bound_on_the_disk_has_features_captured_in_each_epoch(folder: Path, tmp_path: Path) -> None:
    asked = ["trainer.features=cached", "trainer.epochs=3", "plan.device=h100", "plan.rows=100"]
    asked += ["plan.length=100", f"plan.output={tmp_path}"]
    whole, bounded = (
        plan(config_of(folder, *asked, *more), Console(quiet=True))
        for more in ([], ["trainer.features_gb=0.0001"])
    )
    assert bounded["features_bytes"] == 100_000 < whole["features_bytes"]
    once, often = (one["time"]["seconds_of_capture"] for one in (whole, bounded))
    assert often == pytest.approx([3 * seconds for seconds in once])
    # Captured between steps, beside what the optimiser keeps.
    before, between = (phases(config_of(folder, *asked, *more)) for more in ([], ["trainer.features_gb=1"]))
    assert (before[CAPTURE].get(STATES, 0), between[CAPTURE][STATES]) == (0, before[UPDATE][STATES])


@pytest.mark.parametrize(
    "method", ["eagle1", "hydra", "medusa2", "mlp_speculator", "dflash", "small"]
)  # the others are compared with real steps above
def test_every_method_is_planned(folder: Path, method: str) -> None:
    network = ["method.network.draft_vocab_size=null"]
    network += ["method.network.taps=null"] if method == "dflash" else []
    config = compose([f"+experiment=smollm2_{method}", f"target.name={folder}", *network])
    step = rehearse(config, planned_method(config), batch_of([(128, 64)], 128))
    assert step.phases[LEARN].peak > step.phases[UPDATE].held[WEIGHTS]
    assert step.parameters > 0


def test_an_acceptance_head_is_not(folder: Path) -> None:
    config = compose(
        ["+experiment=smollm2_acceptance_head", f"target.name={folder}", "method.objective.draft=runs/x"]
    )
    with pytest.raises(ConfigError, match="Plan the draft's own run"):
        planned_method(config)


# ---- devices ----


# A draft of 88 bytes, 80 of them trained: a quarter of its gradients is 20, and a bucket has room for all.
@pytest.mark.parametrize(
    ("strategy", "phase", "several", "weights", "gradients"),
    [
        (Strategy.ddp, FORWARD, True, 88, 80),
        (Strategy.ddp, LEARN, False, 88, 80),  # not the 60 that were rehearsed
        (Strategy.ddp, LEARN, True, 88, 80),
        (Strategy.ddp, UPDATE, True, 88, 80),
        (Strategy.zero2, FORWARD, True, 88 + 20, 0),
        (Strategy.zero2, LEARN, False, 88 + 20, 80),
        (Strategy.zero2, LEARN, True, 88 + 20, 20 + 80),
        (Strategy.zero2, UPDATE, True, 88 + 20, 20 + 80 + 80),
        (Strategy.zero2, MEASURE, True, 88 + 20 + 88, 0),
        (Strategy.fsdp2, FORWARD, True, 22, 0),
        (Strategy.fsdp2, LEARN, False, 22 + 88 + 88, 60),
        (Strategy.fsdp2, LEARN, True, 22 + 88 + 88, 20 + 60),
        (Strategy.fsdp2, UPDATE, True, 22, 20 + 80 + 80),
        (Strategy.fsdp2, MEASURE, True, 22 + 88, 0),
        (Strategy.zero3, FORWARD, True, 22 + 20, 20 + 80),
        (Strategy.zero3, LEARN, True, 22 + 20 + 88, 20 + 80),
        (Strategy.zero3, UPDATE, False, 22 + 20, 20 + 80 + 80),
        (Strategy.zero3, MEASURE, True, 22 + 20 + 88, 20 + 80),
    ],
)
def test_what_is_cut_over_four_devices(
    strategy: Strategy, phase: str, several: bool, weights: int, gradients: int
) -> None:
    held = {WEIGHTS: 88, GRADIENTS: 60, STATES: 160}
    found = cut(held, phase, strategy, 4, trained=80, several=several)
    states = 160 if strategy is Strategy.ddp else 40
    assert found == {WEIGHTS: weights, GRADIENTS: gradients, STATES: states}


@pytest.mark.parametrize(
    ("strategy", "gradients"), [(Strategy.zero2, 3 + 2 + 2), (Strategy.zero3, 3 + 2 + 3)]
)
def test_a_bucket_has_room_for_two_gigabytes(strategy: Strategy, gradients: int) -> None:
    """Of gradients of 6 GB on two devices: half of them, a bucket, and a second one or the update's copy."""
    found = cut({}, UPDATE, strategy, 2, trained=6_000_000_000, several=True)
    assert found[GRADIENTS] == gradients * 1e9


@pytest.mark.parametrize(("n", "phase"), [(1, LEARN), (4, CAPTURE)])
def test_one_device_and_a_capture_before_training_cut_nothing(n: int, phase: str) -> None:
    assert cut({WEIGHTS: 88}, phase, Strategy.zero3, n, trained=80, several=True) == {WEIGHTS: 88}


def test_of_a_target_over_four_devices_a_quarter_and_what_stays_whole() -> None:
    assert cut_target({TARGET: 400, CACHE: 80}, 4, divided=300) == {TARGET: 100 + 75, CACHE: 20}


def test_gradients_of_several_devices_are_not_piled_up_beside_those_that_are_laid_out(folder: Path) -> None:
    two = ["trainer.accumulation=4", "plan.devices=2"]
    held = phases(config_of(folder, *two, "trainer.strategy=ddp"))
    trained = held[UPDATE][GRADIENTS]
    assert held[LEARN][GRADIENTS] == trained
    # Half of the first micro-batch's, and at the peak only some of the second's.
    cut_ones = phases(config_of(folder, *two, "trainer.strategy=fsdp2"))[LEARN][GRADIENTS]
    assert trained / 2 <= cut_ones < 1.5 * trained


# ---- rows and the command ----


def test_rows_are_supposed_where_none_are_prepared(folder: Path) -> None:
    config = config_of(folder, "plan.rows=3", "plan.length=100")
    found = traffic_of(config)
    assert (found.rows, found.tokens, found.mean) == ([(100, 50)] * 3, 300, (100, 50))
    assert found.longest[0] == (config.data.max_length, config.regenerate.max_new_tokens)


def test_as_many_prompts_are_supposed_as_will_be_answered(overrides: list[str]) -> None:
    config = compose([*overrides, "regenerate.max_prompts=5", "regenerate.max_new_tokens=9"])
    (Path(config.data.folder) / "replies.jsonl").unlink()
    assert traffic_of(config).rows == [(6 + 9, 9)] * 5


def test_prepared_rows_are_counted(overrides: list[str]) -> None:
    found = traffic_of(compose(overrides))
    assert found.rows == [(30, 24)] * 32  # tests/train/conftest.py: prompts of 6 tokens, replies of 24


def test_the_command_plans_a_prepared_run(overrides: list[str], tmp_path: Path) -> None:
    config = compose([*overrides, "plan.device=h100", "plan.cost_per_hour=2"])
    console = Console(record=True, width=110)
    plan(config, console)
    written = json.loads((tmp_path / "runs" / "smollm2_cpu" / "plan.json").read_text())
    assert written["fits"]
    assert written["steps"] == 16  # 32 rows of 64 padded tokens, 4 to a batch, two epochs
    # A row: 30 tokens of one tap of 32 float32 and an id; 24 taught of 32 float32, log-sum-exp and argmax.
    assert written["features_bytes"] == 32 * (30 * (4 * 32 + 4) + 24 * (4 * 32 + 8))
    best, usual = written["time"]["seconds"]
    assert written["time"]["cost"] == pytest.approx([2 * best / 3600, 2 * usual / 3600])
    said = console.export_text()
    assert "Fits" in said
    assert "Disk for features" in said


def test_this_machine_has_no_times(overrides: list[str]) -> None:
    console = Console(record=True, width=110)
    assert plan(compose(overrides), console)["time"] is None
    assert "plan.device=h100" in console.export_text()


def test_a_target_larger_than_a_device_is_said_to_be(tmp_path: Path) -> None:
    """Llama-3.3-70B's shape, with a draft and rows that take little beside it."""
    LLAMA_70B.save_pretrained(tmp_path)
    config = compose(
        [
            "+experiment=llama70b_medusa",
            f"target.name={tmp_path}",
            "trainer.target_parallel=1",
            "trainer.batch_tokens=512",
            "data.max_length=512",
            "data.max_prompt_tokens=256",
            "regenerate.max_new_tokens=128",
            "method.network.projection=shared",
        ]
    )
    rehearsals = Rehearsals(traffic_of(config))
    step = rehearsals.step(config)
    assert step.phases[LEARN].held[TARGET] == pytest.approx(141.1e9, rel=0.001)  # 70.55 billion in two bytes
    assert rehearsals.peak(config)[1] > 141e9
    config.trainer.target_parallel = 8
    # Embedding and head, 128,256 rows of 8192 numbers in two bytes each, stay whole.
    whole = 2 * 2.1e9
    assert step.peaks(config)[LEARN][TARGET] == pytest.approx((141.1e9 - whole) / 8 + whole, rel=0.001)


def test_what_would_make_it_fit_comes_in_order_of_gain(
    overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = compose([*overrides, "trainer.features=online"])
    peak = Rehearsals(traffic_of(config)).peak(config)[1]
    monkeypatch.setattr(planning, "capacity", lambda sheet: peak - 1)
    console = Console(record=True, width=110)
    written = plan(config, console)
    gains = [change["gain"] for change in written["changes"]]
    assert not written["fits"]
    assert gains == sorted(gains, reverse=True)
    assert written["together"] == [written["changes"][0]["setting"]]
    assert "Does not fit" in console.export_text()
