"""The acceptance head's objective: which token meets which state and which law, the labels, what is moved."""

from __future__ import annotations

from math import log
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from configs.compose import compose
from configs.errors import ConfigError
from configs.schema import DecodeConfig
from configs.schema import Proposal as Mode
from decoding.build import build_decoder
from decoding.decoder import Decoder
from decoding.drafters.acceptance_head import build as build_drafter
from decoding.growth import ChainGrowth
from decoding.reader import NetworkDrafter
from decoding.sequence import Params
from decoding.stopping import Joint
from decoding.warp import Warp
from models import load_draft
from models.acceptance_head import HeadedDraft, HeadedShape, NetworkConfig
from models.target import Target
from tests.conftest import tiny_draft, tiny_target
from tests.models.test_acceptance_head import eagle1, headed
from tests.train.conftest import counting_target, written_rows
from tests.train.pupils import padded, row
from tests.train.test_loop import FEW, train
from tests.train.test_loop import log as log_of
from train.batches import Batch, collate
from train.distill import find_method
from train.features import compute
from train.objectives import acceptance_head
from train.objectives.acceptance_head import (
    AcceptanceHeadObjective,
    ObjectiveConfig,
    drafted_paths,
    weighted_cross_entropy,
)

GREEDY = Warp(temperature=0.0)


class CountingDraft:
    """Expects token t + 1 after token t, and its state says what it read, where, and after which state."""

    draft_ids = torch.arange(16)

    def fuse(self, taps: Tensor) -> Tensor:
        return taps

    def __call__(self, hidden: Tensor, tokens: Tensor, positions: Tensor, attend: Any) -> Tensor:
        return torch.stack([tokens, positions, hidden[..., 0]], dim=-1).float()

    def logits(self, states: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(states[..., 0].long() + 1, 16).float()


def literal_batch(tokens: list[int], prompt: int, hidden: Tensor | None = None) -> Batch:
    """One sequence: taps of row j say 100 + j; target row r is packed at r + 1 - prompt."""
    length = len(tokens)
    taught = torch.arange(length - prompt)
    teacher = torch.full((1, length), -1)
    teacher[0, prompt - 1 : length - 1] = taught
    return Batch(
        tokens=torch.tensor([tokens]),
        mask=(torch.arange(length) >= prompt)[None],
        taps=100.0 + torch.arange(length)[None, :, None],
        teacher=teacher,
        hidden=taught[:, None].float() if hidden is None else hidden,
        lse=torch.zeros(length - prompt),
        argmax=torch.zeros(length - prompt, dtype=torch.int64),
    )


# position   0  1  2  3  4  5  6
TEXT = [3, 4, 5, 6, 9, 7, 8]  # the reply is 5 6 9 7 8; packed law n decides on t_{n+2}
NEVER, ALWAYS = 0.9, 0.1  # coins above and below target_share


def paths(coin: float, steps: int = 2) -> Any:
    numbers = torch.full((1, len(TEXT), steps, 2), coin, dtype=torch.float64)
    return drafted_paths(CountingDraft(), literal_batch(TEXT, prompt=2), GREEDY, 0.5, numbers, chunk=2)


def test_the_head_sees_the_state_whose_input_is_the_candidate() -> None:
    first, second = paths(NEVER)

    # Rows 0 to 4 hold the pending tokens 4 5 6 9 7 and draft one more of each.
    assert first.tokens.tolist() == [[5, 6, 7, 10, 8]]
    assert first.states[0].tolist() == [[5, 1, 4], [6, 2, 5], [7, 3, 6], [10, 4, 9], [8, 5, 7]]
    assert second.tokens.tolist() == [[6, 7, 8, 11, 9]]
    assert second.states[0].tolist() == [[6, 2, 5], [7, 3, 6], [8, 4, 7], [11, 5, 10], [9, 6, 8]]


def test_a_path_is_judged_up_to_its_first_token_that_is_not_the_text_s() -> None:
    first, second = paths(NEVER)

    # Drafted 5 6 7 10 8 for t_2 .. t_6 = 5 6 9 7 8, all behind text; row c - 1 decides on t_c.
    assert first.judged.tolist() == [[True] * 5]
    assert first.teacher.tolist() == [[0, 1, 2, 3, 4]]
    # Rows 0 and 1 drafted the text before; row 4 did too, and is at the end.
    assert second.judged.tolist() == [[True, True, False, False, False]]
    assert second.teacher[0, :2].tolist() == [1, 2]


def test_the_text_s_tokens_are_not_judged_and_lead_on() -> None:
    first, second = paths(ALWAYS)
    assert first.tokens.tolist() == [[5, 6, 9, 7, 8]]
    assert not first.judged.any() and not second.judged.any()

    numbers = torch.full((1, len(TEXT), 2, 2), NEVER, dtype=torch.float64)
    numbers[:, :, 0, 1] = ALWAYS  # the text's first, then the draft's own
    _, second = drafted_paths(CountingDraft(), literal_batch(TEXT, prompt=2), GREEDY, 0.5, numbers, chunk=9)
    assert second.tokens.tolist() == [[6, 7, 10, 8, 9]]
    assert second.judged.tolist() == [[True, True, True, True, False]]


def test_nothing_is_judged_in_the_prompt() -> None:
    numbers = torch.full((1, len(TEXT), 3, 2), NEVER, dtype=torch.float64)
    path = drafted_paths(CountingDraft(), literal_batch(TEXT, prompt=4), GREEDY, 0.5, numbers, chunk=9)

    # t_4 .. t_6 are the reply: rows 2, 3 and 4 draft 7 10 8 for them. Rows 0 and 1 begin in the prompt.
    assert [(step.judged.sum().item()) for step in path] == [3, 0, 0]
    assert path[0].tokens[path[0].judged].tolist() == [7, 10, 8]


P, Q = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.5, 0.3, 0.2])


class LawDraft(CountingDraft):
    draft_ids = torch.tensor([2, 4, 6])
    taps = (1,)

    def logits(self, states: Tensor) -> Tensor:
        return Q.log().expand(*states.shape[:-1], 3)


def objective_over(draft: Any, target: Any, **settings: Any) -> AcceptanceHeadObjective:
    config = ObjectiveConfig(draft="unused", **{"steps": 1, "target_share": 0.0, **settings})
    return AcceptanceHeadObjective(draft, target, config, seed=0, facts={})


def law_target() -> Any:
    """Whose hidden states are its logits."""
    return SimpleNamespace(lm_head=lambda hidden: hidden)


def test_labels_by_hand() -> None:
    law = torch.zeros(7).index_copy(0, torch.tensor([2, 4, 6]), P)  # of the whole vocabulary
    batch = literal_batch([0, 1, 2, 3, 4], prompt=2, hidden=law.log().expand(3, 7))
    numbers = torch.zeros(1, 5, 1, 2, dtype=torch.float64)
    numbers[0, :3, 0, 0] = torch.tensor([0.4, 0.6, 0.9])  # the law's edges are .5, .8 and 1
    objective = objective_over(LawDraft(), law_target(), temperature=1.0)
    path = drafted_paths(objective.draft, batch, objective.warp, 0.0, numbers, chunk=2)

    assert path[0].tokens.tolist() == [[2, 4, 6]]
    torch.testing.assert_close(path[0].chance, Q[None])
    # min(1, .7 / .5), .2 / .3, .1 / .2
    torch.testing.assert_close(objective.accepted(batch, path), torch.tensor([1.0, 2 / 3, 0.5]))


def test_greedy_labels_are_whether_both_agree() -> None:
    hidden = torch.zeros(3, 7)
    hidden[0, 2] = hidden[1, 6] = hidden[2, 2] = 1.0  # the draft always says 2
    batch = literal_batch([0, 1, 2, 3, 4], prompt=2, hidden=hidden)
    objective = objective_over(LawDraft(), law_target(), temperature=0.0)
    path = drafted_paths(
        objective.draft, batch, objective.warp, 0.0, torch.zeros(1, 5, 1, 2, dtype=torch.float64), chunk=9
    )
    assert objective.accepted(batch, path).tolist() == [1.0, 0.0, 1.0]


def test_the_loss_by_hand_and_where_it_is_least() -> None:
    # At odds of 6 and weight 6 both sides are at one half.
    loss = weighted_cross_entropy(torch.tensor([log(6.0)] * 3), torch.tensor([1.0, 0.0, 0.5]), 6.0)
    torch.testing.assert_close(loss, torch.tensor([1.0, 6.0, 3.5]) * log(2))

    # Three refusals and seven acceptances are best predicted by .7, and not by .7 / (.7 + 6 * .3).
    odds = torch.tensor(log(0.7 / 0.3), dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([1.0] * 7 + [0.0] * 3, dtype=torch.float64)
    weighted_cross_entropy(odds.expand(10), labels, 6.0).sum().backward()
    assert odds.grad is not None and abs(float(odds.grad)) < 1e-12


def batch_of(target: Target, rows: Any, objective: AcceptanceHeadObjective) -> Batch:
    return collate(rows, compute(target, rows, objective.taps), grain=1)


ROWS = [row([7, 8, 9, 10, 11, 12, 13, 14], prompt=3), row([20, 21, 22, 23, 24], prompt=2)]


@pytest.mark.parametrize("draft_of", [tiny_draft, eagle1])
def test_gradient_reaches_the_head_and_nothing_else(draft_of: Any) -> None:
    target = tiny_target()
    draft = headed(target, draft=draft_of(target))
    objective = objective_over(draft, target, steps=3, target_share=0.15)
    before = {name: value.clone() for name, value in objective.draft.draft.state_dict().items()}
    loss = objective(batch := batch_of(target, ROWS, objective), objective.positions(batch))
    loss.value.backward()

    trained = {name for name, p in objective.named_parameters() if p.grad is not None}
    assert trained == {name for name, p in objective.named_parameters() if p.requires_grad}
    assert all(name.startswith(("draft.blocks.", "draft.out.")) for name in trained)
    assert len(trained) == 6
    assert all(torch.equal(before[name], value) for name, value in objective.draft.draft.state_dict().items())
    # Replies of 5 and 3 tokens, each drafted from the row two before it.
    assert objective.positions(batch).tolist() == [8]
    counts = loss.metrics["acceptance"][1].tolist()
    assert 0 < counts[0] <= 8 and counts[0] >= counts[1] >= counts[2]


def test_loss_does_not_depend_on_padding_or_on_the_micro_batches() -> None:
    target = tiny_target()
    objective = objective_over(headed(target), target, steps=3, target_share=0.3)
    objective.begin(4)
    together = batch_of(target, ROWS, objective)
    positions = objective.positions(together)
    value = objective(together, positions).value

    torch.testing.assert_close(objective(padded(together, 5), positions).value, value)
    alone = [objective(batch_of(target, [one], objective), positions).value for one in ROWS]
    torch.testing.assert_close(alone[0] + alone[1], value)
    objective.begin(5)  # other draws
    assert not torch.equal(objective(together, positions).value, value)


@pytest.mark.parametrize("network", [{}, {"layers": 2}, {"norm_output": True}])
def test_the_head_is_asked_on_the_states_that_decoding_asks_it_on(
    monkeypatch: pytest.MonkeyPatch, network: dict[str, Any]
) -> None:
    target = counting_target()
    draft = headed(target, draft=tiny_draft(target, draft_vocab_size=None, **network)).requires_grad_(False)
    asked: list[list[float]] = []  # of each round
    propose, acceptance = NetworkDrafter.propose, HeadedDraft.acceptance

    def noting(self: NetworkDrafter, turns: Any) -> Any:
        asked.append([])
        return propose(self, turns)

    def answering(self: HeadedDraft, state: Tensor) -> float:
        asked[-1].append(acceptance(self, state))
        return asked[-1][-1]

    monkeypatch.setattr(NetworkDrafter, "propose", noting)
    monkeypatch.setattr(HeadedDraft, "acceptance", answering)
    prompt = [9, 16, 23, 30]
    drafter = build_drafter(draft, ChainGrowth(Mode.greedy, Joint(1.0)), frozenset())  # which never stops
    params = Params.of(DecodeConfig(draft_tokens=4, max_new_tokens=24), seed=0)
    done = Decoder(target, drafter).generate(prompt, params)

    objective = objective_over(draft, target, steps=3, temperature=0.0)
    batch = batch_of(target, [row(prompt + done.tokens, prompt=len(prompt))], objective)
    numbers = torch.zeros(*batch.tokens.shape, 3, 2, dtype=torch.float64)
    path = drafted_paths(draft.draft, batch, GREEDY, 0.0, numbers, chunk=64)
    predicted = torch.stack([draft.log_odds(step.states)[0].sigmoid() for step in path], dim=1)

    # A round whose pending token is at j + 1 drafts from row j; training's first row is 2, which drafts t_4.
    j = len(prompt) - 1
    for one, found in zip(asked, done.rounds, strict=True):
        assert len(one) == max(found.drafted - 1, 0)  # the last drafted token is not read
        assert one == pytest.approx(predicted[j - 2, : len(one)].tolist(), abs=1e-5)
        j += 1 + found.accepted
    assert sum(map(len, asked)) > 8


def workspace(overrides: list[str]) -> list[str]:
    kept = [o for o in overrides if not o.startswith(("+experiment", "method."))]
    runs = next(o.removeprefix("runs=") for o in overrides if o.startswith("runs="))
    return [
        "+experiment=smollm2_acceptance_head", *kept, f"method.objective.draft={runs}/smollm2_cpu",
        "trainer.eval_every=0", "trainer.eval_prompts=2", "trainer.epochs=6", "trainer.save_every=100",
    ]  # fmt: skip


def test_a_whole_run_learns_and_its_head_stops_chains(overrides: list[str]) -> None:
    eagle, _ = train(overrides, *FEW[2:], "trainer.epochs=1")
    run, printed = train(workspace(overrides), "trainer.log_every=8")
    assert f"frozen draft: {eagle / 'draft'}" in printed

    lines = [line for line in log_of(run) if "loss" in line]
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert lines[-1]["predicted"][0] == pytest.approx(lines[-1]["acceptance"][0], abs=0.15)

    target = Target.load(compose(overrides).target)
    draft, alone = load_draft(run / "draft", target), load_draft(eagle / "draft", target)
    for name, weight in alone.state_dict().items():
        assert torch.equal(draft.draft.state_dict()[name], weight)
    prompt = written_rows(target, count=1, seed=5)[0].input_ids[:6]

    def decoded(threshold: float) -> Any:
        decode = DecodeConfig(draft_tokens=6, max_new_tokens=24, stop_threshold=threshold)
        decode.stop_drafting = decode.stop_drafting.joint
        return build_decoder(target, draft, decode).generate(prompt, Params.of(decode, seed=0))

    eager, patient = decoded(0.05), decoded(1.0)
    assert eager.tokens == patient.tokens
    assert "joint" not in {r.stopped for r in patient.rounds}
    assert "joint" in {r.stopped for r in eager.rounds}
    assert sum(r.drafted for r in eager.rounds) < sum(r.drafted for r in patient.rounds)


def test_draws_follow_from_seed_and_step() -> None:
    target = tiny_target()
    objective = objective_over(headed(target), target, steps=2)
    batch = batch_of(target, ROWS, objective)
    numbers = acceptance_head.uniform_numbers(batch, 2, seed=1, step=7)
    assert torch.equal(numbers, acceptance_head.uniform_numbers(batch, 2, seed=1, step=7))
    assert not torch.equal(numbers, acceptance_head.uniform_numbers(batch, 2, seed=1, step=8))
    assert ((numbers >= 0) & (numbers < 1)).all()


def test_what_cannot_be_trained_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"method\.objective\.draft is not set"):
        ObjectiveConfig()
    with pytest.raises(ConfigError, match="target_share=1"):
        ObjectiveConfig(draft="x", target_share=1.0)
    with pytest.raises(ConfigError, match="steps=0"):
        ObjectiveConfig(draft="x", steps=0)
    medusa = SimpleNamespace(method="medusa")
    with pytest.raises(ConfigError, match="medusa cannot have an acceptance head"):
        HeadedShape.around(medusa, NetworkConfig())


def test_the_recipe_fits_the_method() -> None:
    config = compose(["+experiment=smollm2_acceptance_head"])
    method = find_method(config.method)
    assert method.settings.draft == "runs/smollm2_cpu"
    assert method.settings.temperature == config.decode.temperature
    assert config.trainer.eval_every == 0
