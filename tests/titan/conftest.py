"""What a run of torchtitan needs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer and a text, which torchtitan's package does not bring."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    folder = tmp_path_factory.mktemp("assets")
    (folder / "tokenizer").mkdir()
    (folder / "text").mkdir()
    texts = [" ".join(f"w{(i * 7 + j * 13) % 97}" for j in range(200)) for i in range(200)]
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(texts, trainers.WordLevelTrainer(special_tokens=["<unk>", "<s>", "</s>"]))
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    marks = json.dumps({"bos_token": "<s>", "eos_token": "</s>"})
    (folder / "tokenizer" / "tokenizer_config.json").write_text(marks)
    (folder / "text" / "data.json").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return folder
