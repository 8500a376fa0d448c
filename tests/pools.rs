//! Programs that use rayon: devices that run on its pools, called from anywhere, have the bits of devices with threads of their own.

use std::sync::Arc;

use phalanx::prelude::*;
use phalanx::tensor::Pool;
use rayon::prelude::*;

/// The parameters after three steps, large enough that every operation is cut in pieces.
fn train(device: Device) -> Vec<Vec<f32>> {
    let scope = Scope::new(1, DType::F32, device);
    let layers = SequentialConfig::new().with(LinearConfig::new(512, 700)).with(Tanh);
    let model = layers.with(LinearConfig::new(700, 3)).init(&scope).unwrap();
    let mut optimizer = AdamW::default().init(vec![Group::new(model.parameters(), 1e-2)]).unwrap();
    let numbers: Vec<f32> = (0..300 * 512).map(|i| (i as f32 * 0.7).sin()).collect();
    let x = Var::from_slice(&numbers, &[300, 512], device).unwrap();
    for _ in 0..3 {
        optimizer.zero_grad().unwrap();
        let loss = model.forward(&x).unwrap().log_softmax(1).unwrap().square().unwrap().mean_all().unwrap();
        loss.backward().unwrap();
        optimizer.step().unwrap();
    }
    model.parameters().iter().map(|p| p.var().to_vec().unwrap()).collect()
}

#[test]
fn a_device_on_rayons_workers_has_the_bits_of_one_with_threads_of_its_own() {
    let rayon = Arc::new(rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap());
    let [own, named, callers] = [1, 2, 3].map(Device::Cpu);
    own.set_threads(3).unwrap();
    named.set_pool(Pool::on_rayon(Some(rayon.clone()))).unwrap();
    callers.set_pool(Pool::on_rayon(None)).unwrap();
    let wanted = train(own);
    assert!(train(named) == wanted, "from a thread that is none of rayon's");
    assert!(rayon.install(|| train(named)) == wanted, "from one of its workers");
    assert!(rayon.install(|| train(callers)) == wanted, "where the caller is");
    assert!(train(callers) == wanted, "on the global pool");
    for device in [own, named, callers] {
        let all: Vec<_> = rayon.install(|| (0..5).into_par_iter().map(|_| train(device)).collect());
        assert!(all.iter().all(|one| *one == wanted), "in each of five tasks at once, on {device}");
    }
}
