"""The table of variants: every cell, done cells, failed cells, interrupted cells."""

import csv
import dataclasses
import json

import pytest

from tests.tiny_run import tiny_config, write_text
from ttt_jax import train
from ttt_jax.experiments import ablation
from ttt_jax.models import transformer


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text") / "words.jsonl")


@pytest.fixture(autouse=True)
def _small(text, monkeypatch):
    """Replaces the models by ones that train in a second."""

    def cell_config(title, scale, steps, data):
        config = tiny_config(text, steps=3)
        if title == "softmax":
            config.model = transformer.TransformerConfig(
                vocab_size=258, hidden_size=16, num_layers=1, num_attention_heads=2,
                intermediate_size=16, scan_layers=False,
            )  # fmt: skip
        return config

    monkeypatch.setattr(ablation, "cell_config", cell_config)
    monkeypatch.setattr(ablation, "SCALES", {"tiny": (3, 40)})


def test_the_table_has_every_number_and_done_cells_are_not_run_again(tmp_path, monkeypatch, capsys):
    assert ablation.main("tiny", tmp_path, cells=("V6", "softmax")) == 0
    rows = list(csv.DictReader((tmp_path / "table.csv").open()))
    assert [row["model"] for row in rows] == ["V6", "softmax"]
    for row in rows:
        assert 1.0 < float(row["perplexity"]) < 258.0
        assert 1.0 < float(row["unigram_perplexity"]) < 258.0
        assert float(row["train_tokens_per_second"]) > 0
        assert float(row["parallel_tokens_per_second"]) > 0
    assert float(rows[0]["recurrent_tokens_per_second"]) > 0
    assert rows[1]["recurrent_tokens_per_second"] == ""
    markdown = (tmp_path / "table.md").read_text()
    assert "| unigram" in markdown and markdown in capsys.readouterr().out
    assert len({len(line) for line in markdown.splitlines()}) == 1
    assert (tmp_path / "ablation.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(train, "main", lambda *_: pytest.fail("a done cell was run again"))
    assert ablation.main("tiny", tmp_path, cells=("V6", "softmax")) == 0
    assert (tmp_path / "table.md").read_text() == markdown


def test_a_failed_cell_is_named_and_the_others_go_on(tmp_path, monkeypatch):
    real = train.main

    def main(config, workdir):
        if workdir.name == "V0":
            raise MemoryError("not enough")
        return real(config, workdir)

    monkeypatch.setattr(train, "main", main)
    assert ablation.main("tiny", tmp_path, cells=("V0", "V6")) == 1
    table = (tmp_path / "table.md").read_text()
    assert "FAILED: MemoryError: not enough" in table
    rows = list(csv.DictReader((tmp_path / "table.csv").open()))
    assert rows[0]["perplexity"] == "" and float(rows[1]["perplexity"]) > 1.0
    monkeypatch.setattr(train, "main", real)
    assert ablation.main("tiny", tmp_path, cells=("V0", "V6")) == 0
    assert "FAILED" not in (tmp_path / "table.md").read_text()


def test_a_run_that_ends_with_an_exit_code_is_a_failed_cell(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "main", lambda *_: train.EXIT_NOT_FINITE)
    assert ablation.main("tiny", tmp_path, cells=("V6",)) == 1
    assert "exit code 3" in (tmp_path / "table.md").read_text()


def test_a_signal_ends_the_experiment(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "main", lambda *_: 143)
    assert ablation.main("tiny", tmp_path, cells=("V6", "softmax")) == 143
    assert not (tmp_path / "table.md").exists()


def test_a_cell_of_another_configuration_is_not_taken(tmp_path, text):
    config = tiny_config(text, steps=3)
    ablation.run_cell("V6", config, tmp_path, 40)
    record = json.loads((tmp_path / "cell.json").read_text())
    config.optimizer = dataclasses.replace(config.optimizer, learning_rate=0.5)
    cell, _ = ablation.run_cell("V6", config, tmp_path, 40)
    assert "optimizer.learning_rate" in cell.note
    assert json.loads((tmp_path / "cell.json").read_text()) == record


@pytest.mark.parametrize("scale, cells", [("huge", ("V6",)), ("tiny", ("V6", "V9"))])
def test_unknown_names_are_refused(scale, cells, tmp_path):
    with pytest.raises(ValueError, match="huge|V9"):
        ablation.main(scale, tmp_path, cells=cells)
