//! BERT for masked tokens and for classes, and ViT, over stages, tensor-parallel ranks and replicas, train as one device does; and their folders are
//! read and written in parts.

use std::path::Path;

use phalanx_nn::models::{BertConfig, BertTask, EncoderConfig, RecomputeMode, VitConfig};
use phalanx_nn::{Batch, Parameters, Scope, cut};
use phalanx_parallel::Result;
use phalanx_parallel::hybrid::{Layout, encoder};
use phalanx_parallel::launch::{self, Rank};
use phalanx_parallel::mesh::Groups;
use phalanx_parallel::tensor_parallel::save_encoder;
use phalanx_tensor::{DType, Device, Tensor};

use crate::encoder_decoder::{Outcome, train};
use crate::run::SEED;

const ROWS: usize = 6;
const POSITIONS: usize = 7;

/// A BERT of 3 blocks, whose vocabulary does not divide by 2 and whose padding is on the second of two ranks.
fn bert(task: BertTask, tied: bool) -> BertConfig {
    let (inner, padding) = (13, Some(40));
    BertConfig { inner, padding, tied, ..BertConfig::new(task, 53, 9, 3, 4, 16) }
}

fn vit() -> VitConfig {
    VitConfig { dropout: 0.1, attention_dropout: 0.1, ..VitConfig::new([8, 6], [4, 3], 3, 4, 16, 5) }
}

/// The micro-batches of a replica.
fn pieces(layout: &Layout, replica: usize, tensors: impl Fn(&[usize]) -> Vec<Tensor>) -> Vec<Batch> {
    let own = cut(ROWS, layout.dp)[replica].clone();
    let pieces = cut(own.len(), layout.micro_batches).into_iter();
    let rows = pieces.map(|piece| (own.start + piece.start..own.start + piece.end).collect::<Vec<_>>());
    rows.map(|rows| Batch { first_row: rows[0], tensors: tensors(&rows) }).collect()
}

/// A text's token; the last ones of some are padding.
fn token(step: u64, row: usize, at: usize) -> i64 {
    if at >= POSITIONS - row % 3 { 40 } else { ((row * 17 + at * 5 + step as usize) % 39) as i64 }
}

/// Of every second token a label, of padding too, or of every text one; types and which tokens are seen.
fn texts(task: BertTask, step: u64, rows: &[usize], device: Device) -> Vec<Tensor> {
    let all = |value: &dyn Fn(usize, usize) -> i64| {
        let at = |row: usize| (0..POSITIONS).map(move |at| (row, at));
        let values: Vec<i64> = rows.iter().flat_map(|&row| at(row)).map(|(row, at)| value(row, at)).collect();
        Tensor::from_slice(&values, &[rows.len(), POSITIONS], device).unwrap()
    };
    let labels = match task {
        BertTask::MaskedLm => {
            all(&|row, at| if (row + at) % 2 == 0 { ((row + at * 7) % 53) as i64 } else { -100 })
        }
        BertTask::Classification => {
            let labels: Vec<i64> = rows.iter().map(|row| (row % 2) as i64).collect();
            Tensor::from_slice(&labels, &[rows.len()], device).unwrap()
        }
    };
    let seen = all(&|row, at| i64::from(token(step, row, at) != 40));
    vec![all(&|row, at| token(step, row, at)), labels, all(&|_, at| i64::from(at > 3)), seen]
}

fn images(step: u64, rows: &[usize], device: Device) -> Vec<Tensor> {
    let pixels = 3 * 8 * 6;
    let value = |row: usize, i: usize| ((row * pixels + i) as f32 * 0.37 + step as f32).sin();
    let values: Vec<f32> = rows.iter().flat_map(|&row| (0..pixels).map(move |i| value(row, i))).collect();
    let images = Tensor::from_slice(&values, &[rows.len(), 3, 8, 6], device).unwrap();
    let images = phalanx_kernels::cast(&images, DType::F64).unwrap();
    let labels: Vec<i64> = rows.iter().map(|row| (row % 5) as i64).collect();
    vec![images, Tensor::from_slice(&labels, &[rows.len()], device).unwrap()]
}

fn layout([dp, tp, pp]: [usize; 3], schedule: &str) -> Layout {
    Layout { dp, tp, pp, schedule: schedule.into(), micro_batches: 3, ..Layout::default() }
}

/// What all ranks come to.
fn run<C: EncoderConfig>(
    config: &C,
    layout: &Layout,
    zero: u8,
    tensors: &(impl Fn(u64, &[usize], Device) -> Vec<Tensor> + Sync),
) -> Outcome {
    let rank = |rank: Rank| -> Result<Outcome> {
        let groups = Groups::new(layout.mesh()?, rank.comm())?;
        let scope = Scope::new(SEED, DType::F64, rank.device());
        let model = encoder(config, layout, &groups, &scope, None)?;
        let batches = |step, replica| pieces(layout, replica, |rows| tensors(step, rows, rank.device()));
        train(model, layout, zero, &groups, batches, 0.125)
    };
    let ranks = launch::threads(layout.dp * layout.tp * layout.pp, rank);
    Outcome::of_all(ranks.unwrap_or_else(|e| panic!("{layout:?}: {e}")))
}

/// Stages and ZeRO have the bits of one device's replicas, tensor parallelism those of the same split, which is near one device.
fn check<C: EncoderConfig>(config: &C, tensors: impl Fn(u64, &[usize], Device) -> Vec<Tensor> + Sync) {
    let of = |mesh, schedule| run(config, &layout(mesh, schedule), 0, &tensors);
    let alone = of([1, 1, 1], "1f1b");
    assert!(of([1, 1, 2], "1f1b") == alone, "two stages");
    let recompute = Layout { recompute: RecomputeMode::Always, ..layout([1, 1, 2], "interleaved") };
    assert!(run(config, &recompute, 0, &tensors) == alone, "four stages on two ranks");
    let replicas = of([2, 1, 1], "1f1b");
    assert!(run(config, &layout([2, 1, 1], "1f1b"), 3, &tensors) == replicas, "ZeRO 3");
    let split = of([1, 2, 1], "1f1b");
    split.assert_near(&alone);
    assert!(of([1, 2, 2], "1f1b") == split, "two stages of split layers");
    let zero = run(config, &layout([2, 2, 1], "1f1b"), 3, &tensors);
    assert!(of([2, 2, 1], "1f1b") == zero, "ZeRO 3 of split layers");
}

#[test]
fn a_bert_for_masked_tokens_trains_as_on_one_device() {
    let tensors = |step, rows: &[usize], device| texts(BertTask::MaskedLm, step, rows, device);
    check(&bert(BertTask::MaskedLm, true), tensors);
    let untied = bert(BertTask::MaskedLm, false);
    let of = |mesh| run(&untied, &layout(mesh, "1f1b"), 0, &tensors);
    let alone = of([1, 1, 1]);
    assert!(of([1, 1, 2]) == alone);
    of([1, 2, 1]).assert_near(&alone);
}

#[test]
fn a_bert_for_classes_trains_as_on_one_device() {
    let task = BertTask::Classification;
    check(&bert(task, true), |step, rows: &[usize], device| texts(task, step, rows, device));
}

#[test]
fn a_vit_trains_as_on_one_device() {
    check(&vit(), images);
}

#[test]
fn ranks_read_and_write_folders_in_parts() {
    fn folder<C: EncoderConfig>(config: &C, place: &Path) {
        let alone = config.init(&Scope::new(SEED, DType::F32, Device::CPU)).unwrap();
        config.save(&alone, place.join("alone")).unwrap();
        let whole: Vec<_> = alone.parameters().iter().map(|p| (p.name().to_string(), p.tensor())).collect();
        for mesh in [[1, 2, 1], [1, 1, 2], [1, 2, 2]] {
            let (layout, again) = (layout(mesh, "1f1b"), place.join(format!("{mesh:?}")));
            launch::threads(mesh.iter().product(), |rank: Rank| -> Result<()> {
                let groups = Groups::new(layout.mesh()?, rank.comm())?;
                // Another seed, so that what is not loaded shows.
                let scope = Scope::new(99, DType::F32, rank.device());
                let model = encoder(config, &layout, &groups, &scope, Some(&place.join("alone")))?;
                for p in model.parameters() {
                    let (_, wanted) = whole.iter().find(|(name, _)| name == p.name()).unwrap();
                    let wanted = p.part().of(wanted)?.contiguous()?.to_bytes()?;
                    assert_eq!(p.tensor().to_bytes()?, wanted, "{}", p.name());
                }
                save_encoder(&model, config, groups.model(), &again)
            })
            .unwrap();
            let read = |folder: &Path| std::fs::read(folder.join("model.safetensors")).unwrap();
            assert!(read(&again) == read(&place.join("alone")), "{mesh:?}");
        }
    }
    let place = std::env::temp_dir().join(format!("phalanx-encoders-{}", std::process::id()));
    folder(&bert(BertTask::MaskedLm, true), &place.join("tied"));
    folder(&bert(BertTask::MaskedLm, false), &place.join("untied"));
    folder(&bert(BertTask::Classification, true), &place.join("classes"));
    folder(&vit(), &place.join("vit"));
    std::fs::remove_dir_all(&place).unwrap();
}

#[test]
fn what_encoders_cannot_be_split_into_is_refused() {
    let refused = |layout: Layout| {
        let error = launch::threads(layout.tp, |rank: Rank| -> Result<()> {
            let groups = Groups::new(layout.mesh()?, rank.comm())?;
            let scope = Scope::new(SEED, DType::F32, rank.device());
            encoder(&vit(), &layout, &groups, &scope, None).map(drop)
        });
        error.unwrap_err().to_string()
    };
    let sequence = refused(Layout { sequence_parallel: true, ..layout([1, 2, 1], "1f1b") });
    assert!(sequence.contains("encoder: got sequence parallelism"), "{sequence}");
    let heads = refused(layout([1, 3, 1], "1f1b"));
    assert!(heads.contains("got 4 to cut over 3 ranks"), "{heads}");
}
