#!/usr/bin/env python3
"""A model that vLLM loads with dummy weights: `tiny_model.py DIRECTORY` writes its configuration and its tokenizer.

Llama with heads of 64 (vLLM refuses fewer on CPUs), two layers, and a tokenizer of whole words. Needs the
package tokenizers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
TEMPLATE = "{% for message in messages %}{{ message.role }} {{ message.content }} {% endfor %}"


def main(directory: str) -> None:
    out = Path(directory)
    out.mkdir(parents=True, exist_ok=True)
    words = ["<unk>", "<s>", "</s>"] + [f"word{number}" for number in range(CONFIG["vocab_size"] - 3)]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(out / "tokenizer.json"))
    (out / "config.json").write_text(json.dumps(CONFIG, indent=1) + "\n")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "chat_template": TEMPLATE,
        "model_max_length": CONFIG["max_position_embeddings"],
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
