//! What all ranks hold is written by all of them, each a share of what is large.

use std::fs;

use phalanx_parallel::checkpoint::{BLOCK, Checkpoint, Saver};
use phalanx_parallel::part::Part;
use phalanx_parallel::{Result, launch};
use phalanx_tensor::{Device, Tensor};

use crate::{Place, settings};

fn table(elements: usize, device: Device) -> Tensor {
    let values: Vec<f32> = (0..elements).map(|i| (i % 8191) as f32).collect();
    Tensor::from_slice(&values, &[elements], device).unwrap()
}

#[test]
fn a_table_larger_than_all_else_is_shared_out() {
    let (place, elements) = (Place::new("copies"), 3 * BLOCK / size_of::<f32>() + 12);
    let folder = place.join("saved");
    let saved = launch::threads(3, |rank| -> Result<()> {
        let parts = vec![
            Part::whole("table", table(elements, rank.device())),
            Part::whole("small", table(5, rank.device())),
        ];
        let mut saver = Saver::new(rank.comm())?;
        saver.save(&folder, parts, &settings(1))?;
        saver.wait()
    });
    saved.unwrap();
    for rank in 0..3 {
        let bytes = fs::metadata(folder.join(format!("rank-{rank}.safetensors"))).unwrap().len() as usize;
        assert!((BLOCK..BLOCK + 1000).contains(&bytes), "rank {rank} has written {bytes}");
    }
    let read =
        Part::whole("table", Tensor::zeros(&[elements], phalanx_tensor::DType::F32, Device::CPU).unwrap());
    let saved = Checkpoint::open(&folder).unwrap();
    saved.verify().unwrap();
    saved.read(std::slice::from_ref(&read)).unwrap();
    assert!(read.values.to_bytes().unwrap() == table(elements, Device::CPU).to_bytes().unwrap());
}
