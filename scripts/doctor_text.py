"""Puts what `penstock doctor` prints on this machine into its page."""

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "doctor.md"
PLACE = re.compile(r"(<!-- doctor begin -->\n).*?(<!-- doctor end -->)", flags=re.DOTALL)


def main() -> None:
    command = [sys.executable, "-m", "penstock.cli.main", "doctor"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout.rstrip()
    text = f"```text\n$ penstock doctor\n{shown}\n```\n"
    page = PAGE.read_text(encoding="utf-8")
    assert PLACE.search(page), f"{PAGE} has no place for it"
    PAGE.write_text(PLACE.sub(lambda found: found[1] + text + found[2], page), encoding="utf-8")


if __name__ == "__main__":
    main()
