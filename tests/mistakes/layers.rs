//! Layers, models and their settings.

use phalanx::kernels::{Conv1dOptions, ConvOptions};
use phalanx::nn::models::{GptConfig, LlamaConfig};
use phalanx::nn::{
    AttentionMasks, BatchNormConfig, Conv1dConfig, Conv2dConfig, CrossEntropyLoss, Dropout, EmbeddingConfig,
    GroupNormConfig, GroupedQueryAttentionConfig, Init, L1Loss, LayerNormConfig, LinearConfig, Loss, Module,
    MseLoss, MultiheadAttentionConfig, Parameter, RecurrentConfig, RmsNormConfig, SmoothL1Loss,
    TransformerEncoderLayerConfig, load_state_dict, state_dict,
};
use phalanx::{DType, Tensor};

use crate::{Mistake, f, i, mistakes, of, scope, zeros};

fn conv(options: ConvOptions) -> phalanx::nn::Result<phalanx::nn::Conv2d> {
    Conv2dConfig::new(4, 4, [3; 2]).with_options(options).init(&scope())
}

fn drop(p: f64, path: &str) -> phalanx::nn::Result<Dropout> {
    let root = scope();
    Dropout::new(p, &if path.is_empty() { root } else { root.child(path) })
}

fn attention(width: usize, heads: usize) -> MultiheadAttentionConfig {
    MultiheadAttentionConfig::new(width, heads)
}

fn lstm() -> phalanx::nn::Lstm {
    RecurrentConfig::new(3, 4).init_lstm(&scope()).unwrap()
}

fn load(entries: Vec<(&str, Tensor)>) -> phalanx::nn::Result<()> {
    let linear = LinearConfig::new(3, 2).init(&scope()).unwrap();
    load_state_dict(&linear, entries.into_iter().map(|(name, tensor)| (name.to_string(), tensor)))
}

fn gpt(change: impl Fn(&mut GptConfig)) -> phalanx::nn::Result<()> {
    let mut config = GptConfig::new(16, 8, 1, 2, 4);
    change(&mut config);
    config.init(&scope()).map(std::mem::drop)
}

pub fn mistakes() -> Vec<Mistake> {
    let mut all = settings();
    all.extend(inputs());
    all
}

fn settings() -> Vec<Mistake> {
    mistakes! {
        "Dropout: | probability of 1.5 | 0 to 1" => drop(1.5, "");
        "Dropout `h.drop`: | probability of -0.1 | 0 to 1" => drop(-0.1, "h.drop");
        "Dropout: | NaN | 0 to 1" => drop(f64::NAN, "");
        "LayerNorm: | eps of -1" => LayerNormConfig::new(&[3]).with_eps(-1.0).init(&scope());
        "LayerNorm: | no dimensions" => LayerNormConfig::new(&[]).init(&scope());
        "RmsNorm: | eps of NaN" => RmsNormConfig::new(&[3]).with_eps(f64::NAN).init(&scope());
        "GroupNorm: | 3 groups of 4 channels | divide" => GroupNormConfig::new(3, 4).init(&scope());
        "GroupNorm: | 0 groups" => GroupNormConfig::new(0, 4).init(&scope());
        "GroupNorm: | eps of -1" => GroupNormConfig::new(2, 4).with_eps(-1.0).init(&scope());
        "BatchNorm: | eps of -1" => BatchNormConfig::new(3).with_eps(-1.0).init_2d(&scope());
        "BatchNorm: | momentum of 2 | 0 to 1" => BatchNormConfig::new(3).with_momentum(Some(2.0)).init_1d(&scope());
        "BatchNorm: | momentum of NaN" => BatchNormConfig::new(3).with_momentum(Some(f64::NAN)).init_1d(&scope());
        "Conv2d: | 3 groups of 4 and 4 channels | divide both" => conv(ConvOptions { groups: 3, ..ConvOptions::default() });
        "Conv2d: | 0 groups" => conv(ConvOptions { groups: 0, ..ConvOptions::default() });
        "Conv2d: | stride [0, 1] | at least 1" => conv(ConvOptions { stride: [0, 1], ..ConvOptions::default() });
        "Conv2d: | dilation [1, 0] | at least 1" => conv(ConvOptions { dilation: [1, 0], ..ConvOptions::default() });
        "Conv2d: | kernel [0, 3] | at least 1" => Conv2dConfig::new(4, 4, [0, 3]).init(&scope());
        "Conv2d: | channels [0, 4] | at least 1" => Conv2dConfig::new(0, 4, [3, 3]).init(&scope());
        "ConvTranspose2d: | kernel [3, 0]" => Conv2dConfig::new(4, 4, [3, 0]).init_transposed(&scope());
        "Conv1d: | stride" => Conv1dConfig::new(4, 4, 3)
            .with_options(Conv1dOptions { stride: 0, ..Conv1dOptions::default() })
            .init(&scope());
        "Embedding: | padding row 10 | 10 rows" => EmbeddingConfig::new(10, 3).with_padding(10).init(&scope());
        "Embedding: | padding row -11 | 10 rows" => EmbeddingConfig::new(10, 3).with_padding(-11).init(&scope());
        "MultiheadAttention: | 3 heads | width of 4" => attention(4, 3).init(&scope());
        "MultiheadAttention: | 0 heads" => attention(4, 0).init(&scope());
        "Dropout `dropout`: | probability of 7" => attention(4, 2).with_dropout(7.0).init(&scope());
        "GroupedQueryAttention: | 4 heads | 3 key heads" => GroupedQueryAttentionConfig::new(8, 4, 3).init(&scope());
        "MultiheadAttention: | 3 heads | width of 4" => TransformerEncoderLayerConfig::new(4, 3).init(&scope());
        "recurrent layer: | 0 layers" => RecurrentConfig::new(3, 4).with_layers(0).init_lstm(&scope());
        "recurrent layer: | 0 hidden" => RecurrentConfig::new(3, 0).init_gru(&scope());
        "normal: | standard deviation of -1" => LinearConfig::new(2, 2).with_init(Init::Normal { mean: 0.0, std: -1.0 }).init(&scope());
        "uniform: | lower one first" => LinearConfig::new(2, 2).with_init(Init::Uniform { low: 1.0, high: 0.0 }).init(&scope());
        "leaf: | i64 | floating-point" => Parameter::new("w", zeros(&[2], DType::I64));
        "GPT: | 3 heads | width 4" => gpt(|c| c.heads = 3);
        "GPT: | vocabulary | 0" => gpt(|c| c.vocabulary = 0);
        "GPT: | dropout | 0 to 1" => gpt(|c| c.dropout[1] = 2.0);
        "llama: | 3 key heads | multiple" => {
            let mut config = LlamaConfig::new(16, 8, 1, 4, 8);
            config.key_heads = 3;
            config.init(&scope()).map(std::mem::drop)
        };
    }
}

fn inputs() -> Vec<Mistake> {
    mistakes! {
        "linear: | [2, 4] | [2, 3]" => LinearConfig::new(3, 2).init(&scope()).unwrap().forward(&f(&[2, 4]));
        "linear: | i64 | floating-point" => LinearConfig::new(3, 2).init(&scope()).unwrap().forward(&of(&[2, 3], DType::I64));
        "embedding: | index 10 | below 10" => EmbeddingConfig::new(10, 3).init(&scope()).unwrap().forward(&i(&[10]));
        "embedding: | f32 | i64 or i32" => EmbeddingConfig::new(10, 3).init(&scope()).unwrap().forward(&f(&[2]));
        "BatchNorm: | [2, 3] | [4] dimensions" => BatchNormConfig::new(3).init_2d(&scope()).unwrap().forward(&f(&[2, 3]));
        "batch_norm: | [4] | [3]" => BatchNormConfig::new(3).init_1d(&scope()).unwrap().forward(&f(&[2, 4]));
        "batch_norm: | [1, 3] | more than one" => BatchNormConfig::new(3).init_1d(&scope()).unwrap().forward(&f(&[1, 3]));
        "conv2d: | 3 | 4" => conv(ConvOptions::default()).unwrap().forward(&f(&[1, 3, 5, 5]));
        "conv2d: | [2, 2]" => conv(ConvOptions::default()).unwrap().forward(&f(&[1, 4, 2, 2]));
        "Lstm: | hidden | cell | both" => lstm().forward(&f(&[1, 2, 3]), Some(&f(&[1, 1, 4])), None).map(std::mem::drop);
        "Lstm: | cell | hidden | both" => lstm().forward(&f(&[1, 2, 3]), None, Some(&f(&[1, 1, 4]))).map(std::mem::drop);
        "recurrent layer: | [1, 2, 5] | [B, T, 3]" => lstm().forward(&f(&[1, 2, 5]), None, None).map(std::mem::drop);
        "recurrent layer: | [2, 1, 4] | [1, 1, 4]" => lstm()
            .forward(&f(&[1, 2, 3]), Some(&f(&[2, 1, 4])), Some(&f(&[1, 1, 4])))
            .map(std::mem::drop);
        "MultiheadAttention: | [2, 5] | [B, T, 4]" => {
            let (layer, x) = (attention(4, 2).init(&scope()).unwrap(), f(&[2, 5]));
            layer.forward(&x, &x, &x, AttentionMasks::default())
        };
        "MultiheadAttention: | mask | f32 | bool" => {
            let (layer, x, mask) = (attention(4, 2).init(&scope()).unwrap(), f(&[1, 3, 4]), f(&[3, 3]));
            layer.forward(&x, &x, &x, AttentionMasks { mask: Some(&mask), keys: None })
        };
        "mse_loss: | [2] | [2, 1]" => MseLoss::default().forward(&f(&[2]), &f(&[2, 1]));
        "l1_loss: | [2] | [2, 1]" => L1Loss::default().forward(&f(&[2]), &f(&[2, 1]));
        "smooth_l1_loss: | beta -2" => SmoothL1Loss { beta: -2.0, ..SmoothL1Loss::default() }.forward(&f(&[2]), &f(&[2]));
        "cross_entropy: | smoothing 2" => {
            CrossEntropyLoss { label_smoothing: 2.0, ..CrossEntropyLoss::default() }.forward(&f(&[1, 3]), &i(&[0]))
        };
        "state dict: | missing: bias" => load(vec![("weight", zeros(&[2, 3], DType::F32))]);
        "state dict: | unexpected: beta" => load(vec![
            ("weight", zeros(&[2, 3], DType::F32)),
            ("bias", zeros(&[2], DType::F32)),
            ("beta", zeros(&[2], DType::F32)),
        ]);
        "state dict: | weight (got [3, 2], wanted [2, 3])" => load(vec![
            ("weight", zeros(&[3, 2], DType::F32)),
            ("bias", zeros(&[2], DType::F32)),
        ]);
        "state dict: | missing" => {
            let small = LinearConfig::new(3, 2).with_bias(false).init(&scope()).unwrap();
            load_state_dict(&LinearConfig::new(3, 2).init(&scope()).unwrap(), state_dict(&small))
        };
    }
}
