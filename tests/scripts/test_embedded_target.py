"""The fetched target is the model it should be."""

from __future__ import annotations

import pytest
import torch

from configs.schema import Dtype, TargetConfig
from models.target import Target
from scripts.fetch_embedded import TARGET


@pytest.mark.embedded
@pytest.mark.skipif(not TARGET.exists(), reason="the embedded target is not fetched: make fetch")
def test_the_embedded_target_answers_a_question() -> None:
    target = Target.load(TargetConfig(name=str(TARGET), dtype=Dtype.float32, device="cpu"))
    question = [{"role": "user", "content": "What is the capital of France?"}]
    text = target.tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    ids = target.tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        reply = target.model.generate(ids, do_sample=False, max_new_tokens=12)[0, ids.shape[1] :]
    assert target.tokenizer.decode(reply, skip_special_tokens=True) == "The capital of France is Paris."
