"""What users and programs read stays as it was, but for what a change means to change.

`PENSTOCK_WRITE_GOLDEN=1` writes the documents anew; the difference then belongs into the commit that makes it.
"""

import os

import pytest
from golden_outputs import DOCUMENTS, GOLDEN, Golden, written

pytestmark = pytest.mark.evidence


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    golden = Golden(tmp_path_factory.mktemp("golden"))
    return {name: make(golden) for name, make in DOCUMENTS.items()}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_document_is_as_it_was(documents, name):
    path = GOLDEN / f"{name}.json"
    if os.environ.get("PENSTOCK_WRITE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(written(documents[name]))
    assert written(documents[name]) == path.read_text()
