//! Slow ranks: the rank that makes the others wait is the one that is named, under every axis, and nothing else changes.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use phalanx_nn::models::{GptConfig, ModelConfig};
use phalanx_parallel::hybrid::{Layout, decoder};
use phalanx_tensor::{Device, Tensor};
use phalanx_train::data::Samples;
use phalanx_train::{Callback, Config, Event, Record, Result, Trainer};

use super::Folder;

/// Rows of tokens, which are read slowly: by one rank, whose thread has the name, or by all ranks alike.
struct Rows {
    slow: Option<usize>,
}

impl Samples for Rows {
    fn sample(&self, number: u64) -> Result<Vec<Tensor>> {
        let slow = self.slow.map(|rank| format!("rank {rank}"));
        if slow.is_none_or(|slow| std::thread::current().name() == Some(&slow)) {
            std::thread::sleep(Duration::from_millis(150));
        }
        let row = |by: u64| -> Vec<i64> { (0..4).map(|i| ((number * 7 + i + by) % 11) as i64).collect() };
        let row = |by| Tensor::from_slice(&row(by), &[4], Device::CPU);
        Ok(vec![row(0)?, row(1)?])
    }
}

/// The bits of the losses, the shares and the notices of a run.
type Heard = (Vec<u64>, Vec<Vec<f64>>, Vec<String>);

#[derive(Clone, Default)]
struct Told(Arc<Mutex<Heard>>);

impl Callback for Told {
    fn step(&mut self, record: &Record) -> Result<()> {
        let mut told = self.0.lock().unwrap();
        told.0.push(record.loss.to_bits());
        told.1.extend(record.waited_for.clone());
        Ok(())
    }

    fn event(&mut self, event: &Event<'_>) -> Result<()> {
        if let Event::Notice { text, .. } = event {
            self.0.lock().unwrap().2.push((*text).into());
        }
        Ok(())
    }
}

#[test]
fn a_slow_rank_is_named_under_every_axis_and_a_run_without_one_names_none() {
    let model = ModelConfig::Gpt(GptConfig::new(11, 4, 2, 2, 8));
    let layout = |dp, tp, pp, micro_batches| Layout { dp, tp, pp, micro_batches, ..Layout::default() };
    for (layout, ranks) in
        [(layout(2, 1, 1, 1), vec![0, 1]), (layout(1, 1, 2, 4), vec![0, 1]), (layout(2, 2, 1, 1), vec![0, 3])]
    {
        let run = |slow| {
            let (folder, told) = (Folder::new(), Told::default());
            let config = Config {
                steps: 5,
                batch: 4,
                threads: Some(1),
                workers: 0,
                layout: layout.clone(),
                out: Some(folder.path().into()),
                ..Config::default()
            };
            let part = config.clone();
            Trainer::new(config)
                .samples(Rows { slow }, 4)
                .callback(told.clone())
                .run_parts(|rank| Ok(decoder(&model, &part.layout, &rank.groups, &rank.scope(&part), None)?))
                .unwrap();
            let page = std::fs::read_to_string(folder.path().join("report.html")).unwrap();
            let metrics = std::fs::read_to_string(folder.path().join("metrics.jsonl")).unwrap();
            assert_eq!(metrics.matches("\"waited_for\":[").count(), 1, "{metrics}");
            let told = told.0.lock().unwrap().clone();
            (told, page)
        };
        let ((losses, shares, notices), page) = run(None);
        assert_eq!((losses.len(), shares.len(), notices), (5, 1, vec![]), "{layout:?}: {shares:?}");
        assert!(!page.contains("Slowest rank"));
        for slow in ranks {
            let ((slow_losses, shares, notices), page) = run(Some(slow));
            let case = format!("{layout:?}, rank {slow}: {shares:?} {notices:?}");
            assert_eq!(slow_losses, losses, "{case}");
            assert!(shares[0][slow] > 0.2, "{case}");
            let rest = shares[0].iter().enumerate().filter(|(rank, _)| *rank != slow);
            assert!(rest.clone().all(|(_, share)| *share < 0.2), "{case}");
            assert!(
                notices.len() == 1 && notices[0].starts_with(&format!("rank {slow}: the others waited ")),
                "{case}"
            );
            assert!(page.contains("Slowest rank") && page.contains("% of the time for it"), "{case}");
        }
    }
}
