//! Streams and events.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use phalanx_tensor::{Context, DType, Device, Error, Result, Stream, Tensor, record_stream};

#[test]
fn work_waits_for_the_other_lanes_event_and_sees_its_results() -> Result<()> {
    for _ in 0..50 {
        let (first, second) = (Stream::new(Device::CPU)?, Stream::new(Device::Cpu(1))?);
        let log = Arc::new(Mutex::new(Vec::new()));
        let note = |lane: &Stream, what: i32| {
            let log = log.clone();
            lane.submit(move || {
                log.lock().unwrap().push(what);
                Ok(())
            });
        };
        first.submit(|| {
            std::thread::sleep(Duration::from_millis(1));
            Ok(())
        });
        note(&first, 1);
        second.wait(&first.record());
        note(&second, 2);
        first.wait(&second.record());
        note(&first, 3);
        first.synchronize()?;
        assert_eq!(*log.lock().unwrap(), [1, 2, 3]);
    }
    Ok(())
}

#[test]
fn lanes_run_beside_the_caller_and_each_other() -> Result<()> {
    let (first, second) = (Stream::new(Device::CPU)?, Stream::new(Device::Meta(0))?);
    let ((to_second, at_second), (to_first, at_first)) = (channel(), channel());
    // Each needs the other's message: only lanes that overlap finish.
    first.submit(move || {
        to_second.send(()).unwrap();
        at_first.recv_timeout(Duration::from_secs(5)).map_err(|e| Error::invalid("test", e.to_string()))
    });
    second.submit(move || {
        to_first.send(()).unwrap();
        at_second.recv_timeout(Duration::from_secs(5)).map_err(|e| Error::invalid("test", e.to_string()))
    });
    first.synchronize()?;
    second.synchronize()
}

#[test]
fn a_copy_on_a_lane_is_seen_after_its_event() -> Result<()> {
    let lane = Stream::new(Device::Cpu(11))?;
    let x = Tensor::from_vec((0..10_000).collect::<Vec<i32>>(), &[100, 100], Device::CPU)?;
    let (result, source) = (Arc::new(Mutex::new(None)), x.transpose(0, 1)?);
    let slot = result.clone();
    lane.submit(move || {
        *slot.lock().unwrap() = Some(source.to_device(Device::Cpu(11), false)?);
        Ok(())
    });
    lane.record().synchronize()?;
    let copy = result.lock().unwrap().take().unwrap();
    assert_eq!((copy.device(), copy.i((7, 3))?.item::<i32>()?), (Device::Cpu(11), 307));
    Ok(())
}

#[test]
fn record_stream_keeps_the_bytes_until_the_lane_has_passed() -> Result<()> {
    let device = Device::Cpu(12);
    let ledger = device.ledger()?;
    let lane = Stream::new(device)?;
    let (go, wait) = channel::<()>();
    lane.submit(move || {
        let _ = wait.recv();
        Ok(())
    });
    let x = Tensor::zeros(&[1000], DType::F32, device)?;
    record_stream(&x, &lane);
    drop(x);
    let event = lane.record();
    assert!(!event.is_done());
    assert_eq!(ledger.total().now, 4000);
    drop(go);
    event.synchronize()?;
    assert!(event.is_done());
    assert_eq!(ledger.total().now, 0);
    Ok(())
}

#[test]
fn panics_and_errors_are_reported_once_and_the_lane_lives_on() -> Result<()> {
    let lane = Stream::new(Device::CPU)?;
    let ran = Arc::new(AtomicUsize::new(0));
    lane.submit(|| panic!("lost {}", "it"));
    lane.submit(|| Err(Error::invalid("test", "the second error")));
    lane.submit(|| std::panic::panic_any(5));
    let count = ran.clone();
    lane.submit(move || {
        count.fetch_add(1, Ordering::Relaxed);
        Ok(())
    });
    let event = lane.record();
    assert!(event.synchronize().unwrap_err().to_string().contains("lost it"));
    let error = lane.synchronize().unwrap_err();
    assert!(matches!(&error, Error::Panic { message, .. } if message == "lost it"), "{error}");
    assert_eq!(ran.load(Ordering::Relaxed), 1);
    lane.synchronize()
}

#[test]
fn a_lane_that_waits_for_failed_work_takes_over_the_error() -> Result<()> {
    let (first, second) = (Stream::new(Device::CPU)?, Stream::new(Device::CPU)?);
    first.submit(|| Err(Error::invalid("test", "broken")));
    second.wait(&first.record());
    assert!(second.synchronize().unwrap_err().to_string().contains("broken"));
    assert!(first.synchronize().is_err());
    Ok(())
}

#[test]
fn an_event_of_a_dropped_stream_is_reached() -> Result<()> {
    let (lane, other) = (Stream::new(Device::CPU)?, Stream::new(Device::CPU)?);
    lane.submit(|| {
        std::thread::sleep(Duration::from_millis(20));
        Ok(())
    });
    let event = lane.record();
    drop(lane);
    other.wait(&event);
    other.synchronize()?;
    event.synchronize()
}

#[test]
fn work_that_would_wait_for_itself_gets_an_error() -> Result<()> {
    let lane = Stream::new(Device::CPU)?;
    let own = lane.clone();
    lane.submit(move || own.synchronize());
    assert!(lane.synchronize().unwrap_err().to_string().contains("Stream::wait"));
    // A handle of its own inside the work keeps no lane alive for ever: it is gone with the work.
    Ok(())
}

#[test]
fn a_circle_of_blocking_lanes_is_found_and_a_chain_is_none() -> Result<()> {
    let lanes = [Stream::new(Device::CPU)?, Stream::new(Device::CPU)?, Stream::new(Device::CPU)?];
    let barrier = Arc::new(std::sync::Barrier::new(3));
    for i in 0..3 {
        let (next, barrier) = (lanes[(i + 1) % 3].clone(), barrier.clone());
        lanes[i].submit(move || {
            barrier.wait();
            next.record().synchronize()
        });
    }
    let failed = lanes.iter().filter(|lane| lane.synchronize().is_err()).count();
    assert!(failed >= 1, "somebody had to give way");

    let (last, barrier) = (lanes[2].clone(), Arc::new(std::sync::Barrier::new(2)));
    let (there, middle) = (barrier.clone(), lanes[1].clone());
    lanes[2].submit(move || {
        there.wait();
        Ok(())
    });
    lanes[1].submit(move || last.synchronize());
    lanes[0].submit(move || middle.synchronize());
    barrier.wait();
    lanes.iter().try_for_each(Stream::synchronize)
}

#[test]
fn work_runs_in_the_context_of_its_submitter() -> Result<()> {
    let lane = Stream::new(Device::CPU)?;
    let outside = Context::current().rng.step;
    let guard = Context::with(|c| c.rng.step = 77);
    lane.submit(|| match Context::current().rng.step {
        77 => Ok(()),
        step => Err(Error::invalid("test", format!("step {step}"))),
    });
    drop(guard);
    lane.submit(move || match Context::current().rng.step {
        step if step == outside => Ok(()),
        step => Err(Error::invalid("test", format!("step {step}"))),
    });
    lane.synchronize()
}

#[test]
fn devices_that_cannot_be_used_have_no_lanes() {
    assert!(Stream::new(Device::Cuda(0)).is_err());
}
