"""Which tokens are trained on, with one token per letter: masks can be checked against the text by eye."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, PreTrainedTokenizerFast

from configs.errors import TargetError, TrafficError
from configs.schema import MaskTurns, TargetConfig
from data.template import Template, UnstableTemplateError
from data.traffic import Refused
from tests.data.samples import ALPHABET, LETTERS, chat, letter_tokenizer, letters, merging_tokenizer

ALL, LAST = MaskTurns.all, MaskTurns.last

# The earlier replies lose their "t" (thoughts) once another turn follows, as reasoning templates do.
FORGETFUL = LETTERS.replace(
    "'a' + m.content", "'a' + (m.content if loop.last else m.content | replace('t', ''))"
)


def masked(template: Template, messages: list[dict], turns: MaskTurns = ALL) -> tuple[str, str]:
    """The row's text, and below it a 1 under each trained letter."""
    ids, mask = template.row(messages, None, turns)
    return "".join(ALPHABET[id] for id in ids), "".join(map(str, mask))


def test_prompt_ends_where_the_reply_begins() -> None:
    assert letters().prompt(chat("xy")) == [ALPHABET.index(letter) for letter in "uxya"]


def test_reply_text_repeated_in_the_prompt() -> None:
    assert masked(letters(), chat("xy", "xy")) == (
        "uxyaxye\n",
        "00001110",  # the end token is trained on, the newline after it is not: the model never writes it
    )


def test_several_turns_and_a_system_prompt() -> None:
    assert masked(letters(), chat("x", "y", "z", "xx", system="w")) == (
        "swuxaye\nuzaxxe\n",
        "000001100001110",
    )


def test_last_turn_only_drops_what_follows_it() -> None:
    assert masked(letters(), chat("x", "y", "z", "xx", "w"), LAST) == (
        "uxaye\nuzaxxe\n",
        "0000000001110",
    )


def test_trailing_question_is_not_trained_on() -> None:
    assert masked(letters(), chat("x", "y", "z")) == ("uxaye\nuz", "00011000")


def test_end_token_inside_a_prompt_or_a_reply() -> None:
    """A model that writes its end token has ended: what a log has after it is not its own."""
    assert masked(letters(), chat("ex", "y")) == ("uexaye\n", "0000110")
    assert masked(letters(), chat("x", "yez")) == ("uxayeze\n", "00011000")


def test_template_without_an_end_token() -> None:
    bare = letters(LETTERS.replace("'e\n'", "''"))
    assert masked(bare, chat("x", "y", "z", "w")) == ("uxayuzaw", "00010001")


def test_template_that_rewrites_earlier_turns_is_refused_by_name() -> None:
    """Alone the first reply is "ty", once followed it is "y": nothing tells which tokens it had."""
    with pytest.raises(
        UnstableTemplateError, match=r"letters renders assistant turn 1 .*data\.mask_turns=last"
    ):
        letters(FORGETFUL).row(chat("x", "ty", "z", "tw"), None, ALL)


def test_template_that_rewrites_earlier_turns_has_a_stable_last_one() -> None:
    assert masked(letters(FORGETFUL), chat("x", "ty", "z", "tw"), LAST) == (
        "uxaye\nuzatwe\n",
        "0000000001110",
    )


def test_template_whose_generation_prompt_is_not_how_replies_begin() -> None:
    with pytest.raises(UnstableTemplateError, match=r"data\.replies=target"):
        letters(LETTERS.replace("{{ 'a' }}", "{{ 'av' }}")).row(chat("x", "y"), None, LAST)


def test_no_second_bos() -> None:
    """The template writes the BOS; the tokenizer would add another one by default."""
    template = letters("b" + LETTERS, with_bos=True)
    assert template.tokenizer("x")["input_ids"] == [ALPHABET.index("b"), ALPHABET.index("x")]
    assert template.prompt(chat("x")) == [ALPHABET.index(letter) for letter in "buxa"]


def test_token_across_the_start_of_a_reply() -> None:
    """Serving feeds "a" and the model writes "x"; in the row they are one token, which none would see."""
    template = Template(merging_tokenizer(("a", "x")), "merging", frozenset({3}))
    with pytest.raises(Refused, match="a token straddles the start of a reply"):
        template.row(chat("y", "xy"), None, ALL)
    assert sum(template.row(chat("y", "yx"), None, ALL)[1]) == 3  # y, x, e


def test_token_across_the_end_of_a_reply() -> None:
    """A token of the newline and the next "u", behind the end token, does no harm; of "y" and "u" it does."""
    ids, mask = Template(merging_tokenizer(("\n", "u")), "merging", frozenset({3})).row(
        chat("x", "y", "z"), None, ALL
    )
    assert (len(ids), mask) == (7, [0, 0, 0, 1, 1, 0, 0])  # u x a y e "\nu" z
    tokenizer = merging_tokenizer(("y", "u"))
    tokenizer.chat_template = LETTERS.replace("'e\n'", "''")
    with pytest.raises(Refused, match="a token straddles the end of a reply"):
        Template(tokenizer, "merging", frozenset({3})).row(chat("x", "y", "z"), None, ALL)


def test_tokenizer_without_a_template() -> None:
    with pytest.raises(TrafficError, match=r"base has no chat template.*instruction-tuned"):
        Template(letter_tokenizer(template=None), "base", frozenset({3}))


def test_the_templates_own_objection_is_the_reason() -> None:
    picky = letters("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(Refused, match="the chat template refuses it: roles must alternate"):
        picky.prompt(chat("x"))


def test_tools_reach_the_template() -> None:
    template = letters("{% for t in tools %}{{ t.function.name }}{% endfor %}" + LETTERS)
    ids = template.prompt(chat("x"), [{"type": "function", "function": {"name": "w"}}])
    assert ids == [ALPHABET.index(letter) for letter in "wuxa"]


def test_reply_that_came_as_text() -> None:
    """Ended by the model: with the end token. Cut at a limit: without."""
    template = letters()
    assert template.reply(chat("x"), None, {"content": "yz"}, ended=True) == [
        ALPHABET.index(c) for c in "yze"
    ]
    assert template.reply(chat("x"), None, {"content": "yz"}, ended=False) == [
        ALPHABET.index(c) for c in "yz"
    ]
    merging = Template(merging_tokenizer(("a", "x")), "merging", frozenset({3}))
    with pytest.raises(Refused, match="a token straddles"):
        merging.reply(chat("y"), None, {"content": "x"}, ended=True)


def test_reply_with_tool_calls_is_rendered_by_the_template() -> None:
    """ "t" stands for the call."""
    calling = LETTERS.replace("'a' + m.content", "'a' + ('t' if m.tool_calls else '') + m.content")
    reply = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}
    assert letters(calling).reply(chat("x"), None, reply, ended=True) == [ALPHABET.index(c) for c in "te"]
    with pytest.raises(Refused, match="hides where its tool calls or reasoning begin"):
        letters(calling.replace("{{ 'a' }}", "{{ 'av' }}")).reply(chat("x"), None, reply, ended=True)


def test_fingerprint_follows_the_templates_text() -> None:
    assert letters().fingerprint() == letters().fingerprint() != letters(FORGETFUL).fingerprint()


def test_a_tokenizer_without_an_end_is_told() -> None:
    endless = Template(letter_tokenizer(), "letters", frozenset())
    with pytest.raises(TrafficError, match="Set eos_token_id"):
        endless.ended([ALPHABET.index("t")])


def test_the_largest_id_of_a_vocabulary_with_gaps() -> None:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"a": 0, "b": 1, "e": 7}, unk_token="a")),
        eos_token="e",
        chat_template=LETTERS,
    )
    assert Template(tokenizer, "gaps", frozenset({7})).largest_id == 7


def test_load_without_weights(tmp_path: Path) -> None:
    letter_tokenizer().save_pretrained(tmp_path)
    template = Template.load(TargetConfig(name=str(tmp_path)))
    assert template.eos_ids == {3}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert Template.load(TargetConfig(name=str(tmp_path))).eos_ids == {3, 5, 6}
    (tmp_path / "generation_config.json").unlink()
    LlamaConfig(eos_token_id=[7, 8]).save_pretrained(tmp_path)  # as transformers takes them, then
    assert Template.load(TargetConfig(name=str(tmp_path))).eos_ids == {3, 7, 8}
    with pytest.raises(TargetError, match=r"Check target\.name"):
        Template.load(TargetConfig(name=str(tmp_path / "nowhere")))
