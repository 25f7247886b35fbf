from __future__ import annotations

import contextlib
import json
import random
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from aioinfer.errors import GenerationError, NoTokenError, RequestError
from aioinfer.sampling_params import GrammarKind, GrammarSpec
from aioinfer.text.constraints import mask_words
from aioinfer.text.grammar import GrammarCompiler, GrammarState
from aioinfer.text.tokenizer import Tokenizer
from tests import real_tokenizers
from tests.random_schemas import RandomWriter, random_schemas

VOCAB_SIZE, END = 49_152, 2
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer(tokenizer_cache: Path) -> Tokenizer:
    return Tokenizer.load(real_tokenizers.smollm2_folder(tokenizer_cache))


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, VOCAB_SIZE, [END])


def allowed(state: GrammarState, vocab_size: int = VOCAB_SIZE) -> set[int]:
    mask = np.full(mask_words(vocab_size), -1, np.int32)
    state.fill(mask)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def follows(compiler: GrammarCompiler, tokenizer: Tokenizer, spec: GrammarSpec, text: str) -> bool:
    """Whether a whole output may be `text`, by the masks of its tokens and its end."""
    state = compiler.compile(spec).start()
    for token in tokenizer.encode(text, False):
        if token not in allowed(state):
            return False
        state.accept([token])
    return END in allowed(state)


@pytest.mark.parametrize(
    ("kind", "source", "right", "wrong"),
    [
        ("json_object", "", ['{"a": [1, {"b": null}]}', "{}"], ["[1]", "1", '{"a"', ""]),
        ("json_schema", json.dumps(PERSON), ['{"name": "Bo", "age": 3}', '{"name":"é","age":-1}'],
         ['{"age": 3, "name": "Bo"}', '{"name": "Bo"}', '{"name": 3, "age": 3}', "{}"]),
        ("json_schema", "true", ["1", '"x"'], ["x"]),
        # what the schema leaves open is closed
        ("json_schema", '{"properties": {"a": {}}}', ['{"a":1}', "{}", "2"], ['{"a":1,"b":2}']),
        ("regex", r"[ab]{2,3}|ü\d+", ["ab", "bbb", "ü12"], ["a", "abab", "ü", "xab"]),
        ("choice", '["yes", "no", "not \\"sure\\"\\n", "ü😀"]',
         ["yes", "no", 'not "sure"\n', "ü😀"], ["ye", "nope", "not"]),
        ("lark", 'start: "a" b+\nb: /[0-9]/ ","', ["a1,2,", "a1,"], ["a", "1,", "a1"]),
        ("lark", 'root ::= "a" (item ",")+\nitem ::= [0-9]+', ["a1,", "a12,3,"], ["a", "a1"]),
        ("structural_tag",
         json.dumps({"triggers": ["<f"], "structures": [
             {"begin": "<f=x>", "schema": {"type": "integer"}, "end": "</f>"}]}),
         ["text <f=x>12</f> more", "only text", "<f=x>1</f><f=x>2</f>"],
         ["text <f=y>", "<f=x>a</f>", "<f=x>1"]),
    ],
)  # fmt: skip
def test_kinds(
    compiler: GrammarCompiler,
    tokenizer: Tokenizer,
    kind: GrammarKind,
    source: str,
    right: list[str],
    wrong: list[str],
) -> None:
    spec = GrammarSpec(kind, source)
    assert [text for text in right if not follows(compiler, tokenizer, spec, text)] == []
    assert [text for text in wrong if follows(compiler, tokenizer, spec, text)] == []


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"const": 2**53 + 2}, [2**53 + 2], [2**53, 2**53 + 1, 2**53 + 4]),
        ({"type": "integer", "maximum": 2**53 + 1}, [2**53, -(10**30)], [2**53 + 1, 2**53 + 2]),
        ({"type": "integer", "minimum": 2**53 + 1}, [2**53 + 2, 2**60], [2**53, 10**30]),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
         [0, 2**63 - 1024, -(2**63) + 1024], [2**63, -(2**63) - 1]),
        ({"type": "number", "maximum": 2**60 + 256}, [2**60, 1.5], [2**60 + 257]),
        # of the float64 below 2^63, llguidance prints the digits 9223372036854775000
        ({"type": "number", "maximum": 2**63 - 1024}, [2**62, 1.5], [9223372036854775000]),
        ({"type": "number", "exclusiveMinimum": 2**60}, [2**60 + 1024], [2**60, 2**60 - 1]),
        ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, [0, 2**62], [-1, 2**64]),
    ],
)  # fmt: skip
def test_integers_beyond_float64(
    compiler: GrammarCompiler,
    tokenizer: Tokenizer,
    schema: dict[str, object],
    right: list[float],
    wrong: list[float],
) -> None:
    spec = GrammarSpec("json_schema", json.dumps(schema))
    assert [each for each in right if not follows(compiler, tokenizer, spec, str(each))] == []
    assert [each for each in wrong if follows(compiler, tokenizer, spec, str(each))] == []


@pytest.mark.parametrize("levels", [60, 130, 450])
def test_a_deep_schema_is_enforced(
    compiler: GrammarCompiler, tokenizer: Tokenizer, levels: int
) -> None:
    source = '{"prefixItems":[' * levels + '{"const": "x"}' + "]}" * levels
    spec = GrammarSpec("json_schema", source)
    assert follows(compiler, tokenizer, spec, "[" * levels + '"x"' + "]" * levels)
    assert not follows(compiler, tokenizer, spec, "[" * levels + '"y"' + "]" * levels)


def test_white_space_of_json_is_bounded(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    usual = GrammarSpec("json_object")
    for text, is_right in (('{ "a": 1 }', True), ('{\n  "a": 1\n}', True), ('{     "a":1}', False)):
        assert follows(compiler, tokenizer, usual, text) == is_right
    none = GrammarSpec("json_object", whitespace="")
    assert follows(compiler, tokenizer, none, '{"a":1}')
    assert not follows(compiler, tokenizer, none, '{"a": 1}')
    three = GrammarSpec("json_object", whitespace=" {3}")
    assert follows(compiler, tokenizer, three, '{   "a":1}')


@pytest.mark.parametrize(
    ("kind", "source", "message"),
    [
        ("json_schema", '{"not": {"pattern": "a"}}', "keyword 'not' is not supported"),
        ("json_schema", '{"properties": {"a": {"if": {"pattern": "a"}, "then": {"minLength": 2}}}}',
         "'if', 'then'"),
        ("json_schema", '{"type": "array", "uniqueItems": true}', "'uniqueItems'"),
        ("json_schema", '{"oneOf": [{"pattern": "a"}, {"pattern": "b"}]}', "'oneOf'"),
        ("json_schema", '{"x-guidance": {"lenient": true}, "not": {}}', "'x-guidance'"),
        ("json_schema", '{"$ref": "https://example.org/schema"}', "https://example.org/schema"),
        ("json_schema", '{"type": "nonsense"}', "Invalid type: nonsense"),
        ("json_schema", "[1", "not valid JSON"),
        ("json_schema", '{"const": NaN}', "not valid JSON: NaN"),
        ("json_schema", '{"items": {"const": 9007199254740993}}', "9007199254740993 cannot be"),
        ("json_schema", '{"enum": [-9223372036854775808]}', "cannot be enforced exactly"),
        ("json_schema", '{"minimum": 12345678901234567890}', "only numbers beyond 2^63"),
        ("json_schema", '{"default": 1e400}', "beyond float64"),
        ("json_schema", '{"pattern": "\\ud800"}', "surrogate pair"),
        ("json_schema", '{"const": ' + "[" * 200 + "]" * 200 + "}", "at most 50 levels"),
        ("json_schema", '{"items":' * 1200 + "{}" + "}" * 1200, "nested too deeply"),
        ("json_schema", '{"$defs": [], "items":' + '{"items":' * 99 + "{}" + "}" * 100, "$defs"),
        ("json_schema", "3", "must be an object or a boolean"),
        ("json_schema", "false", "Unsatisfiable"),
        ("json_schema", '{"$ref": "#"}', "allows nothing"),
        ("regex", "(?=a)b", "look-around"),
        ("regex", "(", "unclosed group"),
        ("regex", "a?" * 1500, "at most 2048 characters"),
        ("choice", "[]", "1 to 2000 texts"),
        ("choice", "[1]", "list of texts"),
        ("choice", '["\\ud800"]', "surrogate"),
        ("lark", "start: foo", "foo"),
        ("lark", 'start: a\na[temperature=0.5]: "b"', "temperature"),
        ("lark", 'start: %json {"x-guidance": {"lenient": true}, "not": {}}', "x-guidance"),
        ("lark", 'start: %json {"const": 9007199254740993}', "cannot be enforced exactly"),
        ("lark", 'start: %json {"const": -9223372036854775808}', "cannot be enforced exactly"),
        ("structural_tag", '{"triggers": ["<f"], "structures": [{"begin": "<f", "schema": '
         '{"const": -9223372036854775808}}]}', "cannot be enforced exactly"),
        ("lark", 'start: %json {"not": {"pattern": "a"}}', "keyword 'not' is not supported"),
        ("lark", 'root ::= "a', "not valid GBNF"),
        ("structural_tag", '{"triggers": ["<f"], "structures": []}', "1 to 64"),
        ("structural_tag", '{"format": {}}', "'triggers'"),
        ("structural_tag", '{"triggers": ["<f"], "structures": [{"begin": "x"}]}', "none of the"),
    ],
)  # fmt: skip
def test_what_is_refused(
    compiler: GrammarCompiler, kind: GrammarKind, source: str, message: str
) -> None:
    with pytest.raises(RequestError) as caught:
        compiler.compile(GrammarSpec(kind, source, param="field"))
    assert message in str(caught.value)
    assert (caught.value.param, caught.value.status) == ("field", 400)
    assert not any(word in str(caught.value) for word in ("non-verbose", "panic", "limits."))


def chain(num_rules: int, rule: str) -> str:
    """Returns a Lark grammar of terminals that refer to each other."""
    rules = [rule.format(this=f"R{i}", next=f"R{i + 1}") for i in range(num_rules)]
    return "\n".join(["start: R0", *rules, f'R{num_rules}: "a"'])


def references(count: int) -> str:
    """Returns a JSON schema of arrays within arrays, by references."""
    defs = {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(count)}
    return json.dumps({"$ref": "#/$defs/d0", "$defs": {**defs, f"d{count}": {}}})


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("lark", chain(450, '{this}: {next} "b"')),
        ("lark", chain(240, '{this}: ("b" {next})*')),
        ("lark", chain(200, "{this}: {next} {next}")),
        ("lark", chain(400, "{this}: {next}{{1,9}}")),
        ("lark", chain(2000, '{this}: {next} "b"')),
        ("lark", "start: " + "(" * 400 + '"a"' + ")" * 400),
        ("lark", "root ::= " + "(" * 4000 + '"a"' + ")" * 4000),
        ("regex", "a?" * 1024),
        ("regex", "(" * 1000 + "a" + ")" * 1000),
        ("regex", "((a{0,100}){0,100}){0,100}"),
        ("json_schema", references(490)),
        ("json_schema", references(2500)),
        ("json_schema", '{"items":' * 5000 + "{}" + "}" * 5000),
        ("json_schema", json.dumps({"allOf": [{"multipleOf": k} for k in (101, 103, 107, 109)]})),
        ("json_schema", json.dumps({"properties": {f"p{i}": {} for i in range(8000)}})),
        ("json_schema", json.dumps({"properties": {f"p{i}": {} for i in range(1000)}})),
        ("json_schema", json.dumps({"enum": list(range(8000))})),
        ("json_schema", json.dumps({"type": "array", "minItems": 10**6, "items": {}})),
        ("json_schema", json.dumps({"type": "string", "maxLength": 10**6})),
        ("json_schema", json.dumps({"patternProperties": {f"^{i}_": {} for i in range(300)}})),
        ("json_schema", json.dumps({"pattern": "(a|b?)" * 300})),
    ],
)  # fmt: skip
def test_large_and_deep_grammars_end_well(
    compiler: GrammarCompiler, kind: GrammarKind, source: str
) -> None:
    """They are refused or compiled; none takes long, or all of the stack."""
    with contextlib.suppress(RequestError, GenerationError):
        state = compiler.compile(GrammarSpec(kind, source)).start()
        for _ in range(3):
            if state.is_finished:
                break
            state.accept([min(allowed(state) - {END} or {END})])


def test_a_state_of_its_own_for_each_sequence(compiler: GrammarCompiler) -> None:
    compiled = compiler.compile(GrammarSpec("choice", '["ab", "cd"]'))
    first, second = compiled.start(), compiled.start()
    before = allowed(second)
    first.accept([min(before)])
    assert allowed(second) == before != allowed(first)


def test_the_end(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    state = compiler.compile(GrammarSpec("regex", "a{1,2}")).start()
    (a,) = tokenizer.encode("a", False)
    assert not state.is_finished
    assert END not in allowed(state)
    state.accept([a])
    assert {END, a} <= allowed(state)
    assert not state.is_finished
    state.accept([a])
    assert state.is_finished
    assert allowed(state) == {END}
    state.accept([END])
    assert state.is_finished


def test_a_token_that_is_not_allowed(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    state = compiler.compile(GrammarSpec("regex", "a+")).start()
    with pytest.raises(GenerationError, match="grammar"):
        state.accept(tokenizer.encode("b", False))


def test_forced_tokens_are_those_of_the_tokenizer(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    state = compiler.compile(GrammarSpec("regex", "The capital of France is [A-Z][a-z]*")).start()
    forced = state.forced()
    expected = tokenizer.encode("The capital of France is", False)
    assert len(forced) >= 4
    assert forced == expected[: len(forced)]
    state.accept(forced)
    assert compiler.compile(GrammarSpec("regex", "[ab]c")).start().forced() == []


def test_a_limit_of_the_parser_ends_the_request_alone(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    state = compiler.compile(GrammarSpec("regex", "(.*a.{30}b)*")).start()
    rng = random.Random(0)
    tokens = [tokenizer.encode(character, False)[0] for character in "abc"]

    def write() -> None:
        for _ in range(100_000):
            allowed(state)
            state.accept([rng.choice(tokens)])

    with pytest.raises(GenerationError, match="cannot follow the grammar"):
        write()


@pytest.mark.parametrize(
    ("family", "vocab_size"), [("mistral", 32_000), ("smollm2", VOCAB_SIZE + 300)]
)
def test_tokenizers(tokenizer_cache: Path, family: str, vocab_size: int) -> None:
    """Byte-level and sentencepiece, with fewer tokens than the model has: whatever is written
    follows the schema, and forced tokens decode to the text."""
    tokenizer = Tokenizer.load(getattr(real_tokenizers, f"{family}_folder")(tokenizer_cache))
    assert tokenizer.eos_token_id is not None
    compiler = GrammarCompiler(tokenizer, vocab_size, [tokenizer.eos_token_id])
    writer = RandomWriter(tokenizer, vocab_size, tokenizer.eos_token_id)
    compiled = compiler.compile(GrammarSpec("json_schema", json.dumps(PERSON)))
    rng, outputs = random.Random(0), []
    for _ in range(20):
        if (text := writer.write(compiled.start(), rng)) is not None:
            outputs.append(text)
            jsonschema.validate(json.loads(text), PERSON)
    assert len(outputs) >= 10
    state = compiler.compile(GrammarSpec("choice", '["Répondre à 世界"]')).start()
    written: list[int] = []
    while not state.is_finished:
        tokens = state.forced() or [min(allowed(state, vocab_size))]
        state.accept(tokens)
        written += tokens
    assert tokenizer.decode(written) == "Répondre à 世界"


def one_character_tokenizer(vocab_size: int) -> Tokenizer:
    """The tokenizer of `tests.gpu.random_models`: most of its tokens are no bytes."""
    backend = Backend(models.BPE({chr(0x100 + token): token for token in range(vocab_size)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel()
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, {}, None)


def test_a_vocabulary_without_most_characters() -> None:
    compiler = GrammarCompiler(one_character_tokenizer(1000), 1000, [])
    state = compiler.compile(GrammarSpec("regex", r"[\x00-\x20]{3}")).start()
    for _ in range(3):
        assert compiler.end_tokens == (999,)
        tokens = allowed(state, 1000) - {999}
        assert tokens <= set(range(0x24))
        state.accept([min(tokens)])
    assert state.is_finished
    with pytest.raises(RequestError, match="cannot spell"):
        compiler.compile(GrammarSpec("json_object"))


def test_a_character_that_the_vocabulary_lacks_is_no_fault_of_the_server() -> None:
    compiler = GrammarCompiler(one_character_tokenizer(1000), 1000, [])
    state = compiler.compile(GrammarSpec("regex", r"[\x00-\x02]Z")).start()
    state.accept([min(allowed(state, 1000))])
    (other,) = allowed(state, 1000)  # where no token spells the text, the library allows some other
    with pytest.raises(NoTokenError, match="cannot spell"):
        state.accept([other])


def test_random_schemas(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """Of random schemas, those that are not refused are followed: every output that ended by
    itself parses and validates."""
    writer, rng = RandomWriter(tokenizer, VOCAB_SIZE, END), random.Random(0)
    num_refused = num_open = num_valid = 0
    for schema in random_schemas(100):
        try:
            compiled = compiler.compile(GrammarSpec("json_schema", json.dumps(schema)))
        except RequestError:
            num_refused += 1
            continue
        text = writer.write(compiled.start(), rng)
        if text is None:
            num_open += 1
            continue
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))
        num_valid += 1
    assert num_valid >= 50
    assert num_refused < 50
    assert num_open < 20
