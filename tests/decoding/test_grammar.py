"""Grammars: the rows are those of the language, asking moves nothing, and decoding keeps the masked law.

The known mistakes of constrained speculative decoding (research: decoding.md §4.3) stand at the end: each is
put into the real code and must be seen.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from configs.errors import ConfigError, LeadoutError, TargetError
from configs.schema import Proposal as Mode
from configs.schema import Verification
from decoding.decoder import Decoder
from decoding.drafters.forced import ForcedDrafter
from decoding.drafters.plain import PlainDrafter
from decoding.drafters.small import SmallReader
from decoding.grammar import GrammarError, Grammars, Lexicon, Matcher
from decoding.growth import ChainGrowth
from decoding.law import Law
from decoding.randomness import Key, Purpose, Seeded
from decoding.reader import NetworkDrafter
from decoding.sequence import Params
from models.target import Target
from tests.conftest import tiny_model, tiny_target, tiny_tokenizer
from tests.decoding.replay import law_of, plain_law, total_variation
from tests.decoding.tables import TableDrafter, TableTarget, decoder_of

EMBEDDED = Path("artifacts/target/smollm2-135m-instruct")

# A vocabulary of seven tokens, two of which end a text, under a head of nine rows.
WORDS = ["<unk>", "<end>", "<stop>", "a", "b", "c", "ab"]
UNK, END, STOP, A, B, C, AB = range(7)
HEAD = 9


def toy_tokenizer(words: Sequence[str] = WORDS) -> PreTrainedTokenizerFast:
    tokenizer: Any = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<end>")


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(toy_tokenizer(), HEAD, [END, STOP])


def allowed(matcher: Matcher, path: Sequence[int] = ()) -> set[int]:
    return set(matcher.mask(path).nonzero().flatten().tolist())


# Rows.


def test_rows_are_what_may_follow(grammars: Grammars) -> None:
    matcher = grammars.regex("(ac|b){1,2}")
    assert allowed(matcher) == {A, B}
    assert allowed(matcher, [A]) == {C}
    assert allowed(matcher, [A, C]) == {A, B, END, STOP}  # complete, and there is room for another
    assert allowed(matcher, [B, B]) == {END, STOP}


def test_token_of_several_characters_is_allowed_as_a_whole(grammars: Grammars) -> None:
    assert allowed(grammars.regex("[ab]{2}")) == {A, B, AB}
    assert allowed(grammars.regex("[ab]{2}"), [A]) == {A, B}  # "ab" would be one too many


def test_neither_padding_nor_special_ids_are_ever_allowed(grammars: Grammars) -> None:
    """Bug class 7: the head has rows (7, 8) of which the tokenizer knows nothing."""
    assert len(grammars.regex(".*").mask(())) == HEAD
    assert allowed(grammars.regex("(?s:.*)")) == {A, B, C, AB, END, STOP}


def test_gaps_of_the_vocabulary_are_never_allowed() -> None:
    tokenizer: Any = Tokenizer(WordLevel({"<unk>": 0, "<end>": 1, "a": 3}, unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<end>")
    assert allowed(Grammars(fast, 5, [1]).regex("(?s:.*)")) == {1, 3}


@pytest.mark.parametrize("end", [END, STOP])
def test_after_the_end_only_end_tokens(grammars: Grammars, end: int) -> None:
    """Bug class 2: filling and accepting after termination, in a path and in the text."""
    matcher = grammars.regex("c")
    assert allowed(matcher, [C, end]) == allowed(matcher, [C, end, END, STOP]) == {END, STOP}
    matcher.commit([C, end])
    assert allowed(matcher) == allowed(matcher, [STOP]) == {END, STOP}
    assert matcher.forced((), 3) == matcher.likely((), 3) == []
    matcher.commit([END])
    assert allowed(matcher) == {END, STOP}


@pytest.mark.parametrize(
    "path",
    [
        pytest.param([C], id="refused"),
        pytest.param([B, B, B], id="too-long"),
        pytest.param([A, END], id="ends-too-early"),
        pytest.param([B, END, B], id="goes-on-after-the-end"),
        pytest.param([B, UNK], id="special"),
        pytest.param([B, 8], id="padding"),
    ],
)
def test_path_that_breaks_the_grammar_is_an_error_and_leaves_no_trace(
    grammars: Grammars, path: list[int]
) -> None:
    matcher = grammars.regex("(ac|b){1,2}")
    for ask in (matcher.mask, matcher.commit, lambda path: matcher.likely(path, 2)):
        with pytest.raises(ValueError, match=r"breaks the grammar|after the end"):
            ask(path)
    assert not matcher.ended
    assert allowed(matcher) == {A, B}
    assert allowed(matcher, [B]) == {A, B, END, STOP}


# Asking.

PATHS = [
    [],
    [B],
    [A, C],
    [A, C, B],
    [B, B, END],
    [B, END, STOP],
    [C],
    [B, C],
    [A, C, A, A],
    [B, B, B],
    [B, 8],
]


def moved(grammars: Grammars) -> bool:
    """Whether asking about any path, allowed or not, shows in any later answer."""
    for committed, asked in itertools.product([[], [B], [A, C]], PATHS):
        used, fresh = grammars.regex("(ac|b){1,3}"), grammars.regex("(ac|b){1,3}")
        used.commit(committed)
        fresh.commit(committed)
        for ask in (
            used.mask,
            lambda path, m=used: m.likely(path, 3),
            lambda path, m=used: m.forced(path, 3),
        ):
            with suppress(ValueError):
                ask(asked)
        used.rows.clear()
        if any(answer(used, path) != answer(fresh, path) for path in PATHS):
            return True
    return False


def answer(matcher: Matcher, path: list[int]) -> Any:
    try:
        return allowed(matcher, path), matcher.likely(path, 3)
    except (ValueError, GrammarError) as error:
        return str(error)


def test_asking_changes_nothing(grammars: Grammars) -> None:
    """Bug class 1: the state is at the committed text before and after every question."""
    assert not moved(grammars)


def test_a_round_computes_each_row_once(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    matcher = grammars.regex("[abc]*")
    asked: list[tuple[int, ...]] = []
    row = Matcher.row
    monkeypatch.setattr(Matcher, "row", lambda self, path: asked.append(path) or row(self, path))
    for path in ([A], [A, B], [A], (A, B)):
        matcher.mask(path)
    assert asked == [(A,), (A, B)]
    matcher.commit([A])
    assert matcher.rows == {}


def test_rows_do_not_depend_on_what_else_was_asked() -> None:
    """After going back, llguidance 1.9.1 gives rows of the path that was left: here a comma behind `b`, the
    last property there is, since one may follow `a`."""
    words = ["<unk>", "<end>", *'{"ab:x', '",', '"}']
    grammars = Grammars(toy_tokenizer(words), len(words), [END])

    def ids(text: str) -> list[int]:
        return [words.index(letter) for letter in text]

    string = {"type": "string"}
    matcher = grammars.json_schema(
        {"type": "object", "properties": {"a": string, "b": string}, "additionalProperties": False}
    )
    matcher.commit(ids('{"'))
    closing = {words.index('",'), words.index('"}')}
    assert allowed(matcher, ids('a":"')) & closing == closing
    assert allowed(matcher, ids('b":"')) & closing == {words.index('"}')}


def test_dead_end_is_an_error_and_no_end_of_text(grammars: Grammars) -> None:
    """llguidance itself offers the end tokens where no token spells what must come."""
    matcher = grammars.regex("b(a|d)c|ad")
    assert allowed(matcher) == {A, B}
    with pytest.raises(GrammarError, match="no token"):
        matcher.mask([A])
    assert allowed(matcher, [B]) == {A}
    with pytest.raises(GrammarError, match="no token"):
        grammars.regex("d")  # before any decoding


# Runs.


def test_forced_are_ids_without_an_alternative() -> None:
    one_end = Grammars(toy_tokenizer(), HEAD, [END])
    matcher = one_end.regex("c(ac){2}[bc]ca")
    assert matcher.forced((), 9) == [C, A, C, A, C]
    assert matcher.forced((), 3) == [C, A, C]
    assert matcher.forced([C, A, C, A, C, B], 9) == [C, A, END]  # nothing is forced after the end
    two_ends = Grammars(toy_tokenizer(), HEAD, [END, STOP])
    assert two_ends.regex("cb").forced((), 9) == [C, B]  # which end token is the model's choice


def test_likely_are_the_usual_tokens(grammars: Grammars) -> None:
    matcher = grammars.regex("cab(a|b)c")
    assert matcher.likely((), 5) == [C, AB]
    assert matcher.likely((), 1) == [C]
    assert matcher.likely([C, AB], 5) == []
    assert matcher.likely([C, AB, A], 5) == [C]
    assert matcher.likely([C, AB, A, C, END], 5) == []


# What is refused.


@pytest.mark.parametrize(
    ("schema", "names"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"not": {"type": "string"}}, "not"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"type": "float"}, "float"),
        ({"type": "string", "pattern": "a(?=b)"}, "look-around"),
        ({"type": "string", "minLength": 5, "maxLength": 2}, "minLength"),
        ({"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}, "uniqueItems"),
        ("[1]", "JSON object"),
        ("{", "cannot be read"),
    ],
)
def test_schema_that_cannot_be_enforced_is_refused_by_name(
    grammars: Grammars, schema: Any, names: str
) -> None:
    with pytest.raises(GrammarError, match=names):
        grammars.json_schema(schema)
    assert issubclass(GrammarError, LeadoutError)


def test_other_grammars_are_refused_too(grammars: Grammars) -> None:
    with pytest.raises(GrammarError, match=r"regular expression.*unclosed group"):
        grammars.regex("(a")
    with pytest.raises(GrammarError, match="Lark grammar"):
        grammars.lark("start: nowhere")
    assert allowed(grammars.lark('start: "a" | "bc"')) == {A, B}


def test_vocabulary_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="end token"):
        Grammars(toy_tokenizer(), HEAD, [])
    with pytest.raises(TargetError, match="ids up to 6"):
        Grammars(toy_tokenizer(), 5, [1])
    spaced = toy_tokenizer()
    spaced.backend_tokenizer.decoder = None  # type: ignore[assignment]  (puts spaces between its tokens)
    with pytest.raises(TargetError, match="cannot read"):
        Grammars(spaced, HEAD, [END])


# The law, over all outcomes of the real decoder's chance. Target and draft are tables over whole prefixes.

VOCAB = 10  # tiny_tokenizer(8) has the characters a, b, c as 5, 6, 7; rows 8 and 9 are padding
EOS = 2
PROMPT = [1, 0]
PATTERN = "cb|bab|bb|bc|b"
SENTENCES = [[7, 6], [6, 5, 6], [6, 6], [6, 7], [6]]


def follows(prefix: Sequence[int]) -> set[int]:
    """What may follow in PATTERN's language, written out."""
    prefix = list(prefix)
    n = len(prefix)
    return {[*s, EOS][n] for s in SENTENCES if [*s, EOS][:n] == prefix and n <= len(s)}


@pytest.fixture(scope="module")
def toy() -> Grammars:
    return Grammars(tiny_tokenizer(8), VOCAB, [EOS])


class Blind(TableDrafter):
    """Knows nothing of the grammar, as the drafts of most engines: it also proposes padding."""

    def __init__(self, mode: Mode) -> None:
        super().__init__(VOCAB, mode, ids=[6, 8, EOS])

    def law(self, prefix: Sequence[int], law: Law, path: Sequence[int]) -> np.ndarray:
        return law.warp(self.table(prefix).index_fill(0, torch.tensor(self.outside), -torch.inf))


def settings(**others: Any) -> Params:
    values = {"draft_tokens": 2, "max_new_tokens": 5, "temperature": 0.7, "top_k": 0, "top_p": 1.0}
    return Params(**{**values, "stop": (), "seed": 0, **others})


class OutsideError(Exception):
    """An output that the grammar forbids."""


def distance(toy: Grammars, drafter: Any, params: Params) -> float:
    """Total variation between the decoder's law and that of plain masked decoding."""
    target = TableTarget(VOCAB, eos=(EOS,))
    decoder = decoder_of(target, drafter)

    def masked(prefix: tuple[int, ...]) -> Tensor:
        outside = [id for id in range(VOCAB) if id not in follows(prefix[len(PROMPT) :])]
        return target.table(prefix).index_fill(0, torch.tensor(outside), -torch.inf)

    def play(replay: Any) -> tuple[int, ...]:
        tokens = decoder.generate(PROMPT, params, replay, toy.regex(PATTERN)).tokens
        if any(token not in follows(tokens[:i]) for i, token in enumerate(tokens)):
            raise OutsideError(tokens)  # at once: there may be many more
        return tuple(tokens)

    return total_variation(law_of(play), plain_law(masked, PROMPT, params, target.eos_ids))


def test_rows_are_those_written_out(toy: Grammars) -> None:
    matcher = toy.regex(PATTERN)
    for sentence in SENTENCES:
        for n in range(len(sentence) + 1):
            assert allowed(matcher, sentence[:n]) == follows(sentence[:n])


@pytest.mark.parametrize("forced", [False, True], ids=["alone", "forced"])
@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize(
    ("warp", "drafter"),
    [
        pytest.param({}, {}, id="temperature"),
        pytest.param({"top_k": 2}, {}, id="top-k"),
        pytest.param({"top_p": 0.7}, {}, id="top-p"),
        pytest.param({"repetition_penalty": 1.8}, {}, id="repetition-penalty"),
        pytest.param({"temperature": 0.0}, {}, id="greedy"),
        pytest.param({"draft_tokens": 1}, {}, id="rounds"),
        pytest.param({}, {"parent": [-1, 0, 0, 1]}, id="tree"),
        pytest.param({"draft_tokens": 3}, {"ids": [2, 5, 6]}, id="draft-vocabulary"),
        pytest.param({"verification": Verification.block}, {}, id="block"),
    ],
)
def test_law_is_that_of_plain_masked_decoding(
    toy: Grammars, mode: Mode, forced: bool, warp: dict[str, Any], drafter: dict[str, Any]
) -> None:
    inner = TableDrafter(VOCAB, mode, **drafter)
    assert distance(toy, ForcedDrafter(inner) if forced else inner, settings(**warp)) < 1e-12


@pytest.mark.parametrize("verification", [Verification.rejection, Verification.block])
@pytest.mark.parametrize("forced", [False, True], ids=["alone", "forced"])
@pytest.mark.parametrize("mode", list(Mode))
def test_draft_that_breaks_the_grammar_costs_nothing_but_itself(
    toy: Grammars, mode: Mode, forced: bool, verification: Verification
) -> None:
    """vLLM's "failed to advance FSM", and SGLang's output that stops where the draft breaks the grammar."""
    drafter = ForcedDrafter(Blind(mode)) if forced else Blind(mode)
    assert distance(toy, drafter, settings(verification=verification)) < 1e-12


# Real networks: greedy decoding is that of a loop written out.


def greedy(target: Target, prompt: list[int], matcher: Matcher, length: int) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < length and not (tokens and tokens[-1] in target.eos_ids):
        logits = target.model(torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0, -1]
        tokens.append(int(logits.masked_fill(~matcher.mask(()), -torch.inf).argmax()))
        matcher.commit(tokens[-1:])
    return tokens


def small(target: Target, **model: Any) -> NetworkDrafter:
    draft = Target.wrap(tiny_model(target.vocab_size, seed=1, **model), target.tokenizer)
    return NetworkDrafter(
        SmallReader(draft, eos_ids=target.eos_ids, vocab_size=target.vocab_size), ChainGrowth(Mode.greedy)
    )


LIST = r"item [a-c]{2,4}(, item [a-c]{2,4}){1,2}\."


@pytest.mark.parametrize("forced", [False, True], ids=["alone", "forced"])
def test_greedy_output_is_that_of_a_plain_loop(forced: bool) -> None:
    target = tiny_target()
    grammars = Grammars.of(target)
    inner = small(target)
    decoder = Decoder(target, ForcedDrafter(inner) if forced else inner)
    for prompt in ([5, 9, 7], [1, 30, 31, 32, 33]):
        done = decoder.generate(
            prompt, settings(draft_tokens=4, max_new_tokens=60, temperature=0), None, grammars.regex(LIST)
        )
        assert done.tokens == greedy(target, prompt, grammars.regex(LIST), 60)
        assert done.finish == "eos"
        assert sum(round.accepted for round in done.rounds) > 0


# The embedded target's tokenizer.

SCHEMAS = [
    {"enum": ["north", "south", "east"]},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    {
        "type": "object",
        "properties": {
            "name": {"const": "get_weather"},
            "days": {"type": "integer", "minimum": 1, "maximum": 14},
        },
        "required": ["name", "days"],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 6},
            "unit": {"anyOf": [{"const": "°C"}, {"type": "null"}]},
            "at": {"type": "string", "format": "date"},
        },
        "required": ["city", "unit", "at"],
        "additionalProperties": False,
    },
]


@pytest.fixture(scope="module")
def smollm() -> tuple[Target, Grammars]:
    """A tiny random Llama under the embedded target's tokenizer, with a head wider than that."""
    if not (EMBEDDED / "tokenizer.json").exists():
        pytest.skip(f"{EMBEDDED} is absent: make fetch")
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
    vocab = len(tokenizer) + 8
    target = Target.wrap(tiny_model(vocab, hidden=16, layers=1, heads=2, kv_heads=1), tokenizer)
    return target, Grammars.of(target)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("schema", SCHEMAS)
def test_finished_output_parses_and_validates(
    smollm: tuple[Target, Grammars], schema: dict[str, Any], temperature: float
) -> None:
    target, grammars = smollm
    params = settings(draft_tokens=5, max_new_tokens=100, temperature=temperature)
    inner = small(target, hidden=16, layers=1, heads=2, kv_heads=1)
    outputs = []
    for drafter in (PlainDrafter(), inner, ForcedDrafter(inner)):
        done = Decoder(target, drafter).generate([1, 50, 60], params, None, grammars.json_schema(schema))
        assert done.finish == "eos"
        assert [token in target.eos_ids for token in done.tokens] == [False] * (len(done.tokens) - 1) + [True]
        text = target.tokenizer.decode(done.tokens[:-1])
        jsonschema.validate(json.loads(text), schema)
        outputs.append(done.tokens)
    assert temperature or outputs[0] == outputs[1] == outputs[2]


def test_json_is_compact_unless_asked_otherwise(smollm: tuple[Target, Grammars]) -> None:
    target, grammars = smollm
    schema = {"type": "array", "items": {"type": "boolean"}, "minItems": 2}
    ids: Callable[[str], list[int]] = lambda text: target.tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
    spaces = set(ids(" ") + ids("  ") + ids("\n") + ids("\n\n"))
    assert not spaces & allowed(grammars.json_schema(schema), ids("[true"))
    assert spaces <= allowed(grammars.json_schema(schema, compact=False), ids("[true"))


def test_what_must_come_is_proposed_in_the_tokenizers_own_cut(smollm: tuple[Target, Grammars]) -> None:
    target, grammars = smollm
    matcher = grammars.json_schema(SCHEMAS[2])
    ids = target.tokenizer.encode('{"name":"get_weather","days":', add_special_tokens=False)
    path: list[int] = []
    while more := matcher.likely(path, 5):
        assert all(bool(matcher.mask([*path, *more[:i]])[token]) for i, token in enumerate(more))
        path += more
    assert target.tokenizer.decode(path) == '{"name":"get_weather","days":'
    assert path == ids


# The mistakes.


def broken(toy: Grammars, mode: Mode = Mode.greedy) -> bool:
    try:
        return distance(toy, TableDrafter(VOCAB, mode), settings()) > 0.01
    except (ValueError, OutsideError):
        return True


@pytest.mark.parametrize("mode", list(Mode))
def test_nothing_is_broken_before(toy: Grammars, mode: Mode) -> None:
    assert not broken(toy, mode)


def test_second_copy_of_the_state_is_seen(toy: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """1: what is emitted does not reach the state that the masks are made from."""
    monkeypatch.setattr(Matcher, "commit", lambda self, tokens: None)
    assert broken(toy)


@pytest.mark.parametrize("last", [1, 2], ids=["first-token-only", "bonus"])
def test_row_that_is_forgotten_is_seen(toy: Grammars, monkeypatch: pytest.MonkeyPatch, last: int) -> None:
    """3: the row after the last proposed token has no mask; or (4) none but the run's first has one."""
    allowed = Law.allowed

    def forgetful(self: Law, path: Sequence[int], ids: Tensor | None = None) -> Tensor | None:
        return allowed(self, path, ids) if len(path) < last else None

    monkeypatch.setattr(Law, "allowed", forgetful)
    assert broken(toy)


def test_row_of_another_node_is_seen(toy: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """4: a change of state inside a run is missed: the root's row serves all its nodes."""
    mask = Matcher.mask
    monkeypatch.setattr(Matcher, "mask", lambda self, path: mask(self, ()))
    assert broken(toy)


def test_question_that_moves_the_state_is_seen(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """5: the state stays where a drafted path led it."""
    after = Matcher.after

    def careless(self: Matcher, path: Sequence[int]) -> Any:
        self.matcher, ended = after(self, path)
        return self.matcher, ended

    monkeypatch.setattr(Matcher, "after", careless)
    assert moved(grammars)


def test_full_row_after_the_end_is_seen(toy: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """2: after termination "everything" instead of the end tokens."""
    everything = torch.ones(VOCAB, dtype=torch.bool)
    monkeypatch.setattr(toy, "lexicon", Lexicon(**{**vars(toy.lexicon), "only_ends": everything}))
    matcher = toy.regex(PATTERN)
    assert allowed(matcher, [7, 6, EOS]) != {EOS}


def test_forbidden_token_is_not_accepted_by_a_number_that_is_zero() -> None:
    """6: `<=` instead of `<` lets a token of probability 0 stand when the uniform number is 0."""

    class Zero(Seeded):
        def uniform(self, key: Key) -> float:
            return 0.0

    assert not Zero(0).accept(0.0, Key(3, Purpose.accept))
    assert Zero(0).accept(1e-9, Key(3, Purpose.accept))
