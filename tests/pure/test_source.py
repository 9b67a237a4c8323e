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
    with pytest.raises(InvalidPrompt, match=r"absent cannot be read: No such file"):
        TextPart.of_file(tmp_path / "absent")
    with pytest.raises(InvalidPrompt, match=r"cannot be read|is not a file"):
        TextPart.of_file(tmp_path)


def test_bytes_that_are_no_text_are_named_with_their_place(tmp_path):
    path = tmp_path / "latin1.txt"
    path.write_bytes("é".encode() * PIECE_BYTES + b"caf\xe9")
    with pytest.raises(InvalidPrompt, match=rf"byte 0xe9 at offset {2 * PIECE_BYTES + 3}\. Convert it"):
        list(TextPart.of_file(path).pieces())
