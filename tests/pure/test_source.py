"""Text parts: what can be read twice, what is refused, and where bytes are no text."""

import io
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InvalidPrompt
from penstock.prompt.source import PIECE_BYTES, TextPart


def test_a_text_knows_its_bytes_and_is_one_piece():
    part = TextPart.of_text("é!")
    assert (part.num_bytes, [*part.pieces()]) == (3, ["é!"])


@given(st.text(max_size=40), st.integers(1, 7))
def test_a_stream_gives_its_text_however_its_bytes_are_cut(text, num_bytes):
    class Trickle(io.BytesIO):
        def read1(self, size=-1):
            return super().read(num_bytes)

    part = TextPart(stream=Trickle(text.encode()), name="a stream")
    assert part.num_bytes is None
    assert "".join(part.pieces()) == text


def test_a_file_is_read_piece_by_piece_as_often_as_one_likes(tmp_path):
    path = tmp_path / "long.txt"
    path.write_text("a" * (2 * PIECE_BYTES + 1))
    part = TextPart.of_file(path)
    assert part.num_bytes == 2 * PIECE_BYTES + 1
    for _ in range(2):
        assert [len(piece) for piece in part.pieces()] == [PIECE_BYTES, PIECE_BYTES, 1]


def test_a_pipe_is_a_file_that_can_be_read_once(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    holder = os.open(pipe, os.O_RDWR)  # so that nobody waits for the other end
    part = TextPart.of_file(pipe)
    os.close(holder)
    assert part.num_bytes is None


def test_what_is_no_file_is_refused_with_its_name(tmp_path):
    with pytest.raises(InvalidPrompt, match=r"absent cannot be read: No such file or directory\. Give the path of"):
        TextPart.of_file(tmp_path / "absent")
    with pytest.raises(InvalidPrompt, match=r"(cannot be read: Is a directory|is not a file)\. Give the path of"):
        TextPart.of_file(tmp_path)


def test_a_binary_file_is_not_told_to_be_converted_and_a_text_of_two_bytes_a_letter_is(tmp_path):
    (program := tmp_path / "program").write_bytes(b"\x7fELF\x02\x01\x01\x00\xf0\x3e")
    (wide := tmp_path / "wide.txt").write_bytes("a penstock".encode("utf-16"))
    with pytest.raises(
        InvalidPrompt, match=r"is not text: it has byte 0xf0 at offset 8, and zero bytes\. Convert it to text"
    ):
        list(TextPart.of_file(program).pieces())
    with pytest.raises(InvalidPrompt, match=r"byte 0xff at offset 0\. Convert it, for example with iconv"):
        list(TextPart.of_file(wide).pieces())


def test_bytes_that_are_no_text_are_named_with_their_place(tmp_path):
    path = tmp_path / "latin1.txt"
    path.write_bytes("é".encode() * PIECE_BYTES + b"caf\xe9")
    with pytest.raises(InvalidPrompt, match=rf"byte 0xe9 at offset {2 * PIECE_BYTES + 3}\. Convert it"):
        list(TextPart.of_file(path).pieces())
