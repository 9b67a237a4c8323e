import re
from pathlib import Path

from penstock.cli.hints import OUR_NAMES

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "coming-from.md"
FLAG = re.compile(r"`(-[\w-]+)")


def test_the_guide_and_the_hints_name_the_same_flags():
    """In a row of the guide the flags of others come first and ours comes last."""
    rows = [line.split("|")[2:-1] for line in GUIDE.read_text().splitlines() if line.startswith("|")]
    told = {flag: FLAG.findall(ours) for *others, ours in rows for cell in others for flag in FLAG.findall(cell)}
    known = {flag: ours for flag, ours in told.items() if flag in OUR_NAMES}
    assert len(known) > 10
    assert {flag for flag, ours in known.items() if OUR_NAMES[flag] not in ours} == set()
