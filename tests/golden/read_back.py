#!/usr/bin/env python3
"""Whether transformers reads what `cargo test --test golden` has saved again: all weights, under their names and with their shapes, the settings,
and from them the logits that it had computed itself, from one file and, of decoders, from several. Of an adapter PEFT reads the file, and transformers the model that it was merged into.

    tests/golden/read_back.py SET SAVED    # a golden set of models, and a folder with what was saved of each case
"""

import json
import os
import sys

import peft
import torch
import transformers
from safetensors.torch import load_file

AUTO = {
    "causal-lm": transformers.AutoModelForCausalLM,
    "masked-lm": transformers.AutoModelForMaskedLM,
    "text-classification": transformers.AutoModelForSequenceClassification,
    "image-classification": transformers.AutoModelForImageClassification,
}
INPUTS = ["input_ids", "attention_mask", "token_type_ids", "pixel_values"]
# What says how a folder was written, and not what the model is; and layers with a window, which `layer_types` names, too.
LEFT_OUT = ["_name_or_path", "transformers_version", "dtype", "architectures", "use_cache", "max_window_layers"]


def load(task, folder):
    model, found = AUTO[task].from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    for kind in ["missing_keys", "unexpected_keys", "mismatched_keys"]:
        assert not found[kind], f"{kind}: {found[kind]}"
    return model.eval()


def settings(folder):
    config = transformers.AutoConfig.from_pretrained(folder).to_dict()
    return {name: value for name, value in config.items() if name not in LEFT_OUT}


def differs(was, got):
    """Settings that were not there may be written: what their absence stands for. Of rotations `attention_factor` says what others lead to."""
    if isinstance(was, dict) and isinstance(got, dict):
        return any(differs(was[name], got[name]) for name in was.keys() & got.keys())
    return was is not None and was != got


def check(case, original, saved):
    io = load_file(os.path.join(original, "io.safetensors"))
    inputs = {name: io[name] for name in INPUTS if name in io}

    def same_logits(model):
        with torch.no_grad():
            torch.testing.assert_close(model(**inputs).logits, io["logits"], rtol=1e-4, atol=1e-5)

    same_logits(load(case["task"], saved))
    shards = os.path.join(saved, "shards")
    if os.path.exists(shards):
        assert os.path.exists(os.path.join(shards, "model.safetensors.index.json")), "the weights are in one file"
        same_logits(load(case["task"], shards))
    adapter = os.path.join(saved, "adapter")
    if os.path.exists(adapter):
        same_logits(peft.PeftModel.from_pretrained(load(case["task"], original), adapter).eval())
        return
    before, after = settings(original), settings(saved)
    other = [f"{name} is {after.get(name)}, was {was}" for name, was in before.items() if differs(was, after.get(name))]
    assert not other, ", ".join(other)


def main():
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    golden, saved = sys.argv[1:]
    with open(os.path.join(golden, "index.json")) as file:
        cases = [case for case in json.load(file)["cases"] if os.path.exists(os.path.join(saved, case["name"]))]
    failed = 0
    for case in cases:
        try:
            check(case, *(os.path.join(folder, case["name"]) for folder in (golden, saved)))
        except Exception as error:
            failed += 1
            print(f"  transformers does not read {case['name']} back: {error}")
    print(f"transformers {transformers.__version__} reads {len(cases) - failed} of {len(cases)} saved folders back")
    sys.exit(failed > 0)


main()
