//! The `config.json` of released models: what they say is read, and what is not supported is refused by name.

use std::path::Path;

use serde_json::{Value, json};

use super::{Family, NormPlaces, TransformerConfig};
use crate::models::{Activation, LlamaConfig, ModelConfig};
use crate::{RopeScaling, Rotary};

fn parse(value: &Value) -> Result<ModelConfig, String> {
    ModelConfig::parse(&value.to_string(), Path::new("config.json")).map_err(|e| e.to_string())
}

/// The fields that most configs have.
fn config(model_type: &str, sizes: [usize; 6], more: Value) -> Value {
    let [vocabulary, context, layers, heads, width, inner] = sizes;
    let mut config = json!({
        "model_type": model_type, "vocab_size": vocabulary, "max_position_embeddings": context,
        "num_hidden_layers": layers, "num_attention_heads": heads, "hidden_size": width, "intermediate_size": inner,
        "architectures": ["SomeForCausalLM"], "bos_token_id": 1, "eos_token_id": [2, 3], "torch_dtype": "bfloat16",
        "transformers_version": "4.40.0", "use_cache": true, "attention_dropout": 0.0, "initializer_range": 0.02,
    });
    for (name, value) in more.as_object().unwrap() {
        config[name] = value.clone();
    }
    config
}

fn transformer(value: &Value) -> TransformerConfig {
    match parse(value) {
        Ok(ModelConfig::Transformer(config)) => config,
        other => panic!("{other:?}"),
    }
}

#[test]
fn configs_of_released_models_are_read() {
    let llama = config(
        "llama",
        [128_256, 131_072, 16, 32, 2048, 8192],
        json!({
            "hidden_act": "silu", "head_dim": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0,
            "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192, "rope_type": "llama3"},
            "tie_word_embeddings": true, "pretraining_tp": 1, "attention_bias": false, "mlp_bias": false,
        }),
    );
    let Ok(ModelConfig::Llama(LlamaConfig { rope_base, rope_scaling, tied, .. })) = parse(&llama) else {
        panic!()
    };
    let scaling =
        RopeScaling::Llama3 { factor: 32.0, low_frequency: 1.0, high_frequency: 4.0, context: 8192 };
    assert_eq!((rope_base, rope_scaling, tied), (500_000.0, scaling, true));

    let sizes = [32_000, 32_768, 4, 32, 4096, 14_336];
    let mistral = |window: Value| {
        let more = json!({"hidden_act": "silu", "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
            "rope_theta": 1e6, "tie_word_embeddings": false, "sliding_window": window});
        transformer(&config("mistral", sizes, more)).layers[3].window
    };
    assert_eq!([mistral(json!(4096)), mistral(Value::Null)], [Some(4096), None]);

    let qwen = config(
        "qwen2",
        [151_936, 32_768, 24, 14, 896, 4864],
        json!({
            "hidden_act": "silu", "max_window_layers": 21, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
            "rope_theta": 1e6, "sliding_window": 32_768, "tie_word_embeddings": true, "use_mrope": false,
            "use_sliding_window": false,
        }),
    );
    let qwen = transformer(&qwen);
    assert!(qwen.qkv_bias && !qwen.output_bias && qwen.layers.iter().all(|kind| kind.window.is_none()));

    let gemma2 = config(
        "gemma2",
        [256_000, 8192, 26, 8, 2304, 9216],
        json!({
            "attention_bias": false, "attn_logit_softcapping": 50.0, "cache_implementation": "hybrid",
            "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
            "hidden_activation": "gelu_pytorch_tanh", "num_key_value_heads": 4, "pad_token_id": 0,
            "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "sliding_window": 4096,
        }),
    );
    let gemma2 = transformer(&gemma2);
    assert_eq!((gemma2.norms, gemma2.tied), (NormPlaces::BeforeAndAfter, true));
    assert_eq!([gemma2.layers[0].window, gemma2.layers[1].window], [Some(4096), None]);
    assert_eq!((gemma2.score_scale, gemma2.activation), (Some(1.0 / 16.0), Activation::GeluTanh));

    let gemma3 = config(
        "gemma3_text",
        [262_144, 32_768, 26, 4, 1152, 6912],
        json!({
            "attention_bias": false, "attn_logit_softcapping": null, "final_logit_softcapping": null, "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh", "num_key_value_heads": 1, "query_pre_attn_scalar": 256,
            "rms_norm_eps": 1e-6, "rope_local_base_freq": 10000, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "rope_theta": 1_000_000, "sliding_window": 512, "sliding_window_pattern": 6,
        }),
    );
    let gemma3 = transformer(&gemma3);
    assert_eq!([gemma3.layers[4].window, gemma3.layers[5].window], [Some(512), None]);
    let wide = Rotary { scaling: RopeScaling::Linear { factor: 8.0 }, ..Rotary::new(1e6) };
    let rotary = [4, 5].map(|i: usize| gemma3.layers[i].rotary.clone());
    assert_eq!(rotary, [Some(Rotary::new(1e4)), Some(wide)]);

    let neox = config(
        "gpt_neox",
        [50_304, 2048, 6, 8, 512, 2048],
        json!({
            "hidden_act": "gelu", "layer_norm_eps": 1e-5, "rotary_emb_base": 10000, "rotary_pct": 0.25,
            "tie_word_embeddings": false, "use_parallel_residual": true,
        }),
    );
    let neox = transformer(&neox);
    assert_eq!(neox.layers[0].rotary.as_ref().unwrap().features, Some(16));

    let phi = config(
        "phi3",
        [32_064, 4096, 32, 32, 3072, 8192],
        json!({
            "attention_bias": false, "auto_map": {}, "embd_pdrop": 0.0, "hidden_act": "silu", "num_key_value_heads": 32,
            "original_max_position_embeddings": 4096, "resid_pdrop": 0.0, "rms_norm_eps": 1e-5, "rope_scaling": null,
            "rope_theta": 10000.0, "sliding_window": 2047, "tie_word_embeddings": false,
        }),
    );
    assert_eq!(transformer(&phi).layers[0].window, Some(2047));
}

#[test]
fn dynamic_positions_serve_longer_sequences_and_are_written_back() {
    let dynamic = config(
        "llama",
        [50, 16, 2, 2, 8, 16],
        json!({
            "rope_scaling": {"type": "dynamic", "factor": 2.0}, "num_key_value_heads": 2,
        }),
    );
    let config = parse(&dynamic).unwrap();
    assert_eq!(config.context(), 32);
    let json = config.to_json(phalanx_tensor::DType::F32);
    assert_eq!((&json["max_position_embeddings"], parse(&json).unwrap()), (&json!(16), config));
}

/// Phi-4-mini's settings, with lists of half as many factors.
fn phi_of_long_rope(scaling: Value) -> Value {
    config(
        "phi3",
        [200_064, 131_072, 32, 24, 1536, 8192],
        json!({
            "attention_bias": false, "embd_pdrop": 0.0, "full_attn_mod": 1, "hidden_act": "silu", "interpolate_factor": 1,
            "lm_head_bias": false, "mlp_bias": false, "num_key_value_heads": 8, "original_max_position_embeddings": 4096,
            "partial_rotary_factor": 0.75, "resid_pdrop": 0.0, "rms_norm_eps": 1e-5, "rope_scaling": scaling,
            "rope_theta": 10000.0, "sliding_window": 262_144, "tie_word_embeddings": true,
        }),
    )
}

/// With two scales a factor of 17 digits is written, which has to be read as it was.
#[test]
fn factors_of_yarn_are_read_and_written_back_to_the_last_bit() {
    for factor in (4..400).map(|i| 0.25 * f64::from(i)) {
        let rope = json!({"rope_type": "yarn", "rope_theta": 1e4, "factor": factor, "mscale": 0.7, "mscale_all_dim": 1.0});
        let more = json!({"num_key_value_heads": 2, "rope_parameters": rope});
        let mistral = transformer(&config("mistral", [50, 16, 2, 2, 8, 16], more));
        let written = ModelConfig::from(mistral.clone()).to_json(phalanx_tensor::DType::F32);
        assert_eq!(transformer(&written), mistral, "{factor}");
    }
}

#[test]
fn long_rope_is_read_and_written_back() {
    let (short, long) = (vec![1.0; 24], (0..24).map(|i| 1.0 + f64::from(i)).collect::<Vec<_>>());
    for kind in ["longrope", "su", "yarn"] {
        let file = phi_of_long_rope(json!({"type": kind, "short_factor": short, "long_factor": long}));
        let config = transformer(&file);
        let Some(Rotary { features: Some(48), scaling, .. }) = &config.layers[5].rotary else {
            panic!("{config:?}")
        };
        // sqrt(1 + ln(32) / ln(4096))
        let wanted = RopeScaling::LongRope {
            short: short.clone().into(),
            long: long.clone().into(),
            attention_factor: (1.0 + 32f64.ln() / 4096f64.ln()).sqrt(),
            context: 4096,
        };
        assert_eq!((scaling, config.context), (&wanted, 131_072));
        let json = ModelConfig::from(config.clone()).to_json(phalanx_tensor::DType::F32);
        assert_eq!(transformer(&json), config, "{json}");
        assert_eq!(json["original_max_position_embeddings"], json!(4096));
        assert!(json["rope_parameters"].get("attention_factor").is_none());
    }
    let given = json!({"rope_type": "longrope", "short_factor": short, "long_factor": long, "attention_factor": 1.25});
    let phi = transformer(&phi_of_long_rope(given));
    let json = ModelConfig::from(phi.clone()).to_json(phalanx_tensor::DType::F32);
    assert_eq!((transformer(&json), &json["rope_parameters"]["attention_factor"]), (phi, &json!(1.25)));
    // In newer files a factor counts that is not the contexts'.
    let mut newer = phi_of_long_rope(Value::Null);
    newer["rope_parameters"] = json!({"rope_type": "longrope", "rope_theta": 1e4, "short_factor": short, "long_factor": long, "factor": 4.0});
    let phi = transformer(&newer);
    let json = ModelConfig::from(phi.clone()).to_json(phalanx_tensor::DType::F32);
    let wanted = json!((1.0 + 4f64.ln() / 4096f64.ln()).sqrt());
    assert_eq!((transformer(&json), &json["rope_parameters"]["attention_factor"]), (phi, &wanted));
    let refused = |scaling: Value| parse(&phi_of_long_rope(scaling)).unwrap_err();
    for (scaling, part) in [
        (json!({"type": "longrope", "short_factor": short}), "long_factor of longrope is missing"),
        (
            json!({"type": "longrope", "short_factor": short, "long_factor": [1.0]}),
            "1 long factors, wanted 24",
        ),
        (
            json!({"type": "longrope", "short_factor": short, "long_factor": "all"}),
            "wanted a list of numbers",
        ),
        (
            json!({"type": "longrope", "short_factor": short, "long_factor": long, "factor": 4.0}),
            "factor of longrope is 4",
        ),
        (
            json!({"type": "longrope", "short_factor": short, "long_factor": long, "original_max_position_embeddings": 8192}),
            "is 8192 for longrope and 4096 for the model",
        ),
    ] {
        let refused = refused(scaling);
        assert!(refused.contains(part), "{refused}");
    }
    let scaling = json!({"rope_type": "longrope", "short_factor": [1.0, 1.0], "long_factor": [1.0, 2.0]});
    let llama = config("llama", [50, 16, 2, 2, 8, 16], json!({"rope_scaling": scaling}));
    let refused = parse(&llama).unwrap_err();
    assert!(refused.contains("original_max_position_embeddings of longrope is missing"), "{refused}");
}

#[test]
fn what_is_not_supported_is_refused_by_name() {
    for family in [
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "gemma",
        "gemma2",
        "gemma3_text",
        "phi3",
        "olmo2",
        "gpt_neox",
        "smollm3",
    ] {
        assert!(Family::of(family).is_some());
        for (name, value) in [
            ("attention_multiplier", json!(0.5)),
            ("quantization_config", json!({"bits": 4})),
            ("rope_scaling", json!({"rope_type": "longrope", "short_factor": [1.0]})),
            ("hidden_size", json!("wide")),
        ] {
            let refused = parse(&config(family, [50, 16, 2, 2, 8, 16], json!({name: value}))).unwrap_err();
            assert!(refused.contains(name) || refused.contains("longrope"), "{family}: {refused}");
        }
    }
}

#[test]
fn losses_of_routers_are_those_of_the_file_if_it_asks_for_router_logits() {
    let losses = |model_type: &str, more: Value| {
        let file = config(model_type, [32, 16, 2, 2, 16, 24], more);
        let config = transformer(&file);
        let losses = config.experts.as_ref().unwrap().losses;
        let json = ModelConfig::from(config.clone()).to_json(phalanx_tensor::DType::F32);
        assert_eq!(transformer(&json), config, "{json}");
        (losses.balance, losses.z)
    };
    assert_eq!(losses("mixtral", json!({"router_aux_loss_coef": 0.02})), (0.0, 0.0));
    let asked = json!({"router_aux_loss_coef": 0.02, "output_router_logits": true});
    assert_eq!(losses("mixtral", asked), (0.02, 0.0));
    assert_eq!(losses("olmoe", json!({"output_router_logits": true})), (0.01, 0.0));
    let both = json!({"output_router_logits": true, "router_z_loss_coef": 0.125, "router_bias_step": 0.25});
    assert_eq!(losses("qwen3_moe", both), (0.001, 0.125));
    let wrong = json!({"output_router_logits": true, "router_aux_loss_coef": -0.5});
    let refused = parse(&config("mixtral", [32, 16, 2, 2, 16, 24], wrong)).unwrap_err();
    assert!(
        refused.contains("the factor of the balancing loss is -0.5, wanted a number from 0 up"),
        "{refused}"
    );
}

/// What transformers 5 takes where a file does not say.
#[test]
fn what_a_file_does_not_say_is_what_transformers_takes() {
    let sizes = [40, 16, 4, 2, 16, 24];
    let of = |family: &str, more: Value| transformer(&config(family, sizes, more));
    let base = |c: &TransformerConfig| c.layers[0].rotary.as_ref().unwrap().base;
    let plain = |family: &str| of(family, json!({}));
    assert_eq!(["mistral", "mixtral", "smollm3"].map(|family| base(&plain(family))), [1e4, 1e6, 2e6]);
    let caps = |c: TransformerConfig| (c.score_cap, c.logit_cap);
    assert_eq!(caps(plain("gemma2")), (Some(50.0), Some(30.0)));
    assert_eq!(caps(of("gemma2", json!({"attn_logit_softcapping": null}))), (None, Some(30.0)));
    assert_eq!(caps(plain("gemma3_text")), (None, None));
    // Blocks of SmolLM3 without positions are those with a window.
    let windows = of("smollm3", json!({"use_sliding_window": true, "sliding_window": 5}));
    let kinds: Vec<_> = windows.layers.iter().map(|kind| (kind.window, kind.rotary.is_some())).collect();
    assert_eq!(kinds, [(None, true), (None, true), (None, true), (Some(5), false)]);
}

#[test]
fn tokens_of_padding_are_those_of_the_file_or_the_family() {
    let of = |family: &str, vocabulary: usize, more: Value| {
        let config = transformer(&config(family, [vocabulary, 16, 2, 2, 16, 24], more));
        let json = ModelConfig::from(config.clone()).to_json(phalanx_tensor::DType::F32);
        assert_eq!(transformer(&json), config, "{json}");
        config.padding
    };
    let usual = ["mistral", "gemma", "olmo2", "phi3", "smollm3"].map(|family| of(family, 130_000, json!({})));
    assert_eq!(usual, [None, Some(0), Some(1), Some(32_000), Some(128_004)]);
    assert_eq!(of("phi3", 100, json!({})), None);
    for (said, padding) in [(json!(7), Some(7)), (json!(-1), Some(99)), (Value::Null, None)] {
        assert_eq!(of("gemma2", 100, json!({"pad_token_id": said})), padding);
    }
    for said in [100, -101] {
        let refused = config("mistral", [100, 16, 2, 2, 16, 24], json!({"pad_token_id": said}));
        let refused = parse(&refused).unwrap_err();
        assert!(refused.contains("wanted one of 100 tokens"), "{refused}");
    }
}

#[test]
fn gemmas_activation_is_the_one_that_transformers_takes() {
    let of = |more: Value| {
        let config = transformer(&config("gemma", [40, 16, 2, 2, 16, 24], more));
        let json = ModelConfig::from(config.clone()).to_json(phalanx_tensor::DType::F32);
        assert_eq!(transformer(&json), config, "{json}");
        config.activation
    };
    assert_eq!(of(json!({"hidden_act": "gelu", "hidden_activation": "relu"})), Activation::GeluTanh);
    assert_eq!(of(json!({"hidden_act": "gelu_python"})), Activation::Gelu);
    assert_eq!(of(json!({"hidden_act": "relu"})), Activation::Relu);
}

#[test]
fn positions_that_a_scaling_adds_belong_to_the_context() {
    let context = |scaling: Value| {
        let config =
            parse(&config("llama", [40, 16, 2, 2, 16, 24], json!({"rope_scaling": scaling}))).unwrap();
        assert_eq!(parse(&config.to_json(phalanx_tensor::DType::F32)).unwrap(), config);
        config.context()
    };
    assert_eq!(context(json!({"type": "linear", "factor": 2.5})), 40);
    assert_eq!(context(json!({"type": "dynamic", "factor": 4.0})), 64);
    let yarn = |former: usize| json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": former});
    assert_eq!([16, 4].map(|former| context(yarn(former))), [64, 16]);
}
