//! Buckets' work on an engine with threads.

use std::sync::Arc;

use phalanx_nn::Parameters;
use phalanx_parallel::comm::Comm;
use phalanx_parallel::data_parallel::{AllReduce, Average, Bucket, BucketHook, Ddp, DdpConfig, Rest};
use phalanx_parallel::engine::{Engine, EngineConfig, Lane};
use phalanx_parallel::{Result, launch};
use phalanx_tensor::Device;

use super::small::Small;

/// With threads for communication.
pub fn threaded() -> Option<Arc<Engine>> {
    let config = EngineConfig::new().lane(Lane::Priority, 2);
    Some(Arc::new(Engine::threaded(&config).unwrap()))
}

#[test]
fn an_engine_with_threads_gives_the_same_bits() {
    let run = |engine: fn() -> Option<Arc<Engine>>| {
        let body = |rank: launch::Rank| -> Result<_> {
            let model = Small::new(rank.device());
            let config = DdpConfig {
                first_bucket_bytes: 1,
                bucket_bytes: 40,
                average: Average::Mean,
                find_unused: true,
                engine: engine(),
                ..DdpConfig::default()
            };
            let ddp = Ddp::new(&model, rank.comm().clone(), config)?;
            let mut optimizer = model.optimizer();
            for step in 0..6 {
                ddp.backward(&model.loss(step * 3 + rank.rank() as u64, 2, step % 2 == 0)?)?;
                optimizer.step()?;
                optimizer.zero_grad()?;
            }
            Ok(model.bytes())
        };
        launch::threads(3, body).unwrap()
    };
    let plain = run(|| None);
    assert!(plain.iter().all(|bytes| *bytes == plain[0]));
    assert_eq!(run(threaded), plain);
    assert_eq!(run(|| Some(Arc::new(Engine::serial()))), plain);
}

/// Refuses the second bucket of rank 1.
#[derive(Debug)]
struct Refuses;

impl BucketHook for Refuses {
    fn start(&self, bucket: &Bucket<'_>, comm: &Comm) -> Result<Rest> {
        if bucket.index == 1 && comm.rank() == 1 {
            return Err(phalanx_nn::Error::invalid("hook", "not this one").into());
        }
        AllReduce.start(bucket, comm)
    }
}

#[test]
fn a_bucket_that_fails_is_named_with_its_cause() {
    for engine in [threaded, || None] {
        let body = |rank: launch::Rank| -> Result<()> {
            let model = Small::new(rank.device());
            let config = DdpConfig {
                first_bucket_bytes: 1,
                bucket_bytes: 1,
                hook: Arc::new(Refuses),
                engine: engine(),
                ..DdpConfig::default()
            };
            assert!(model.parameters().len() > 3);
            let ddp = Ddp::new(&model, rank.comm().clone(), config)?;
            let outcome = ddp.backward(&model.loss(1, 2, true)?);
            let error = outcome.as_ref().unwrap_err().to_string();
            if rank.rank() == 1 {
                assert!(error.contains("`bucket 1` failed") && error.contains("not this one"), "{error}");
            }
            outcome
        };
        let error = launch::threads(2, body).unwrap_err().to_string();
        assert!(error.contains("rank 1") && error.contains("not this one"), "{error}");
    }
}

#[test]
fn an_engine_without_the_lane_is_refused() {
    let engine = Engine::threaded(&EngineConfig::new().lane(Device::CPU, 1)).unwrap();
    let config = DdpConfig { engine: Some(Arc::new(engine)), ..DdpConfig::default() };
    let body = |rank: launch::Rank| -> Result<()> {
        let model = Small::new(rank.device());
        Ddp::new(&model, rank.comm().clone(), config.clone()).map(|_| ())
    };
    let error = launch::threads(1, body).unwrap_err().to_string();
    assert!(error.contains("priority lane"), "{error}");
}
