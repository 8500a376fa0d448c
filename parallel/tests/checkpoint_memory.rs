//! Saving and reading hold one block besides the tensors: by the ledger, and by what the system counts.
#![cfg(target_os = "linux")]

use std::time::Instant;

use phalanx_parallel::checkpoint::{BLOCK, Checkpoint, Host, MemorySaver, MemoryStore, Saver, Settings};
use phalanx_parallel::sharded_tensor::ShardedTensor;
use phalanx_parallel::{Result, comm, launch};
use phalanx_tensor::{DType, Device};

/// Of the tensors, in bytes.
const BYTES: usize = 160 << 20;
/// What else the process does.
const SLACK: usize = 4 << 20;

/// Bytes of physical memory: now (`VmRSS`) or at most (`VmHWM`).
fn resident(field: &str) -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with(field)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() << 10
}

/// How much more than before there was at a time while `f` ran.
fn growth(f: impl FnOnce()) -> usize {
    std::fs::write("/proc/self/clear_refs", "5").unwrap();
    let before = resident("VmRSS");
    f();
    resident("VmHWM").saturating_sub(before)
}

#[test]
fn a_save_holds_three_blocks_a_load_one_and_ranks_books_count_nothing() {
    few_blocks();
    two_copies();
    let folder = std::env::temp_dir().join(format!("phalanx-books-{}", std::process::id()));
    let run = |rank: launch::Rank| -> Result<()> {
        let parts =
            vec![ShardedTensor::whole("w", phalanx_kernels::full(&[5000], 1.0, DType::F32, rank.device())?)];
        let ledger = rank.device().ledger()?;
        rank.comm().barrier()?;
        ledger.reset_peak();
        let before = ledger.total().now;
        let mut saver = Saver::new(rank.comm())?;
        saver.save(&folder, parts.clone(), &Settings::new())?;
        saver.wait()?;
        Checkpoint::open(&folder)?.load(rank.comm(), &parts)?;
        assert_eq!((ledger.total().now, ledger.total().peak), (before, before));
        Ok(())
    };
    launch::threads(3, run).unwrap();
    std::fs::remove_dir_all(&folder).unwrap();
}

fn few_blocks() {
    let folder = std::env::temp_dir().join(format!("phalanx-memory-{}", std::process::id()));
    let device = Device::Cpu(3);
    let tensor = |value| phalanx_kernels::full(&[BYTES / 4 / 2], value, DType::F32, device).unwrap();
    let parts = [1.0, 2.0].map(|value| ShardedTensor::whole(format!("w{value}"), tensor(value))).to_vec();
    let ledger = device.ledger().unwrap();
    ledger.reset_peak();
    let before = ledger.total().now;
    let mut saver = Saver::new(&comm::meta(0, 1).unwrap()).unwrap();
    let saving = growth(|| {
        saver.save(&folder, parts.clone(), &Settings::new()).unwrap();
        saver.wait().unwrap();
    });
    let loading = growth(|| Checkpoint::open(&folder).unwrap().read(&parts).unwrap());
    std::fs::remove_dir_all(&folder).unwrap();
    assert_eq!((ledger.total().now, ledger.total().peak), (before, before));
    // A block is copied while the one before waits and the one before that is written.
    for (what, grown, blocks) in [("saving", saving, 3), ("loading", loading, 1)] {
        assert!(grown < blocks * BLOCK + SLACK, "{what}: {grown} bytes");
    }
}

/// Checkpoints in memory are two copies while one is made and use the same memory again. Prints what they cost: `cargo test --release -p
/// phalanx-parallel --test checkpoint_memory -- --nocapture`.
fn two_copies() {
    let device = Device::Cpu(3);
    let tensor = |value| phalanx_kernels::full(&[BYTES / 4 / 4], value, DType::F32, device).unwrap();
    let parts = [1.0, 2.0].map(|value| ShardedTensor::whole(format!("w{value}"), tensor(value))).to_vec();
    let (ledger, store) = (device.ledger().unwrap(), MemoryStore::default());
    ledger.reset_peak();
    let before = ledger.total().now;
    let host = Host { machine: "here".into(), process: "this".into() };
    let mut saver = MemorySaver::new(&comm::meta(0, 1).unwrap(), store.clone(), &host, true).unwrap();
    let mut save = || {
        let begin = Instant::now();
        saver.save(parts.clone(), Settings::new()).unwrap();
        saver.wait().unwrap();
        begin.elapsed().as_secs_f64()
    };
    let mut seconds = 0.0;
    let first = growth(|| seconds = save() + save());
    assert!((BYTES..BYTES + SLACK).contains(&first), "{first}");
    let later = growth(|| seconds = save() + save());
    assert!(later < SLACK, "{later}");
    assert_eq!(store.bytes(), BYTES / 2);
    assert_eq!((ledger.total().now, ledger.total().peak), (before, before));
    println!("copies of {BYTES} bytes in memory: {:.1} GB/s", BYTES as f64 / seconds / 1e9);
}
