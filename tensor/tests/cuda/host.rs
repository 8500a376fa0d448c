//! What goes between a GPU and the host's memory.

use phalanx_tensor::cuda::{Pinned, Readback, calls};
use phalanx_tensor::{DType, Device, Error, Tensor};

use super::{GPU, Outcome, add, counted, same, wrong};

pub fn readback() -> Outcome {
    let mut x = Tensor::from_slice(&[1.5, -2.0], &[2], GPU)?;
    let mut read = Readback::new(GPU, 2)?;
    same(read.finish().is_err(), true)?;
    let before = calls();
    read.start(&x)?;
    same(calls(), before)?;
    // What is written later is not what was asked for.
    x.copy_from(&Tensor::from_slice(&[7.0, 8.0], &[2], Device::CPU)?)?;
    same(read.finish()?, vec![1.5, -2.0])?;
    same(calls().waits, before.waits + 1)?;
    read.start(&x)?;
    read.start(&x)?;
    same(read.finish()?, vec![7.0, 8.0])?;
    // What a kernel has found comes with the numbers of after it, once.
    read.start(&x)?;
    let mut counted = counted(&[100], GPU)?;
    add(&mut counted, 901)?;
    same(read.finish()?, vec![7.0, 8.0])?;
    read.start(&x)?;
    match read.finish() {
        Err(Error::Range { op: "add", got, .. }) => same(got.as_str(), "index 1000 (item 99)")?,
        other => return wrong(format!("{other:?}")),
    }
    GPU.synchronize()?;
    read.start(&x)?;
    same(read.finish()?, vec![7.0, 8.0])?;
    for other in [x.narrow(0, 0, 1)?, Tensor::zeros(&[2], DType::F64, Device::CPU)?] {
        same(read.start(&other).is_err(), true)?;
    }
    Ok(())
}

pub fn uploads() -> Outcome {
    let sizes = [10_000, 20_000, 9_000, 600_000, 9_000, 30_000, 8_192, 9_000, 8_191, 1];
    let numbers = |round: usize, size: usize| (0..size).map(move |i| (round * 1000 + i) as f64);
    for round in 0..3 {
        let mut to = sizes
            .map(|size| Tensor::zeros(&[size], DType::F64, GPU))
            .into_iter()
            .collect::<Result<Vec<_>, _>>()?;
        let waits = calls().waits;
        for to in &mut to {
            let size = to.numel();
            let mut from =
                Tensor::from_slice(&numbers(round, size).collect::<Vec<_>>(), &[size], Device::CPU)?;
            to.copy_from(&from)?;
            from.copy_from(&Tensor::zeros(&[size], DType::F64, Device::CPU)?)?;
        }
        same(calls().waits, waits)?;
        for to in to {
            same(to.to_vec::<f64>()? == numbers(round, to.numel()).collect::<Vec<_>>(), true)?;
        }
    }
    Ok(())
}

pub fn pinned() -> Outcome {
    let mut memory = Pinned::zeros(GPU.gpu()?, 100)?;
    same(memory.iter().map(|&b| usize::from(b)).sum::<usize>(), 0)?;
    memory.fill(3);
    same(memory.to_vec(), vec![3; 100])
}

pub fn untouchable() -> Outcome {
    let mut x = counted(&[4], GPU)?;
    let read = x.read::<i64>("test").map(drop);
    let write = x.write::<i64>("test").map(drop);
    for outcome in [read, write] {
        match outcome {
            Err(error) if error.to_string().contains("to_device") => {}
            other => return wrong(format!("{other:?}")),
        }
    }
    match counted(&[4], Device::CPU)?.device_read("test").map(drop) {
        Err(_) => Ok(()),
        Ok(()) => wrong("a CPU's tensor has a GPU's address"),
    }
}
