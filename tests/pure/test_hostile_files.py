"""Files that somebody broke on purpose are refused in a sentence, whichever reader meets them."""

import json
from threading import Thread

import pytest
from hang_bound import HANG_S, within
from hostile_inputs import FEW, MANY, read_broken
from hostile_readers import READERS, small_gguf

from penstock.config import CONFIG_FILE, MAX_CONFIG_BYTES, load_config
from penstock.engine.planning import plan
from penstock.errors import InvalidModelFile, InvalidSetting
from penstock.models.files import resolve
from penstock.prompt.load import MAX_SETTINGS_BYTES, tokenizer_from_folder

pytestmark = pytest.mark.filterwarnings("ignore")  # of Pillow, about tags of broken files


@pytest.mark.parametrize("name", READERS)
def test_broken_files_raise_our_errors_only_and_take_neither_long_nor_much(name, tmp_path):
    wholes, reader = READERS[name]
    read_broken(name, reader(tmp_path), wholes(tmp_path), FEW)


@pytest.mark.evidence
@pytest.mark.parametrize("name", READERS)
def test_ten_thousand_broken_files_raise_our_errors_only(name, tmp_path, capsys):
    wholes, reader = READERS[name]
    outcome = read_broken(name, reader(tmp_path), wholes(tmp_path), MANY, seed=29)
    with capsys.disabled():
        print(f"\n{outcome.row()}")


@pytest.mark.parametrize(
    "content",
    ["a = " + "[" * 5000, "a = " + "{b=" * 5000, "context = " + "9" * 5000, "#" * (MAX_CONFIG_BYTES + 1)],
)
def test_deep_or_endless_settings_are_refused_by_name(content, tmp_path):
    (tmp_path / CONFIG_FILE).write_text(content)
    with pytest.raises(InvalidSetting, match=r"penstock\.toml"):
        load_config({}, environment={}, folder=tmp_path)


def test_a_budget_that_no_machine_has_is_refused(tmp_path):
    with pytest.raises(InvalidSetting, match="must be below"):
        load_config({"memory": "9" * 400 + "GiB"}, environment={}, folder=tmp_path)


def test_a_gguf_without_tensors_is_refused(tmp_path):
    whole = small_gguf(tmp_path / "model.gguf")
    (tmp_path / "model.gguf").write_bytes(whole[:8] + bytes(8) + whole[16:])
    with pytest.raises(InvalidModelFile, match=r"tensor|layers"):
        resolve(str(tmp_path / "model.gguf"))


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"])
def test_optional_files_have_a_largest_size(name, tmp_path):
    content = json.dumps({"a": " " * MAX_SETTINGS_BYTES})
    (tmp_path / name).write_text(content)
    (tmp_path / "tokenizer.json").write_bytes(READERS["tokenizer.json"][0](tmp_path)[0])
    with pytest.raises(InvalidModelFile, match=rf"{name} has more than {MAX_SETTINGS_BYTES:,} bytes"):
        tokenizer_from_folder(tmp_path, {}, {})


@pytest.mark.parametrize("part", [{"num_hidden_layers": 2**31}, {"text_config": {"num_hidden_layers": 2**31}}])
def test_a_config_with_more_layers_than_any_model_is_refused_before_they_are_counted(part, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"} | part))
    with pytest.raises(InvalidModelFile, match="num_hidden_layers is 2147483648, the limit is 4096"):
        plan(str(tmp_path), prompt_tokens=1)


def test_a_pattern_of_an_adapter_that_would_be_matched_for_ever_is_matched(tmp_path):
    header = READERS["adapter header"][0](tmp_path)[0].replace(b"self_attn", b"a" * 200)
    read = READERS["adapter header"][1](tmp_path)
    config = json.loads(READERS["adapter config"][0](tmp_path)[0]) | {"rank_pattern": {"(a+)+b|(.*a){30}c": 3}}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    finished = []
    Thread(target=lambda: finished.append(read(header)), daemon=True).start()
    assert within(HANG_S, lambda: finished)
