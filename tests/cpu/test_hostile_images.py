"""Images that are bombs, animated, truncated or of odd sizes are refused, or read as one picture."""

import io
import struct
import zlib

import pytest
from PIL import Image

from penstock.errors import InvalidMedia
from penstock.foreign.processor import open_image, open_images
from penstock.plan.machine import resident_bytes


def png(width, height, data):
    def part(name, content):
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + part(b"IHDR", head) + part(b"IDAT", zlib.compress(data)) + part(b"IEND", b"")


@pytest.mark.parametrize("size", [(2**31 - 1, 2**31 - 1), (2**31 - 1, 1), (100_000, 100_000), (10_000, 8_000)])
def test_a_picture_that_claims_too_many_pixels_is_refused_before_it_takes_memory(size):
    before = resident_bytes()
    with pytest.raises(InvalidMedia):
        open_image(png(*size, bytes(1000)))
    assert resident_bytes() - before < 50_000_000


def test_pictures_that_have_too_many_pixels_together_are_refused_before_any_takes_memory():
    content = io.BytesIO()
    Image.new("1", (8000, 8000)).save(content, format="PNG")  # some 8 kB
    before = resident_bytes()
    with pytest.raises(InvalidMedia, match="The 100 images have 6400 megapixels together; the limit is 256"):
        open_images([content.getvalue()] * 100)
    assert resident_bytes() - before < 50_000_000


def test_a_picture_with_more_data_than_pixels_takes_the_memory_of_its_pixels():
    before = resident_bytes()
    assert open_image(png(8, 8, bytes(400_000_000))).size == (8, 8)
    assert resident_bytes() - before < 500_000_000


def test_a_truncated_picture_is_refused():
    whole = io.BytesIO()
    Image.effect_noise((64, 64), 50).save(whole, format="PNG")
    with pytest.raises(InvalidMedia, match="not an image that can be read"):
        open_image(whole.getvalue()[:2000])


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG"])
def test_of_an_animation_the_first_picture_is_read(form):
    frames = [Image.new("RGB", (8, 8), color) for color in ("white", *(["black"] * 500))]
    content = io.BytesIO()
    frames[0].save(content, format=form, save_all=True, append_images=frames[1:])
    image = open_image(content.getvalue())
    assert (image.size, image.getpixel((0, 0))) == ((8, 8), (255, 255, 255))


@pytest.mark.parametrize(
    "content", [b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n", b""]
)
def test_what_would_start_a_program_or_is_empty_is_refused(content):
    with pytest.raises(InvalidMedia) as refused:
        open_image(content)
    assert "0x" not in str(refused.value), "an address in memory is told"
