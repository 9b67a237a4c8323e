"""Images inside requests: data URLs, decoded within limits. Nothing is fetched and no path is opened."""

from __future__ import annotations

import base64
import binascii
import re

from penstock.errors import InvalidMedia

_DATA_URL = re.compile(r"data:image/[a-z0-9.+-]+;base64,", flags=re.IGNORECASE)


def image_bytes(url: str, max_bytes: int) -> bytes:
    match = _DATA_URL.match(url)
    if match is None:
        shown = url[:40] + ("..." if len(url) > 40 else "")
        raise InvalidMedia(f"The image {shown!r} is no data URL. Send data:image/...;base64,...; nothing is fetched.")
    encoded = url[match.end() :]
    num_bytes = len(encoded) * 3 // 4
    if num_bytes > max_bytes:
        raise InvalidMedia(f"An image has {num_bytes:,} bytes; {max_bytes:,} is the most. Scale it down.")
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidMedia("The base64 of an image is broken. Encode it again.") from None
