//! Lanes, copies beside other work, and times of a device's work.

use phalanx_tensor::cuda::{GpuClock, GpuEvent, Moment};
use phalanx_tensor::{DType, Device, Error, Stream, Tensor, adopt, record_stream, record_use};

use crate::{GPU, Outcome, STREAMS, add, add_on, counted, same, wrong};

pub fn lanes() -> Outcome {
    let lane = Stream::new(GPU)?;
    for round in 0..20 {
        let x = counted(&[40, 30], GPU)?;
        let y = std::sync::Arc::new(std::sync::Mutex::new(None));
        let (turned, to) = (x.transpose(0, 1)?, y.clone());
        lane.submit(move || {
            *to.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(turned.contiguous()?);
            Ok(())
        });
        if round % 2 == 0 {
            lane.synchronize()?;
        } else {
            lane.record().synchronize()?;
        }
        let y = y.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
        let y = y.ok_or(Error::invalid("test", "the lane's work did not run"))?;
        same(y.to_vec::<i64>()?, counted(&[40, 30], Device::CPU)?.transpose(0, 1)?.to_vec()?)?;
    }
    lane.synchronize()
}

pub fn recorded() -> Outcome {
    let (lane, copies) = (Stream::new(GPU)?, Stream::new(GPU)?);
    for round in 0..10 {
        let x = Tensor::from_slice(&[round; 500], &[500], GPU)?;
        let seen = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
        let (to, used) = (seen.clone(), x.clone());
        lane.submit(move || {
            *to.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = used.copy()?.to_vec::<i64>()?;
            Ok(())
        });
        record_stream(&x, &lane);
        copies.wait(&lane.record());
        drop(x);
        drop(Tensor::from_slice(&[-7i64; 500], &[500], GPU)?);
        lane.synchronize()?;
        same(seen.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone(), vec![round; 500])?;
    }
    copies.synchronize()
}

/// What stands behind a copy on the target's stream would have to wait for it. The emulator's streams show that it need not when they
/// are held back, in some of the rounds.
pub fn copies_beside() -> Outcome {
    let other = Device::Cuda(1);
    let copies = Stream::between(GPU, other)?;
    let mut went_on = 0;
    for round in 0..20 {
        let (mut x, mut z) = (counted(&[100], GPU)?, counted(&[100], other)?);
        (0..30).try_for_each(|_| add(&mut x, 1))?;
        let computed = GpuEvent::record(GPU.gpu()?)?;
        let y = copies.empty(&[100], DType::I64)?;
        let (source, mut target) = (x.clone(), y.clone());
        copies.submit(move || {
            target.copy_from(&source)?;
            record_use(&source)
        });
        let copied = copies.record();
        drop(x);
        // The copy is queued, and the memory of its source is free for others as soon as it has been read.
        let (told, queued) = std::sync::mpsc::channel();
        copies.submit(move || {
            let _ = told.send(());
            Ok(())
        });
        queued.recv().map_err(|e| Error::invalid("test", e.to_string()))?;
        let overwritten = Tensor::from_slice(&[-1i64; 100], &[100], GPU)?;
        add_on(other, &mut z, round)?;
        other.gpu()?.synchronize()?;
        went_on += usize::from(!computed.is_done()?);
        let added = |number: i64| (0..100).map(|i| i + number).collect::<Vec<i64>>();
        same(z.to_vec::<i64>()?, added(i64::from(round)))?;
        copied.synchronize()?;
        adopt(&y);
        same(y.to_vec::<i64>()?, added(30))?;
        same(overwritten.to_vec::<i64>()?, vec![-1; 100])?;
    }
    let held_back = std::env::var(STREAMS).is_ok_and(|streams| streams.starts_with("deferred"));
    if held_back && went_on == 0 { wrong("the target waited for every copy") } else { copies.synchronize() }
}

/// Every pair of kinds: what the second lane does comes after what the first has done.
pub fn mixed_lanes() -> Outcome {
    for (first, second) in
        [(Device::CPU, Device::CPU), (Device::CPU, GPU), (GPU, Device::CPU), (GPU, Device::Cuda(1))]
    {
        let lanes = [Stream::new(first)?, Stream::new(second)?];
        let (mut made, mut copied) =
            (Tensor::zeros(&[50], DType::I64, first)?, Tensor::zeros(&[50], DType::I64, second)?);
        let (source, got) = (made.clone(), copied.clone());
        lanes[0].submit(move || made.copy_from(&counted(&[50], Device::CPU)?));
        lanes[1].wait(&lanes[0].record());
        lanes[1].submit(move || copied.copy_from(&source));
        lanes[1].synchronize()?;
        same(got.to_vec::<i64>()?, (0..50).collect())?;
        lanes[0].synchronize()?;
    }
    Ok(())
}

pub fn moments() -> Outcome {
    let (gpu, before) = (GPU.gpu()?, std::time::Instant::now());
    let clock = GpuClock::new(gpu)?;
    let mut x = counted(&[100], GPU)?;
    let begin = Moment::now(GPU)?;
    (0..5).try_for_each(|_| add(&mut x, 1))?;
    let end = Moment::now(GPU)?;
    let took = begin.until(&end)?;
    let (Moment::Gpu(begin), Moment::Gpu(end)) = (begin, end) else { return wrong("moments of a CPU") };
    let [begin, end] = [clock.instant(&begin)?, clock.instant(&end)?];
    let apart = took.abs_diff(end.saturating_duration_since(begin));
    // The two clocks are apart by what this thread waits for its core.
    let slack = std::time::Duration::from_millis(200);
    if begin + slack < before || end > std::time::Instant::now() + slack || apart.as_micros() > 100 {
        return wrong(format!("{before:?}, {begin:?} to {end:?}, {took:?}"));
    }
    match Moment::now(Device::CPU)?.until(&Moment::now(GPU)?) {
        Err(Error::Invalid { .. }) => Ok(()),
        other => wrong(format!("a CPU's moment and a GPU's: {other:?}")),
    }
}
