"""Tokenizers behave as in transformers: ids, first tokens, rendered conversations, decoded texts and files."""

import inspect
import json
import re
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from gpt4d.chat import ids_of
from gpt4d.config import DataConfig
from gpt4d.data import chat_template, prepare, tokenizers, transformers_tokenizer
from gpt4d.data.chat_template import ChatEncoder
from gpt4d.data.conversations import Conversation
from gpt4d.data.corpus import corpus as prepared
from gpt4d.data.documents import Document
from gpt4d.data.preparation import Encoding
from tests.support.chat import TEMPLATE, assistant, user, write_tokenizer
from tests.support.data_files import one_line
from tests.support.grids import full

START = "<|im_start|>"
NAMED = "".join(f"{{{{ {name} }}}}|" for name in PreTrainedTokenizerBase.SPECIAL_TOKENS_ATTRIBUTES) + TEMPLATE
ADDED = {"content": "alpha", "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
NEW = ("alpha", False), ("<n>", True)
OLD = {"__type": "AddedToken", **ADDED, "content": START, "rstrip": True}
KEYS = {  # values of each key of tokenizer_config.json that transformers reads
    **{key: ["<new>", START, OLD] for key in PreTrainedTokenizerBase.SPECIAL_TOKENS_ATTRIBUTES},
    "additional_special_tokens": [["<new>", START], ["alpha"]],
    "extra_special_tokens": [["<new>", START], {"image_token": "<new>"}],
    "image_token": ["<new>"],
    "model_specific_special_tokens": [{"image_token": "<new>"}],
    "added_tokens_decoder": [{"275": {**ADDED, "content": name, "special": special}} for name, special in NEW],
    "add_bos_token": [True, False],
    "add_eos_token": [True, False],
    "add_prefix_space": [True],
    "clean_up_tokenization_spaces": [True],
    "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": [True],
    "split_special_tokens": [True],
    "padding_side": ["left"],
    "truncation_side": ["left"],
    "model_max_length": [3],
    "max_len": [3],
    "max_length": [3],
    "processor_class": ["Other"],
    "verbose": [False],
    "stride": [1],
    "truncation_strategy": ["only_first"],
    "pad_token_type_id": [1],
    "pad_to_multiple_of": [4],
    "tokenizer_truncation": [{"max_length": 2, "stride": 0, "strategy": "longest_first", "direction": "right"}],
    "tokenizer_padding": [{"pad_token": START}],
    "model_input_names": [["input_ids"]],
    "chat_template": [TEMPLATE + "end", *([{"name": name, "template": name + TEMPLATE}] for name in ("default", "a"))],
    "response_schema": [{}],
    "response_template": ["x"],
    "prefix": ["alpha "],
    "chat_control_tokens": [["alpha"]],
    "fast_tokenizer_files": [["tokenizer.json", "tokenizer.4.0.0.json"]],
    "fix_mistral_regex": [True],
    "backend": ["tokenizers"],
    "legacy": [True, False],
    "name_or_path": ["other"],
    "files_loaded": [[]],
    "vocab_file": ["/etc/passwd"],
    "unk_id": [3],
    "tokenizer_class": [
        "PreTrainedTokenizerFast", "TokenizersBackend", "LlamaTokenizer", "LlamaTokenizerFast", "GPT2Tokenizer",
        "Qwen2Tokenizer", "GemmaTokenizer", "CodeLlamaTokenizer", "BertTokenizer", "T5Tokenizer", "CohereTokenizer",
    ],
}  # fmt: skip
# Values that only arguments of Python have, and keys that a file cannot set.
ARGUMENTS = {
    "_json_padding", "_json_truncation", "_spm_precompiled_charsmap", "gguf_file", "merges", "post_processor",
    "tokenizer", "tokenizer_file", "tokenizer_object", "vocab", "init_inputs", "return_token_type_ids",
    "return_attention_mask",
}  # fmt: skip
SAMPLE = {("eos_token", 0), ("chat_template", 2), ("split_special_tokens", 0), ("tokenizer_class", 2), ("unk_token", 0)}
CASES = [(key, number) for key, values in KEYS.items() for number in range(len(values))]
TEXTS = ["alpha beta", f"alpha {START}user\n beta<new> gamma.", "", " é 語 don't , x"]


def test_the_keys_that_transformers_reads_are_in_the_table():
    sources = map(inspect.getsource, (PreTrainedTokenizerBase.__init__, PreTrainedTokenizerFast.__init__))
    read = {key for text in sources for key in re.findall(r"kwargs\.(?:pop|get|setdefault)\(\s*\"(\w+)\"", text)}
    assert len(read) > 20 and read - ARGUMENTS <= KEYS.keys()


def ours(directory):
    """Return a tokenizer's files after data.tokenizer=DIR, and transformers' object of a checkpoint with them."""
    files = transformers_tokenizer.files_of("data.tokenizer", str(directory))
    return files, transformers_tokenizer.load(files, directory)


def rendered(tokenizer, messages, tools=None):
    return tokenizer.apply_chat_template(messages, tools, tokenize=True)["input_ids"]


MESSAGES = [user("alpha é"), assistant(f"beta {START} x")]


@pytest.mark.parametrize(("key", "number"), [case if case in SAMPLE else full(*case) for case in CASES])
def test_a_tokenizer_with_another_setting_behaves_as_in_transformers_or_is_one_line(tmp_path, key, number):
    settings = {"chat_template": NAMED, "bos_token": START, key: KEYS[key][number]}
    source = write_tokenizer(tmp_path / "source", first=[START], **settings)
    compare(source, tmp_path, refused=key == "fast_tokenizer_files", splits=key == "split_special_tokens")


def compare(source, directory, refused=False, splits=False):
    """Compare a tokenizer with that of transformers, in prompts, an export, decoded texts and conversations.

    ``refused``: it is one line. ``splits``: it encodes names of special tokens as text.
    """
    theirs = expected = None
    with suppress(Exception):  # the class needs another vocabulary
        theirs = AutoTokenizer.from_pretrained(source)
        expected = [theirs(text).input_ids for text in TEXTS]
    if refused or expected is None:
        with one_line("not a usable tokenizer|cannot encode"):
            files, loaded = ours(source)
            with tokenizers.library_errors("cannot encode: %s"):
                loaded.encode(TEXTS[0])
        return
    files, loaded = ours(source)
    plain, exported = tokenizers.parse(files, source), directory / "exported"
    exported.mkdir()
    transformers_tokenizer.write(plain, files, exported, 48)
    for again in (loaded, AutoTokenizer.from_pretrained(exported)):
        assert [again.encode(text) for text in TEXTS] == expected
        for ids in expected:
            for skip in (False, True):
                assert again.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    if not splits:
        assert [plain.encode(text).ids for text in TEXTS] == expected
    assert tokenizers.vocabulary(plain) == max(theirs.get_vocab().values()) + 1
    text = theirs.encode(TEXTS[0], add_special_tokens=False)
    first = expected[0].index(text[0])
    assert tokenizers.first_tokens(plain) == expected[0][:first]
    for other in ([], text[:2]):
        again = transformers_tokenizer.load(tokenizers.with_first_tokens(files, other, source), source)
        assert [again.encode(text) for text in TEXTS] == [[*other, *ids[first:]] for ids in expected]
    try:
        chat = rendered(theirs, MESSAGES)
    except ValueError:
        with one_line(
            r"here: the chat template cannot render the conversation \(This model has multiple chat templates"
        ):
            ChatEncoder(files, source, "all").encode(Conversation(MESSAGES), "here")
        return
    assert ChatEncoder(files, source, "all").encode(Conversation(MESSAGES), "here")[0] == chat


def sentence_pieces(model: str) -> Tokenizer:
    """Return a tokenizer as converted from SentencePiece, with <s> before a text."""
    letters = sorted({*"".join(TEXTS), "▁"} - {" ", "é"})
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    pieces += ["be", "ta", "beta", "▁beta"]
    ids = {piece: number for number, piece in enumerate(pieces)}
    merges = [("b", "e"), ("t", "a"), ("be", "ta"), ("▁", "beta")]
    made = Tokenizer(
        models.BPE(ids, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
        if model == "BPE"
        else models.Unigram([(piece, -float(number)) for piece, number in ids.items()], 0, byte_fallback=True)
    )
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    made.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", [("<s>", 1)])
    made.enable_padding(pad_token="<pad>")  # which transformers adds to the special tokens
    return made


CLASSES = [
    "PreTrainedTokenizerFast", "LlamaTokenizer", "GemmaTokenizer", "T5Tokenizer", "CohereTokenizer", "RobertaTokenizer"
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "model"),
    [
        ("LlamaTokenizer", "BPE"),
        ("RobertaTokenizer", "BPE"),
        *(full(kind, model) for kind in CLASSES for model in ("BPE", "Unigram")),
    ],
)
def test_a_tokenizer_of_sentence_pieces_is_the_one_that_its_class_builds(tmp_path, kind, model):
    source = tmp_path / "source"
    source.mkdir()
    sentence_pieces(model).save(str(source / "tokenizer.json"))
    settings = {"tokenizer_class": kind, "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (source / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": NAMED}))
    compare(source, tmp_path)


def test_every_file_that_transformers_reads_with_a_tokenizer_is_kept():
    names = {"added_tokens.json", "special_tokens_map.json", "tokenizer_config.json", "chat_template.jinja"}
    for path in Path(transformers.__file__).parent.rglob("*token*.py"):
        for table in re.findall(r"VOCAB_FILES_NAMES\s*=\s*{(.*?)}", path.read_text(encoding="utf-8"), re.DOTALL):
            names |= set(re.findall(r':\s*"([^"]+)"', table))
    assert len(names) > 20 and all(map(tokenizers.belongs, names))


TOOLS = [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}]
TOOL_USE = "TOOLS {{ tools | tojson }}\n" + NAMED


@pytest.mark.parametrize("place", ["settings", "files"])
def test_tools_select_the_template_as_in_transformers_after_an_export(tmp_path, place):
    named = [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": TOOL_USE}]
    source = write_tokenizer(tmp_path / "source", named if place == "settings" else None, unk_token=START)
    if place == "files":
        (source / tokenizers.TEMPLATES).mkdir()
        (source / tokenizers.TEMPLATES / "tool_use.jinja").write_text(TOOL_USE)
        (source / tokenizers.TEMPLATE).write_text(TEMPLATE)
    theirs, (files, _) = AutoTokenizer.from_pretrained(source), ours(source)
    (tmp_path / "exported").mkdir()
    transformers_tokenizer.write(tokenizers.parse(files, source), files, tmp_path / "exported", 48)
    again, expected = AutoTokenizer.from_pretrained(tmp_path / "exported"), []
    for tools in (None, TOOLS):
        expected.append(rendered(theirs, MESSAGES, tools))
        assert ChatEncoder(files, source, "all").encode(Conversation(MESSAGES, 0, tools), "here")[0] == expected[-1]
        assert rendered(again, MESSAGES, tools) == expected[-1]
    assert expected[0] != expected[1]


END = "<|im_end|>"
PROCESSORS = {"none": ((), ()), "first": ((START,), ()), "both": ((START,), (END,)), "two": ((END, START), ())}


@pytest.mark.parametrize("name", PROCESSORS)
def test_documents_begin_with_the_first_tokens_unless_the_setting_says_otherwise(corpus, tmp_path, name):
    before, after = PROCESSORS[name]
    source = write_tokenizer(tmp_path / "source", first=before, last=after, bos_token=START)
    theirs, files = AutoTokenizer.from_pretrained(source), ours(source)[0]
    bos, own = theirs.bos_token_id, theirs.convert_tokens_to_ids(list(before))
    paths = {"path": corpus, "cache_dir": str(tmp_path / "cache"), "tokenizer": str(source)}
    config = DataConfig("words", "text", tokenizer_vocab=None, validation_fraction=0, processes=1, **paths)
    bare = prepared(replace(config, begin_of_text=False)).first
    texts = [bare.tokens("train")[start:end].tolist() for start, end in pairwise([0, *bare.document_ends("train")])]
    for chosen, expected in ((None, own), (True, own or [bos]), (False, [])):
        found = prepared(replace(config, begin_of_text=chosen)).first
        assert found.first_tokens == expected
        assert found.tokens("train")[:].tolist() == [token for text in texts for token in (*expected, *text)]
        trained = transformers_tokenizer.load(tokenizers.with_first_tokens(files, expected, source), source)
        last = theirs.convert_tokens_to_ids(list(after))
        for text in TEXTS:
            assert trained.encode(text) == [*expected, *theirs.encode(text, add_special_tokens=False), *last]
        again = replace(config, source="tokens", path=str(found.directory), tokenizer=None)
        for said in (None, bool(expected)):
            assert prepared(replace(again, begin_of_text=said)).first == found
        with one_line(rf"data\.begin_of_text={str(not expected).lower()}: the documents in .* begin with"):
            prepared(replace(again, begin_of_text=not expected))
    if not own:
        assert prepared(config).first == bare, "an equal corpus is in the cache"
        return
    assert any("begin without" in remark for remark in bare.remarks())
    blend = {str(each.directory): 1 for each in (bare, prepared(config).first)}
    with one_line("its documents begin with other tokens than "):
        prepared(replace(config, source="blend", path=None, blend=blend))


def test_a_first_token_needs_a_token(corpus, tmp_path):
    source = write_tokenizer(tmp_path / "source")
    paths = {"path": corpus, "cache_dir": str(tmp_path / "cache"), "tokenizer": str(source)}
    with one_line(r"data\.begin_of_text=true: the tokenizer has no bos_token; "):
        prepared(DataConfig("words", "text", tokenizer_vocab=None, begin_of_text=True, **paths))


def words(**changes):
    content = json.loads(Tokenizer(models.WordLevel({"alpha": 0, "</s>": 1, "<unk>": 2}, "<unk>")).to_str())
    return json.dumps({**content, **changes})


BPE = models.BPE({"a": 0, "b": 1, "</s>": 2}, [])
HOSTILE = {  # a tokenizer.json, a text, and the error
    "a panic while it is read": (
        words(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAA="}), "a", "not a usable tokenizer"
    ),
    "a panic while it encodes": (
        words(pre_tokenizer={"type": "FixedLength", "length": 0}), "alpha", "a.txt: the tokenizer cannot encode"
    ),
    "no unknown token": (
        words(model={"type": "WordLevel", "vocab": {"</s>": 0}, "unk_token": "<u>"}), "a", "a.txt: .* cannot encode"
    ),
    "no character of the text": (Tokenizer(BPE).to_str(), "cd e", "a.txt: .*none of its characters is in the"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_tokenizer_that_cannot_encode_a_text_is_one_line(tmp_path, name):
    content, text, message = HOSTILE[name]
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with one_line(message):
        transformers_tokenizer.files_of("data.tokenizer", str(path))
        Encoding(path, 0, "uint16", 0.0).encoder()(Document(text, "a.txt"))


@pytest.mark.parametrize(
    ("model", "text", "count"),
    [
        (BPE, "ab cd\nba é", 3),
        (models.WordLevel({"ab": 0, "<u>": 1, "</s>": 2}, "<u>"), "ab cd ba", 2),
        (models.Unigram([("<u>", 0.0), ("ab", -1.0), ("</s>", -2.0)], 0), "abcd ab", 1),
        (None, "é 語 🙂", 0),
    ],
)
def test_characters_and_words_outside_the_vocabulary_are_counted_in_a_warning(tmp_path, model, text, count):
    made = tokenizers.train(["a b"], 300) if model is None else Tokenizer(model)
    if isinstance(model, models.WordLevel):
        made.pre_tokenizer = pre_tokenizers.Whitespace()
    path = tmp_path / "tokenizer.json"
    made.save(str(path))
    (tmp_path / "a.txt").write_text(text)
    config = DataConfig("words", "text", str(tmp_path / "a.txt"), tokenizer=str(path), tokenizer_vocab=None)
    files = prepare.prepare(replace(config, processes=1, validation_fraction=0.0), tmp_path / "out")
    warnings = [f"warning: {count} characters or words are not in the tokenizer's vocabulary"] if count else []
    assert [*files.remarks()] == warnings


LOOP = "{% for a in range(99999) %}"
BOMBS = {
    "endless": (f"{LOOP * 2}{{% endfor %}}{{% endfor %}}", "it takes more than"),
    "long": (f"{LOOP}{{{{ 'alpha' * 999 }}}}{{% endfor %}}", "more than 100,000 characters"),
    "marked": (f"{LOOP}{{{{ 'alpha' * 999 }}}}{{% endfor %}}{{% generation %}}x{{% endgeneration %}}", "characters"),
    "half a character": ("{{ '\\ud800' }}", "the tokenizer cannot encode the rendered conversation .*surrogates not"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_template_beyond_its_limits_is_one_line(tmp_path, monkeypatch, name):
    template, message = BOMBS[name]
    monkeypatch.setattr(chat_template, "TIME_LIMIT_S", 0.2)
    monkeypatch.setattr(chat_template, "MOST_CHARACTERS", 100_000)
    source = write_tokenizer(tmp_path / "source", template)
    files, loaded = ours(source)
    with one_line(f"here: .*{message}"):
        ChatEncoder(files, source, "assistant" if name == "marked" else "all").encode(Conversation(MESSAGES), "here")
    with one_line("the conversation: "):
        ids_of(MESSAGES[:1], loaded)
