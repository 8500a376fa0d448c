//! Disks that refuse, on one rank of several; an index that was made up.

use std::fs::File;
use std::io;
use std::path::Path;

use phalanx_tensor::{DType, Device, Tensor};

use super::index::{Index, checksum};
use super::saver::Create;
use super::{Checkpoint, Host, MemorySaver, MemoryStore, Saver, Settings};
use crate::sharded_tensor::ShardedTensor;
use crate::{Result, comm, launch};

/// Rank 1's file is made by `create`: returns the error on every rank, and checks that the save before is still there.
fn save_with(name: &str, create: Create) -> Vec<String> {
    let place = std::env::temp_dir().join(format!("phalanx-disk-{}-{name}", std::process::id()));
    let folder = place.join("saved");
    let run = |rank: launch::Rank| -> Result<String> {
        let mut saver = Saver::new(rank.comm())?.with_block(64)?;
        let values = Tensor::zeros(&[5000], DType::F32, Device::CPU)?;
        let parts = || vec![ShardedTensor::whole(format!("w{}", rank.rank()), values.clone())];
        saver.save(&folder, parts(), &Settings::new())?;
        saver.wait()?;
        saver.create = create;
        saver.save(&folder, parts(), &Settings::new())?;
        let heard = saver.wait().unwrap_err().to_string();
        Checkpoint::open(&folder)?.verify()?;
        // A disk that is good again is used again.
        saver.create = |path| File::create_new(path);
        saver.save(&folder, parts(), &Settings::new())?;
        saver.wait()?;
        Ok(heard)
    };
    let heard = launch::threads(3, run).unwrap();
    assert_eq!(std::fs::read_dir(&place).unwrap().count(), 1, "nothing is left behind");
    std::fs::remove_dir_all(&place).unwrap();
    heard
}

fn is_second(path: &Path) -> bool {
    path.ends_with("rank-1.safetensors")
}

#[test]
fn a_file_that_cannot_be_made_is_heard_of_everywhere() {
    let create: Create = |path| match is_second(path) {
        true => Err(io::Error::other("no inodes left")),
        false => File::create_new(path),
    };
    for heard in save_with("made", create) {
        assert!(heard.contains("rank 1") && heard.contains("no inodes left"), "{heard}");
    }
}

#[test]
#[cfg(target_os = "linux")]
fn a_full_disk_is_heard_of_everywhere() {
    let create: Create = |path| match is_second(path) {
        true => File::options().write(true).open("/dev/full"),
        false => File::create_new(path),
    };
    for heard in save_with("full", create) {
        assert!(heard.contains("rank-1.safetensors") && heard.contains("No space left"), "{heard}");
    }
}

#[test]
fn a_file_that_does_not_arrive_is_missed() {
    let create: Create = |path| match is_second(path) {
        true => File::create_new(path.with_extension("elsewhere")),
        false => File::create_new(path),
    };
    for heard in save_with("missed", create) {
        assert!(heard.contains("rank 0") && heard.contains("rank-1.safetensors"), "{heard}");
    }
}

#[test]
fn a_panic_while_saving_ends_all() {
    let place = std::env::temp_dir().join(format!("phalanx-disk-{}-panic", std::process::id()));
    let run = |rank: launch::Rank| -> Result<()> {
        let mut saver = Saver::new(rank.comm())?;
        saver.create = |path| match is_second(path) {
            true => panic!("a panic on purpose"),
            false => File::create_new(path),
        };
        let values = Tensor::zeros(&[5000], DType::F32, Device::CPU)?;
        saver.save(place.join("saved"), vec![ShardedTensor::whole("w", values)], &Settings::new())?;
        saver.wait()
    };
    let error = launch::threads(2, run).unwrap_err().to_string();
    assert!(error.contains("rank 1") && error.contains("panicked"), "{error}");
    std::fs::remove_dir_all(&place).unwrap();
}

#[test]
fn an_index_that_was_made_up_is_refused() {
    let place = std::env::temp_dir().join(format!("phalanx-index-{}", std::process::id()));
    let mut saver = Saver::new(&comm::meta(0, 1).unwrap()).unwrap().with_block(64).unwrap();
    let of = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, Device::CPU).unwrap();
    let parts = vec![
        ShardedTensor::whole("w", of(&[50], DType::F32)),
        ShardedTensor::whole("v", of(&[3, 11], DType::F64)),
    ];
    saver.save(&place, parts, &Settings::new()).unwrap();
    saver.wait().unwrap();
    let text = std::fs::read_to_string(place.join("checkpoint.json")).unwrap();
    std::fs::remove_dir_all(&place).unwrap();
    Index::parse(&text).unwrap();
    let (_, rest) = text.split_once(',').unwrap();
    for (was, is) in [
        ("\"version\":1", "\"version\":2"),
        ("\"block\":64", "\"block\":0"),
        ("\"block\":64", "\"block\":12"),
        ("\"name\":\"rank-0.safetensors\"", "\"name\":\"../rank-0.safetensors\""),
        ("\"name\":\"rank-0.safetensors\"", "\"name\":\"/\""),
        ("\"name\":\"rank-0.safetensors\"", "\"name\":\"..\""),
        ("\"file\":0", "\"file\":9"),
        ("\"shape\":[3,11]", "\"shape\":[3,12]"),
        ("\"shape\":[3,11]", "\"shape\":[18446744073709551615,11]"),
        ("\"end\":50", "\"end\":51"),
        ("\"dtype\":\"f64\"", "\"dtype\":\"f99\""),
        ("\"dtype\":\"f64\"", "\"dtype\":\"f32\""),
        ("\"offset\":[0]", "\"offset\":[1]"),
        ("\"offset\":[0]", "\"offset\":[18446744073709551615]"),
        ("\"offset\":[0]", "\"offset\":[]"),
    ] {
        assert!(rest.contains(was), "{was} in {rest}");
        let rest = rest.replacen(was, is, 1);
        let text = format!("{{\"checksum\":\"{:016x}\",{rest}", checksum(rest.as_bytes()));
        Index::parse(&text).expect_err(is);
    }
}

/// A rank's parts: a tensor that all ranks have alike, a shard, and a buffer that differs between ranks.
fn parts_of(rank: usize, ranks: usize, value: f32) -> Vec<ShardedTensor> {
    let of = |count: usize, first: f32| {
        let values: Vec<f32> = (0..count).map(|i| first + i as f32).collect();
        Tensor::from_slice(&values, &[count], Device::CPU).unwrap()
    };
    let whole = ShardedTensor::whole("alike", of(3, value));
    let shard = ShardedTensor::whole("shard", of(4 * ranks, value));
    let range = 4 * rank..4 * rank + 4;
    let values = of(4, value + 4.0 * rank as f32);
    let buffer =
        ShardedTensor { buffer: true, ..ShardedTensor::whole("buffer", of(2, value + 100.0 * rank as f32)) };
    vec![whole, ShardedTensor { range, values, ..shard }, buffer]
}

fn host(rank: usize) -> Host {
    Host { machine: "here".into(), process: rank.to_string() }
}

/// What ranks hold, and what they read back after the ranks `die`. A copy of a shard and of a buffer is with the next rank, one of what
/// is alike is not sent.
#[test]
fn copies_in_memory_are_read_back_if_one_of_two_holders_lives() {
    let stores: Vec<MemoryStore> = (0..3).map(|_| MemoryStore::default()).collect();
    let save = |rank: launch::Rank| -> Result<usize> {
        let store = &stores[rank.rank()];
        let mut saver = MemorySaver::new(rank.comm(), store.clone(), &host(rank.rank()), true)?;
        for step in 1..4 {
            let settings = Settings::from([("step".into(), step.to_string())]);
            saver.save(parts_of(rank.rank(), 3, step as f32), settings)?;
        }
        saver.wait()?;
        Ok(store.bytes())
    };
    // Floats: 3 that are alike, and twice 4 of a shard and 2 of a buffer.
    assert_eq!(launch::threads(3, save).unwrap(), [4 * (3 + 2 * (4 + 2)); 3]);
    type Read = (Option<String>, Vec<usize>, Vec<usize>, bool);
    let read = |rank: launch::Rank| -> Result<Read> {
        let own = parts_of(rank.rank(), 3, -100.0);
        let found = stores[rank.rank()].restore_parts(rank.comm(), &own)?;
        let bytes = |parts: &[ShardedTensor]| {
            parts.iter().map(|part| part.values.to_vec::<f32>().unwrap()).collect::<Vec<_>>()
        };
        let is_last = bytes(&own) == bytes(&parts_of(rank.rank(), 3, 3.0));
        Ok((found.settings.map(|mut s| s.remove("step").unwrap()), found.lost, found.holders, is_last))
    };
    for (dies, by) in [(None, vec![]), (Some(1), vec![2]), (Some(2), vec![0])] {
        // Those that died before have their copies again.
        launch::threads(3, save).unwrap();
        dies.iter().for_each(|rank: &usize| stores[*rank].clear());
        let wanted = (Some("3".to_string()), Vec::from_iter(dies), by, true);
        assert_eq!(launch::threads(3, read).unwrap(), vec![wanted; 3]);
    }
    [1, 2].iter().for_each(|rank: &usize| stores[*rank].clear());
    let wanted = (None, vec![1, 2], vec![], false);
    assert_eq!(launch::threads(3, read).unwrap(), vec![wanted; 3]);
}
