//! The caches of rows: what they hold, what layers with windows give up, and where they have to be filled again.

use phalanx_tensor::Device;

use super::*;
use crate::Scope;
use crate::models::tests::{all, build};
use crate::models::{Family, KvCache, ModelConfig, TransformerConfig};

/// The bytes that caches of rows hold after so many tokens each.
fn held(config: &ModelConfig, device: Device, lengths: &[usize], page: usize) -> usize {
    let model = config.init(&Scope::new(1, DType::F32, device)).unwrap();
    let _inference = inference();
    let before = device.ledger().unwrap().total().now;
    let mut rows: Vec<Vec<KvCache>> = lengths.iter().map(|_| model.row_caches(page).unwrap()).collect();
    for (caches, &length) in rows.iter_mut().zip(lengths) {
        for _ in 0..length {
            model.extend_rows(&mut [(caches, &[1])]).unwrap();
        }
    }
    device.ledger().unwrap().total().now - before
}

#[test]
fn rows_hold_the_pages_that_they_use_and_layers_with_windows_no_more_than_those() {
    let device = Device::Cpu(823);
    let (layers, width, page) = (3, 16, 4);
    let size = TransformerConfig::new(Family::Mistral, 37, 200, layers, 2, width);
    let of = |window: Option<usize>| {
        let mut config = size.clone();
        config.layers.iter_mut().for_each(|layer| layer.window = window);
        ModelConfig::from(config)
    };
    let position = layers * 2 * width * 4;
    // Whole pages of each row, not the longest row's, which had 76 and then a quarter more.
    assert_eq!(held(&of(None), device, &[1, 4, 5, 90], page), (4 + 4 + 8 + 96) * position);
    // A window of 6 shows 5 earlier positions: with the new one two pages, and a page to spare.
    assert_eq!(held(&of(Some(6)), device, &[2, 90], page), (4 + 12) * position);
    // 96 and a quarter more would be 120, which no query sees.
    assert_eq!(held(&of(Some(100)), device, &[97, 150], page), (100 + 104) * position);
    assert_eq!(held(&of(None), Device::Meta(823), &[1, 4, 5, 90], page), (4 + 4 + 8 + 96) * position);
}

#[test]
fn a_cache_of_many_pages_moves_few_times_and_keeps_what_it_has() {
    let mut cache = KvCache::new(1, 2, 0, 3, DType::F32, Device::CPU).unwrap().with_pages(4);
    let mut capacities = Vec::new();
    let position = |i: usize| Var::from_slice(&[i as f32; 6], &[1, 2, 1, 3], Device::CPU).unwrap();
    for i in 0..1000 {
        let (keys, values) = cache.append(&position(i), &position(i + 1)).unwrap();
        assert_eq!(keys.narrow(2, 0, 1).unwrap().to_vec::<f32>().unwrap(), [0.0; 6]);
        assert_eq!(values.narrow(2, i, 1).unwrap().to_vec::<f32>().unwrap(), [i as f32 + 1.0; 6]);
        assert!(cache.capacity() <= (i + 1).max(4) * 5 / 4 + 4);
        capacities.push(cache.capacity());
    }
    capacities.dedup();
    assert!(capacities.len() < 24, "{capacities:?}");
}

#[test]
fn a_window_gives_up_positions_and_no_score_changes() {
    for (i, config) in all(0.0).into_iter().enumerate() {
        let ModelConfig::Transformer(mut config) = config else { continue };
        config.context = 60;
        config.layers.iter_mut().for_each(|layer| layer.window = Some(5));
        let model = build(&config.into(), DType::F64, Device::CPU);
        let _inference = inference();
        let tokens: Vec<i64> = (0..60).map(|i| i * 5 % 37).collect();
        let whole = Var::from_slice(&tokens, &[1, 60], Device::CPU).unwrap();
        let wanted = model.logits(&model.forward(&whole).unwrap()).unwrap().to_vec::<f64>().unwrap();
        let mut caches = model.row_caches(3).unwrap();
        for run in
            [0..7usize, 7..8, 8..9, 9..20, 20..22, 22..23].into_iter().chain((23..60).map(|i| i..i + 1))
        {
            let got = model.extend_rows(&mut [(&mut caches, &tokens[run.clone()])]).unwrap();
            for (a, b) in got.to_vec::<f64>().unwrap().iter().zip(&wanted[(run.end - 1) * 37..run.end * 37]) {
                assert!((a - b).abs() < 1e-10, "model {i}, {run:?}: {a} {b}");
            }
        }
        assert!(caches.iter().all(|cache| cache.len() == 60 && cache.capacity() <= 9));
    }
}

#[test]
fn caches_of_long_rope_do_not_grow_beyond_its_former_context() {
    let size = TransformerConfig { key_heads: 1, ..TransformerConfig::new(Family::Llama, 37, 12, 2, 2, 16) };
    let phi = Family::samples(&size).into_iter().find(|config| config.family == Family::Phi3).unwrap();
    let model = build(&ModelConfig::Transformer(phi), DType::F64, Device::CPU);
    assert_eq!(model.turning_point(), Some(6));
    let _inference = inference();
    let tokens = [3i64, 14, 15, 9, 26, 5, 35, 8];
    let whole =
        model.logits(&model.forward(&Var::from_slice(&tokens, &[1, 8], Device::CPU).unwrap()).unwrap());
    let whole = whole.unwrap().narrow(1, 7, 1).unwrap().to_vec::<f64>().unwrap();
    let mut caches = model.row_caches(4).unwrap();
    model.extend_rows(&mut [(&mut caches, &tokens[..4])]).unwrap();
    model.extend_rows(&mut [(&mut caches, &tokens[4..6])]).unwrap();
    let refused = model.extend_rows(&mut [(&mut caches, &tokens[6..])]).unwrap_err().to_string();
    assert!(refused.contains("got 2 positions more after 6 of long rope's former context 6"), "{refused}");
    // All positions again, in pieces of which the first is rotated as the last.
    caches.iter_mut().for_each(KvCache::clear);
    caches.iter_mut().for_each(|cache| cache.expect(8));
    model.extend_rows(&mut [(&mut caches, &tokens[..3])]).unwrap();
    let scores = model.extend_rows(&mut [(&mut caches, &tokens[3..])]).unwrap().to_vec::<f64>().unwrap();
    assert!(
        scores.iter().zip(&whole).all(|(got, wanted)| (got - wanted).abs() < 1e-12),
        "{scores:?} {whole:?}"
    );
    // In pieces that are not known to belong to more, the first one is rotated otherwise.
    caches.iter_mut().for_each(KvCache::clear);
    model.extend_rows(&mut [(&mut caches, &tokens[..3])]).unwrap();
    assert!(model.extend_rows(&mut [(&mut caches, &tokens[3..])]).is_err());
}
