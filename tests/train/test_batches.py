from __future__ import annotations

import itertools

import torch

from configs.schema import Schedule, TrainerConfig
from data.tokens import TokenRow
from train.batches import Plan, RowFeatures, collate, pack, shuffled
from train.schedule import share


def test_pack_counts_padding() -> None:
    # In this order: 3 and 4 pad to 4 each (8 <= 8); 5 pads the three to 15 > 8, so it opens a batch; 9 > 8
    # stands alone.
    assert pack([4, 3, 9, 5], order=[1, 0, 3, 2], tokens=8) == [[1, 0], [3], [2]]


def test_every_epoch_has_every_row_once_in_its_own_order() -> None:
    sizes = [10 + i % 7 for i in range(50)]
    first, second = shuffled(sizes, 64, seed=3, epoch=0), shuffled(sizes, 64, seed=3, epoch=1)

    assert sorted(itertools.chain(*first)) == sorted(itertools.chain(*second)) == list(range(50))
    assert first != second
    assert all(max(sizes[n] for n in batch) * len(batch) <= 64 for batch in first)
    assert first == shuffled(sizes, 64, seed=3, epoch=0)
    assert first != shuffled(sizes, 64, seed=4, epoch=0)


def test_batches_hold_rows_of_similar_lengths() -> None:
    sizes = [10, 1000] * 20
    batches = shuffled(sizes, 4000, seed=0, epoch=0)

    assert all(len({sizes[n] for n in batch}) == 1 for batch in batches)


def test_a_plan_s_steps_are_its_epochs_micro_batches_in_groups() -> None:
    # Nine rows of 10 tokens, two to a micro-batch: 5 micro-batches an epoch, so groups of 2, 2 and 1.
    plan = Plan([10] * 9, tokens=20, accumulation=2, epochs=2, seed=0)

    assert plan.steps == 6
    assert [plan.epoch(step) for step in range(6)] == [0, 0, 0, 1, 1, 1]
    assert [len(plan[step]) for step in range(6)] == [2, 2, 1, 2, 2, 1]
    assert sorted(itertools.chain(*plan[3], *plan[4], *plan[5])) == list(range(9))
    assert plan[0] + plan[1] + plan[2] == shuffled([10] * 9, 20, seed=0, epoch=0)
    assert Plan([10] * 9, tokens=20, accumulation=2, epochs=2, seed=0, max_steps=4).steps == 4


def test_collate_pads_and_points_to_the_packed_rows() -> None:
    rows = [TokenRow("a", "", [5, 6, 7], [0, 1, 1]), TokenRow("b", "", [8, 9], [0, 1])]

    def features(length: int, taught: list[int], value: float) -> RowFeatures:
        n = len(taught)
        return RowFeatures(
            taps=torch.full((length, 2), value),
            rows=torch.tensor(taught),
            hidden=torch.full((n, 4), value),
            lse=torch.full((n,), value),
            argmax=torch.full((n,), int(value)),
        )

    batch = collate(rows, [features(3, [0, 1], 1.0), features(2, [0], 2.0)], grain=1)

    assert batch.tokens.tolist() == [[5, 6, 7], [8, 9, 0]]
    assert batch.mask.tolist() == [[False, True, True], [False, True, False]]
    assert batch.taps[..., 0].tolist() == [[1, 1, 1], [2, 2, 0]]
    assert batch.teacher.tolist() == [[0, 1, -1], [2, -1, -1]]
    assert batch.hidden[:, 0].tolist() == [1, 1, 2]

    # T = 3 and N = 3 become multiples of 4; what is added is padding and teaches nothing.
    padded = collate(rows, [features(3, [0, 1], 1.0), features(2, [0], 2.0)], grain=4)

    assert padded.tokens.tolist() == [[5, 6, 7, 0], [8, 9, 0, 0]]
    assert padded.teacher.tolist() == [[0, 1, -1, -1], [2, -1, -1, -1]]
    assert padded.hidden[:, 0].tolist() == [1, 1, 2, 0]


def trainer(schedule: Schedule, **values: float) -> TrainerConfig:
    return TrainerConfig(**{"warmup_ratio": 0.2, "final_lr_ratio": 0.1, "schedule": schedule, **values})  # pyright: ignore[reportArgumentType]


def test_learning_rate_shares() -> None:
    # 10 steps, two of warm-up: 1/2, 1. Cosine from 1 at step 2 to .1 after step 9; half way, at step 6, .55.
    cosine = [share(step, 10, trainer(Schedule.cosine)) for step in range(11)]
    assert cosine[:3] == [0.5, 1.0, 1.0]
    assert abs(cosine[6] - 0.55) < 1e-9 and abs(cosine[10] - 0.1) < 1e-9
    # The last four steps fall from 1 in quarters of .9.
    wsd = [round(share(step, 10, trainer(Schedule.wsd, decay_ratio=0.4)), 3) for step in range(10)]
    assert wsd == [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.775, 0.55, 0.325]
    assert {share(step, 10, trainer(Schedule.constant)) for step in range(2, 10)} == {1.0}
