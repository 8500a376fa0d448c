#!/usr/bin/env python3
"""Makes tests/golden/hf anew: tiny models of every family, and of settings that are easily forgotten, with what PyTorch, transformers and
PEFT compute for them. tests/golden/models.rs compares.

    python3 -m pip install torch transformers peft safetensors
    PYTHONHASHSEED=0 python3 tests/golden/generate_models.py tests/golden/hf   # PEFT writes a set in the order of its hashes

A case is a folder as `save_pretrained` writes it, with `io.safetensors` beside: inputs, logits, loss, the gradient of each parameter as
`grad/NAME`, and of causal models `greedy`, the first five tokens and twelve greedy ones. With dynamic positions `greedy_cached` has those that
transformers finds with a cache of keys, which keep the rotation that they got. With a folder `adapter` the logits are the adapted model's, and only
adapters have gradients. All weights are random, so that none can be forgotten; f32, eager attention, eval mode.
"""

import json
import os
import shutil
import sys
import zlib

import peft
import torch
import transformers
from safetensors.torch import save_file

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
torch.set_num_threads(1)

AUTO = {
    "causal-lm": transformers.AutoModelForCausalLM,
    "masked-lm": transformers.AutoModelForMaskedLM,
    "text-classification": transformers.AutoModelForSequenceClassification,
    "image-classification": transformers.AutoModelForImageClassification,
}
BATCH, PROMPT, NEW = 2, 5, 12
CASES = {}


def decoder(name, model_type, length=11, lora=None, **settings):
    size = dict(vocab_size=53, hidden_size=16, intermediate_size=24, num_hidden_layers=2, max_position_embeddings=64)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=4)
    tokens = dict(bos_token_id=None, eos_token_id=None, pad_token_id=None, tie_word_embeddings=False)
    if model_type == "gpt_neox":  # whose every head has keys of its own
        heads = dict(num_attention_heads=4)
    CASES[name] = ("causal-lm", model_type, length, size | heads | tokens | settings, lora)


def rope(kind, **settings):
    return dict(rope_type=kind, rope_theta=10000.0, **settings)


TURNS = dict(short_factor=[1.0, 1.1, 1.3, 1.7], long_factor=[1.0, 2.0, 3.0, 4.0])
EXPERTS = dict(num_experts=4, num_experts_per_tok=2)
BERT = dict(vocab_size=53, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=32)

decoder("llama-padded-tied", "llama", pad_token_id=7, tie_word_embeddings=True, attention_bias=True)
decoder("llama-dynamic", "llama", 27, max_position_embeddings=8, rope_parameters=rope("dynamic", factor=4.0) | dict(rope_theta=100.0))
decoder("llama-beyond-its-context", "llama", max_position_embeddings=8)
decoder("llama-yarn", "llama", 20, head_dim=8, rope_parameters=rope("yarn", factor=4.0, original_max_position_embeddings=8, mscale=0.8, mscale_all_dim=0.5), hidden_act="sigmoid")
decoder("llama-llama3", "llama", 20, head_dim=8, rope_parameters=rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16), hidden_act="leaky_relu")
decoder("llama-longrope", "llama", 20, head_dim=8, rope_parameters=rope("longrope", factor=8.0, original_max_position_embeddings=8, **TURNS), hidden_act="relu6")
decoder("phi3-longrope", "phi3", 20, head_dim=8, rope_parameters=rope("longrope", original_max_position_embeddings=8, partial_rotary_factor=1.0, **TURNS), original_max_position_embeddings=8, num_attention_heads=2, num_key_value_heads=1)
decoder("mistral-window", "mistral", sliding_window=4, hidden_act="relu2")
decoder("qwen2-window", "qwen2", use_sliding_window=True, sliding_window=5, max_window_layers=1)
decoder("qwen3", "qwen3", head_dim=8, hidden_act="hardswish")
decoder("gemma-padded", "gemma", head_dim=8, pad_token_id=0)
decoder("gemma2", "gemma2", sliding_window=4, query_pre_attn_scalar=12, attn_logit_softcapping=5.0, final_logit_softcapping=3.0)
decoder("gemma3", "gemma3_text", head_dim=8, sliding_window=4, num_hidden_layers=3, layer_types=["sliding_attention", "full_attention", "sliding_attention"])
decoder("olmo2", "olmo2", hidden_act="tanh")
decoder("smollm3", "smollm3", no_rope_layers=[1, 0], hidden_act="mish")
decoder("gpt-neox", "gpt_neox", rotary_pct=0.5, use_parallel_residual=True)
decoder("gpt-neox-one-after-the-other", "gpt_neox", rotary_pct=1.0, use_parallel_residual=False, attention_bias=False, hidden_act="linear")
decoder("gpt-neox-three-rotated", "gpt_neox", hidden_size=24, num_attention_heads=2, rotary_pct=0.25)
decoder("mixtral", "mixtral", num_local_experts=4, num_experts_per_tok=2)
decoder("qwen3-moe", "qwen3_moe", head_dim=8, norm_topk_prob=True, mlp_only_layers=[1], moe_intermediate_size=12, **EXPERTS)
decoder("olmoe", "olmoe", hidden_act="gelu_10", **EXPERTS)
decoder("olmoe-clipped", "olmoe", clip_qkv=0.3, **EXPERTS)
decoder("llama-dora", "llama", lora=dict(r=3, lora_alpha=6, target_modules=["q_proj", "down_proj"], use_dora=True))
decoder("llama-dora-rslora", "llama", lora=dict(r=4, lora_alpha=6, target_modules=["o_proj", "up_proj"], use_dora=True, use_rslora=True))
decoder("qwen2-lora-patterns", "qwen2", lora=dict(r=4, lora_alpha=6, target_modules=r".*\.(q|v|down)_proj", rank_pattern={"q_proj": 2}, alpha_pattern={"v_proj": 16}))
decoder("llama-lora-head", "llama", lora=dict(r=3, lora_alpha=6, target_modules=["q_proj", "lm_head"]))
decoder("qwen2-dora-head", "qwen2", tie_word_embeddings=False, lora=dict(r=3, lora_alpha=6, target_modules=r".*(v_proj|lm_head)", use_dora=True, rank_pattern={"lm_head": 2}))
decoder("gpt-neox-lora-head", "gpt_neox", rotary_pct=1.0, lora=dict(r=3, lora_alpha=6, target_modules=["dense", "lm_head"]))
decoder("phi3-lora-joined", "phi3", head_dim=8, num_attention_heads=2, num_key_value_heads=1, lora=dict(r=3, lora_alpha=6, target_modules=["qkv_proj", "gate_up_proj"]))
decoder("gpt-neox-dora-joined", "gpt_neox", rotary_pct=1.0, lora=dict(r=3, lora_alpha=6, target_modules=["query_key_value", "dense"], use_dora=True))
decoder("llama-lora-biases", "llama", attention_bias=True, mlp_bias=True, lora=dict(r=3, lora_alpha=6, target_modules=["v_proj", "up_proj"], bias="all"))
decoder("gpt-neox-lora-biases", "gpt_neox", rotary_pct=1.0, lora=dict(r=3, lora_alpha=6, target_modules=["query_key_value", "dense"], bias="lora_only"))
decoder("gpt-neox-lora", "gpt_neox", rotary_pct=1.0, lora=dict(r=3, lora_alpha=6, target_modules=["dense", "dense_4h_to_h"]))
decoder("llama-lora-whole", "llama", lora=dict(r=3, lora_alpha=6, target_modules=["q_proj", "up_proj"], modules_to_save=["embed_tokens", "lm_head", "1.mlp.up_proj"]))
decoder("llama-tied-lora-whole", "llama", tie_word_embeddings=True, lora=dict(r=3, lora_alpha=6, target_modules=["v_proj"], modules_to_save=["embed_tokens"], ensure_weight_tying=True))
decoder("llama-tied-lora-apart", "llama", tie_word_embeddings=True, lora=dict(r=3, lora_alpha=6, target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"]))
decoder("gemma-tied-lora-apart", "gemma", head_dim=8, tie_word_embeddings=True, pad_token_id=0, lora=dict(r=3, lora_alpha=6, target_modules=["v_proj"], modules_to_save=["embed_tokens"]))
decoder("qwen2-tied-lora-apart", "qwen2", tie_word_embeddings=True, lora=dict(r=3, lora_alpha=6, target_modules=["q_proj"], modules_to_save=["lm_head"]))
decoder("qwen2-tied-lora-head", "qwen2", tie_word_embeddings=True, lora=dict(r=3, lora_alpha=6, target_modules=["q_proj", "lm_head"]))
decoder("llama-tied-lora-tables", "llama", tie_word_embeddings=True, lora=dict(r=3, lora_alpha=6, target_modules=["embed_tokens", "lm_head"]))
decoder("phi3-lora-whole", "phi3", head_dim=8, num_attention_heads=2, num_key_value_heads=1, lora=dict(r=3, lora_alpha=6, target_modules=["down_proj"], modules_to_save=["norm", "0.self_attn.qkv_proj"]))
decoder("mixtral-lora-whole", "mixtral", num_local_experts=4, num_experts_per_tok=2, lora=dict(r=3, lora_alpha=6, target_modules=["q_proj"], modules_to_save=["mlp.gate"]))
decoder("gpt-neox-lora-whole", "gpt_neox", rotary_pct=1.0, lora=dict(r=3, lora_alpha=6, target_modules=["dense"], modules_to_save=["embed_out", "lm_head", "final_layer_norm", "0.attention.query_key_value"]))
CASES["bert"] = ("masked-lm", "bert", 11, BERT | dict(pad_token_id=0), None)
CASES["bert-classify"] = ("text-classification", "bert", 11, BERT | dict(num_labels=3), None)
CASES["vit"] = ("image-classification", "vit", 0, dict(image_size=12, patch_size=4, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_labels=4, hidden_act="quick_gelu"), None)
CASES["resnet"] = ("image-classification", "resnet", 0, dict(embedding_size=6, hidden_sizes=[8, 12], depths=[1, 1], layer_type="basic", num_labels=4), None)


def randomise(model, generator):
    """Random weights, biases, norms (around 1; Gemma's, to which 1 is added, around 0) and running statistics."""
    random = lambda like: torch.randn(like.shape, generator=generator)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            one = weight.dim() == 1 and name.endswith("weight") and not model.config.model_type.startswith("gemma")
            weight.copy_(random(weight) * (0.2 if weight.dim() == 1 else 0.25) + float(one))
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.copy_(0.3 * random(buffer))
            if name.endswith("running_var"):
                buffer.copy_(0.5 + torch.rand(buffer.shape, generator=generator))


def adapt(model, settings, generator):
    """Adapters beside the model's layers, all of their weights random."""
    model = peft.get_peft_model(model, peft.LoraConfig(**settings))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if "lora_A" in name or "lora_B" in name:
                weight.copy_(0.2 * noise)
            elif "modules_to_save" in name:
                weight.add_(0.1 * noise)
            elif "magnitude" in name:
                weight.mul_(1.0 + 0.1 * noise)
    return model


def inputs_of(task, length, config, generator):
    draw = lambda below, *shape: torch.randint(0, below, shape, generator=generator)
    if task == "image-classification":
        side = getattr(config, "image_size", 32)
        pixels = torch.randn((BATCH, 3, side, side), generator=generator)
        return {"pixel_values": pixels, "labels": draw(config.num_labels, BATCH)}
    ids = draw(config.vocab_size, BATCH, length)
    if task == "causal-lm":
        return {"input_ids": ids, "labels": ids.clone()}
    mask = torch.ones_like(ids)
    mask[1, length - 3 :] = 0
    ids = torch.where(mask == 1, ids, config.pad_token_id or 0)
    if task == "text-classification":
        return {"input_ids": ids, "attention_mask": mask, "labels": draw(config.num_labels, BATCH)}
    counts = (draw(2, BATCH, length) == 1) & (mask == 1)
    counts[0, 0] = True
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.where(counts, ids, -100)}


def greedy(model, ids):
    """The first tokens and those that follow them, and by how much the second best was behind at least."""
    ids, gap = ids[:, :PROMPT], float("inf")
    with torch.no_grad():
        for _ in range(NEW):
            best = model(input_ids=ids, use_cache=False).logits[:, -1].topk(2)
            gap = min(gap, (best.values[:, 0] - best.values[:, 1]).min().item())
            ids = torch.cat([ids, best.indices[:, :1]], 1)
    return ids, gap


def make(out, name):
    task, model_type, length, settings, lora = CASES[name]
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    torch.manual_seed(zlib.crc32(name.encode()))
    folder = os.path.join(out, name)
    config = transformers.AutoConfig.for_model(model_type, **settings)
    model = AUTO[task].from_config(config, attn_implementation="eager")
    randomise(model, generator)
    model.save_pretrained(folder)
    load = lambda: AUTO[task].from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    if lora:
        adapter = os.path.join(folder, "adapter")
        adapt(load(), lora, generator).save_pretrained(adapter)
        os.remove(os.path.join(adapter, "README.md"))
        whole = load
        load = lambda: peft.PeftModel.from_pretrained(whole(), adapter, is_trainable=True).eval()
    io = inputs_of(task, length, config, generator)
    case = {"name": name, "task": task, "model_type": model_type}
    if task == "causal-lm":
        io["greedy"], gap = greedy(load(), io["input_ids"])
        if settings.get("rope_parameters", {}).get("rope_type") == "dynamic":
            io["greedy_cached"] = load().generate(io["greedy"][:, :PROMPT], attention_mask=torch.ones(BATCH, PROMPT), max_new_tokens=NEW, do_sample=False)
            assert not torch.equal(io["greedy_cached"], io["greedy"]), "a case in which the two differ is wanted"
        case["least_gap_of_greedy"] = round(gap, 6)
    model = load()
    got = model(**{name: value for name, value in io.items() if not name.startswith("greedy")})
    got.loss.backward()
    io |= {"logits": got.logits.detach(), "loss": got.loss.detach()}
    io |= {"grad/" + name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    save_file({name: value.contiguous().clone() for name, value in io.items()}, os.path.join(folder, "io.safetensors"))
    return case


def main():
    out = sys.argv[1]
    shutil.rmtree(out, ignore_errors=True)
    os.makedirs(out)
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, peft {peft.__version__}"
    cases = [make(out, name) for name in CASES]
    with open(os.path.join(out, "index.json"), "w") as file:
        json.dump({"format": 1, "generator": versions, "cases": cases}, file, indent=1)
        file.write("\n")


main()
