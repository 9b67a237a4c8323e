"""Property tests take as long as the machine needs; where a change is judged, their examples are the same each time."""

import os

from hypothesis import settings

settings.register_profile("people", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "people")
