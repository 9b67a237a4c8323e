import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(scope="module")
def audit():
    spec = importlib.util.spec_from_file_location("audit", SCRIPTS / "audit.py")
    module = sys.modules["audit"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


KNOWN = {"name": "jinja2", "version": "3.1.6", "vulns": []}
UNKNOWN = {"name": "torch", "skip_reason": "not found"}
BAD = {"name": "pillow", "version": "1.0", "vulns": [{"id": "PYSEC-1", "fix_versions": ["2.0"]}]}


@pytest.mark.parametrize(
    ("packages", "words"),
    [
        ([KNOWN, UNKNOWN], "1 packages audited, 0 vulnerabilities, 1 unknown (torch)"),
        ([UNKNOWN], "SKIPPED"),
        ([KNOWN, BAD], "2 packages audited, 1 vulnerabilities"),
    ],
)
def test_an_audit_says_what_it_looked_at(audit, packages, words):
    assert words in audit.Audit.model_validate({"dependencies": packages}).summary()


def test_a_finding_names_the_version_that_mends_it(audit):
    found = audit.Audit.model_validate({"dependencies": [KNOWN, BAD]}).findings()
    assert found == ["pillow 1.0: PYSEC-1, mended in 2.0"]
