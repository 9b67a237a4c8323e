import pytest

from penstock.config import EngineConfig, load_config, parse_bytes, told_budget
from penstock.errors import InvalidSetting


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("6GiB", 6 * 2**30),
        ("6 gib", 6 * 2**30),
        ("6g", 6 * 2**30),
        ("500MB", 500 * 10**6),
        ("1.5KiB", 1536),
        ("123", 123),
        (77, 77),
        ("2tb", 2 * 10**12),
    ],
)
def test_sizes_are_read_as_people_write_them(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["6GiB", "1.2GiB", "500MB", "1.5GB", "512MiB", "900MB", "24GB", "1TB"])
def test_a_budget_is_told_in_the_unit_in_which_it_was_given(text):
    assert told_budget(parse_bytes(text)) == text.replace("1TB", "1000GB")


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "6 GiBs", "six", "1e9", "0x10", "6GiB6"])
def test_other_sizes_are_refused(text):
    with pytest.raises(InvalidSetting, match="Memory"):
        parse_bytes(text)


@pytest.mark.parametrize("value", ["500", 500, " 8 "])
def test_a_budget_without_a_unit_is_asked_about(value, tmp_path):
    with pytest.raises(InvalidSetting, match=r"(500 bytes.* did you mean 500MB|8 bytes.* did you mean 8GiB)\?"):
        load_config({"memory": value}, environment={}, folder=tmp_path)
    assert load_config({"memory": "500000000"}, environment={}, folder=tmp_path).memory == 500_000_000


def test_a_flag_beats_the_environment_beats_the_file_beats_the_default(tmp_path):
    (tmp_path / "penstock.toml").write_text('chunk-size = 100\noverlap = 3\nmemory = "1GiB"\n')
    environment = {"PENSTOCK_CHUNK_SIZE": "200", "PENSTOCK_OVERLAP": "4", "PENSTOCK_STRICT": "yes"}
    config = load_config({"chunk_size": "300", "overlap": None}, environment=environment, folder=tmp_path)
    assert config == EngineConfig(chunk_size=300, overlap=4, memory=2**30, strict=True)


def test_chunk_size_zero_and_auto_are_kept_apart(tmp_path):
    load = lambda value: load_config({}, environment={"PENSTOCK_CHUNK_SIZE": value}, folder=tmp_path).chunk_size  # noqa: E731
    assert load("0") == 0
    assert load("auto") is None


@pytest.mark.parametrize(
    "flags",
    [
        {"chunk_size": "-1"},
        {"chunk_size": "many"},
        {"chunk_size": 2.5},
        {"overlap": -1},
        {"overlap": 8, "chunk_size": 8},
        {"overlap": 16},
        {"memory": 0},
        {"context": 0},
        {"threads": 0},
        {"dtype": "int3"},
        {"device": "tpu"},
        {"strict": "perhaps"},
        {"nonsense": 1},
        {"block_size": 0},
        {"max_chunk_size": 0},
        {"max_running": 0},
    ],
)
def test_values_out_of_range_are_refused_with_the_value(flags, tmp_path):
    with pytest.raises(InvalidSetting):
        load_config(flags, environment={}, folder=tmp_path)


@pytest.mark.parametrize("content", ["chunk-size = ", "chonk-size = 3", "\xff".encode("latin-1")])
def test_a_broken_or_unknown_file_is_refused_by_name(content, tmp_path):
    path = tmp_path / "penstock.toml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InvalidSetting, match=r"penstock\.toml"):
        load_config({}, environment={}, folder=tmp_path)
