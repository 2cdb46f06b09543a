"""Byte-level BPE: lossless on anything, special tokens that text cannot forge, foreign files as they come."""

import functools
import json
import os
import pickle

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from gptoss.data.tokenizers import EOS_TOKEN, Tokenizer, train_tokenizer

TEXTS = ["def add(a, b):\n    return a + b\n", "the cat and the hat and the bat 2026\n"] * 20


@functools.cache
def train_once():
    return train_tokenizer(TEXTS, 300)


@pytest.fixture
def tokenizer():
    return train_once()


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(codec="utf-8")))
def test_any_unicode_comes_back(text):
    tokenizer = train_once()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode_bytes(ids) == text.encode()
    assert all(0 <= i < tokenizer.vocab_size for i in ids)


@settings(max_examples=200, deadline=None)
@given(data=st.binary())
def test_any_bytes_come_back(data):
    tokenizer = train_once()
    assert tokenizer.decode_bytes(tokenizer.encode_bytes(data)) == data


def test_every_byte_is_one_token(tokenizer):
    for byte in range(256):
        assert len(tokenizer.encode_bytes(bytes([byte]))) == 1
    assert tokenizer.is_lossless


def test_lone_surrogates_follow_the_stated_rules(tokenizer):
    assert tokenizer.decode_bytes(tokenizer.encode("a\udcffb")) == b"a\xffb"
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"
    assert tokenizer.encode_batch(["x", "a\udcffb"]) == [
        tokenizer.encode("x"),
        tokenizer.encode("a\udcffb"),
    ]


def test_half_a_character_decodes_to_the_replacement_sign(tokenizer):
    ids = tokenizer.encode("é")
    assert len(ids) == 2  # never seen in training, so two bytes
    assert tokenizer.decode(ids[:1]) == "\ufffd"


def test_digits_stay_single(tokenizer):
    repeated = train_tokenizer(["2026 2026 2026 x2026"] * 100, 300)
    assert len(repeated.encode("2026")) == 4


def test_special_token_is_one_id_only_when_allowed(tokenizer):
    assert tokenizer.encode(EOS_TOKEN, allow_special=True) == [tokenizer.eos_token_id]
    as_text = tokenizer.encode(f"a{EOS_TOKEN}b")
    assert tokenizer.eos_token_id not in as_text
    assert tokenizer.decode(as_text) == f"a{EOS_TOKEN}b"
    assert tokenizer.decode([tokenizer.eos_token_id]) == EOS_TOKEN
    assert tokenizer.encode_batch([EOS_TOKEN, "x"])[0] == tokenizer.encode(EOS_TOKEN)


def test_merges_join_frequent_pairs(tokenizer):
    assert tokenizer.vocab_size <= 300
    assert len(tokenizer.encode(" the")) == 1
    assert len(tokenizer.encode(" zqx")) == 4


def test_training_twice_gives_the_same_tokenizer(tokenizer):
    assert train_tokenizer(iter(TEXTS), 300).sha256 == tokenizer.sha256
    assert train_tokenizer(TEXTS, 265).sha256 != tokenizer.sha256


def test_saving_loading_and_pickling_keep_everything(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "tokenizer.json")
    for copy in (
        Tokenizer.load(tmp_path),
        Tokenizer.load(tmp_path / "tokenizer.json"),
        pickle.loads(pickle.dumps(tokenizer)),
    ):
        assert copy.sha256 == tokenizer.sha256
        assert copy.encode("the cat") == tokenizer.encode("the cat")
        assert copy.eos_token_id == tokenizer.eos_token_id
    assert [f.name for f in tmp_path.iterdir()] == ["tokenizer.json"]


def test_hash_ignores_the_files_white_space(tokenizer, tmp_path):
    compact = json.dumps(json.loads(tokenizer.backend.to_str()))
    (tmp_path / "tokenizer.json").write_text(compact)
    assert Tokenizer.load(tmp_path).sha256 == tokenizer.sha256


def test_byte_lengths_add_up_to_the_text(tokenizer):
    text = "the cat é 日本 <|x|>"
    lengths = tokenizer.token_byte_lengths()
    assert lengths[tokenizer.encode(text)].sum() == len(text.encode())
    assert lengths[tokenizer.eos_token_id] == 0


def foreign(vocabulary, eos, padding=False):
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in eos])
    if padding:
        backend.enable_truncation(4)
        backend.enable_padding(length=8)
    return backend


def test_llama_3_style_file_loads_with_its_own_eos(tmp_path):
    alphabet = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = foreign(
        alphabet, ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"], padding=True
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.eos_token == "<|end_of_text|>"
    assert tokenizer.eos_token_id == 257
    assert Tokenizer.load(tmp_path, eos_token="<|eot_id|>").eos_token_id == 258
    # the file asked for 4 tokens at most, padded to 8
    assert len(tokenizer.encode("a text of 21 characters")) == 23
    assert tokenizer.decode(tokenizer.encode("naïve")) == "naïve"


def test_vocabulary_with_holes_counts_to_its_last_id():
    # o200k: 199,998 merges, <|endoftext|> at 199,999, the last special token at 200,018
    vocabulary = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary |= {EOS_TOKEN: 199_999, "<|endofprompt|>": 200_018}
    tokenizer = Tokenizer(foreign(vocabulary, [EOS_TOKEN, "<|endofprompt|>"]))
    assert tokenizer.vocab_size == 200_019
    assert tokenizer.eos_token_id == 199_999
    with pytest.raises(ValueError, match="token id 200000"):
        tokenizer.decode([200_000])


@pytest.mark.parametrize("bad", [-1, 300_000])
def test_ids_outside_the_vocabulary_are_refused(tokenizer, bad):
    with pytest.raises(ValueError, match=f"token id {bad}"):
        tokenizer.decode([bad])


def test_bad_requests_say_what_to_do(tokenizer, tmp_path):
    with pytest.raises(ValueError, match=r"vocab_size = 256: expected at least 257"):
        train_tokenizer(TEXTS, 256)
    with pytest.raises(ValueError, match="empty"):
        train_tokenizer([], 300)
    with pytest.raises(ValueError, match="special_tokens"):
        train_tokenizer(TEXTS, 300, special_tokens=["a", "a"])
    with pytest.raises(FileNotFoundError, match="no tokenizer at"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{not json")
    with pytest.raises(ValueError, match=r"tokenizer\.json: not a tokenizer"):
        Tokenizer.load(tmp_path)
    with pytest.raises(ValueError, match="end-of-text"):
        Tokenizer(foreign({"a": 0}, []))


def test_calls_leave_no_threads_flag_behind(tokenizer, capfd):
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    train_tokenizer(TEXTS, 300).encode_batch(TEXTS)
    assert os.environ.get("TOKENIZERS_PARALLELISM") == before
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    assert "forked" not in capfd.readouterr().err
