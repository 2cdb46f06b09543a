"""A stream never shows half a character, and what it shows joins to the whole text."""

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from gptoss.data.tokenizers import train_tokenizer
from gptoss.inference.text import TextStream, encode_text


def pieces(tokenizer, ids: list[int]) -> list[str]:
    stream = TextStream(tokenizer)
    return [stream.push(token) for token in ids] + [stream.flush()]


def test_bytes_wait_for_the_rest_of_their_character(byte_tokenizer):
    # é is two bytes, € three, 😀 four
    assert pieces(byte_tokenizer, list("aé€😀b".encode())) == [
        *("a", "", "é", "", "", "€", "", "", "", "😀", "b", "")
    ]


def test_a_character_that_never_becomes_whole_is_replaced_at_the_end(byte_tokenizer):
    assert pieces(byte_tokenizer, list("a€".encode())[:-1]) == ["a", "", "", "\ufffd"]


@given(text=st.text(max_size=40))
def test_the_pieces_join_to_the_text(byte_tokenizer, text):
    shown = pieces(byte_tokenizer, list(text.encode()))
    assert "".join(shown) == text
    assert shown[-1] == ""


@given(data=st.binary(max_size=40).filter(lambda b: max(b, default=0) < 250))
def test_any_bytes_stream_as_they_decode_at_once(byte_tokenizer, data):
    shown = pieces(byte_tokenizer, list(data))
    assert "".join(shown) == data.decode("utf-8", errors="replace")


def test_bytes_that_are_no_text_do_not_hold_the_stream_back_for_ever(byte_tokenizer):
    shown = pieces(byte_tokenizer, [0x80, 0x80, 0x80, 0x80, 0x80, ord("a"), ord("b")])
    assert "".join(shown) == "\ufffd" * 5 + "ab"
    assert any(shown[:5])  # something came before the next whole character


def test_an_id_without_a_token_stands_for_no_text(bytes_tokenizer):
    assert pieces(bytes_tokenizer, [ord("a"), 251, ord("b")]) == ["a", "", "b", ""]


def test_a_trained_byte_level_tokenizer_streams_losslessly():
    text = "naïve café – 東京 😀 costs €5\n" * 3
    tokenizer = train_tokenizer([text], 270)
    ids = encode_text(tokenizer, text)
    assert "".join(pieces(tokenizer, ids)) == text
    assert "\ufffd" not in "".join(pieces(tokenizer, ids))


def test_encodings_with_ids_are_understood():
    class Library:
        def encode(self, text):
            return SimpleNamespace(ids=[4, 5])

    assert encode_text(Library(), "x") == [4, 5]
