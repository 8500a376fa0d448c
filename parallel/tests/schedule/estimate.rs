//! The formulas against the tables of the papers, and against our own models.

use phalanx_nn::models::{GptConfig, ModelConfig};
use phalanx_nn::{Parameters, Scope};
use phalanx_parallel::estimate::{Layout, Recompute, Transformer};
use phalanx_tensor::{DType, Device};

fn gpt(hidden: usize, layers: usize) -> Transformer {
    Transformer { layers, hidden, heads: hidden / 128, vocabulary: 51200, sequence: 2048 }
}

/// Narayanan et al. (arXiv:2104.04473), table 1: hidden, layers, ranks, batch, teraFLOP/s a rank, billions of parameters.
const TABLE: [(usize, usize, usize, usize, f64, &str); 10] = [
    (2304, 24, 32, 512, 137.0, "1.7"),
    (3072, 30, 64, 512, 138.0, "3.6"),
    (4096, 36, 128, 512, 142.0, "7.5"),
    (6144, 40, 256, 1024, 135.0, "18.4"),
    (8192, 48, 512, 1536, 138.0, "39.1"),
    (10240, 60, 1024, 1792, 140.0, "76.1"),
    (12288, 80, 1536, 2304, 148.0, "145.6"),
    (16384, 96, 1920, 2160, 155.0, "310.1"),
    (20480, 105, 2520, 2520, 163.0, "529.6"),
    (25600, 128, 3072, 3072, 163.0, "1008.0"),
];

#[test]
fn megatrons_ten_models_have_their_parameters() {
    for (hidden, layers, .., wanted) in TABLE {
        assert_eq!(format!("{:.1}", gpt(hidden, layers).parameters() / 1e9), wanted);
    }
}

#[test]
fn our_models_have_the_parameters_of_the_formula_and_a_last_norm() {
    for (hidden, layers, ..) in TABLE {
        let model = gpt(hidden, layers);
        let config = GptConfig::new(model.vocabulary, model.sequence, layers, model.heads, hidden);
        let built = ModelConfig::Gpt(config).init(&Scope::new(0, DType::BF16, Device::Meta(9))).unwrap();
        let elements: usize = built.parameters().iter().map(|p| p.tensor().numel()).sum();
        assert_eq!(elements as f64, model.parameters() + 2.0 * hidden as f64, "{layers} layers of {hidden}");
    }
}

#[test]
fn megatrons_throughput_implies_its_iteration_times() {
    let seconds = |(hidden, layers, ranks, batch, rate, _): (usize, usize, usize, usize, f64, &str)| {
        gpt(hidden, layers).flops_recomputed(batch) / (ranks as f64 * rate * 1e12)
    };
    assert_eq!(format!("{:.2}", seconds(TABLE[0])), "3.53");
    assert_eq!(format!("{:.2}", seconds(TABLE[9])), "102.63");
}

#[test]
fn arithmetic_is_the_papers_formula() {
    let (l, h, s, v, b) = (80.0, 12288.0, 2048.0, 51200.0, 7.0);
    let close = |got: f64, wanted: f64| assert!((got / wanted - 1.0).abs() < 1e-14, "{got} and {wanted}");
    let base = b * s * l * h * h;
    close(gpt(12288, 80).flops_recomputed(7), 96.0 * base * (1.0 + s / (6.0 * h) + v / (16.0 * l * h)));
    close(gpt(12288, 80).flops(7), 72.0 * base * (1.0 + s / (6.0 * h) + v / (12.0 * l * h)));
}

#[test]
fn activations_of_a_block_are_the_papers_table() {
    let model = Transformer { layers: 96, hidden: 12288, heads: 96, vocabulary: 51200, sequence: 2048 };
    let sbh = 2048.0 * 2.0 * 12288.0;
    let scores = 5.0 * 96.0 * 2048.0 / 12288.0;
    assert_eq!(scores, 80.0, "of GPT-3, as the paper says");
    let bytes = |tensor, sequence_parallel, recompute| {
        let layout = Layout { tensor, sequence_parallel, recompute, ..Layout::default() };
        model.block_activation_bytes(&layout, 2) / sbh
    };
    use Recompute::{Attention, Block, Nothing};
    assert_eq!(bytes(1, false, Nothing), 34.0 + scores);
    assert_eq!(bytes(8, false, Nothing), 10.0 + 24.0 / 8.0 + scores / 8.0);
    assert_eq!(bytes(8, true, Nothing), (34.0 + scores) / 8.0);
    assert_eq!(bytes(1, false, Attention), 34.0);
    assert_eq!(bytes(8, false, Attention), 10.0 + 24.0 / 8.0);
    assert_eq!(bytes(8, true, Attention), 34.0 / 8.0);
    assert_eq!(bytes(8, true, Block), 2.0);
}

#[test]
fn activations_of_the_first_stage_are_those_of_all_blocks() {
    let model = gpt(6144, 48);
    let sbh = 2048.0 * 4.0 * 6144.0;
    let total = |pipeline, chunks| {
        let layout =
            Layout { tensor: 8, sequence_parallel: true, pipeline, chunks, recompute: Recompute::Attention };
        model.activation_bytes(&layout, 4) / sbh
    };
    let blocks = 48.0 * 34.0 / 8.0;
    assert_eq!(total(8, 1), blocks + 8.0 / 8.0);
    assert_eq!(total(8, 3), blocks * (1.0 + 7.0 / 24.0) + 8.0 / 8.0);
    assert_eq!(total(1, 1), blocks + 1.0 / 8.0 + 4.0 / 8.0 * (1.0 + 51200.0 / 6144.0));
}
