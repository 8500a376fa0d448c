//! Cuts of every kind, as tensor parallelism and ZeRO make them, read under every other.

use std::ops::Range;

use phalanx_nn::{Parameter, Shard, cut};
use phalanx_parallel::checkpoint::Checkpoint;
use phalanx_parallel::sharded_tensor::ShardedTensor;
use phalanx_parallel::{Result, launch};
use phalanx_tensor::io::SafeTensors;
use phalanx_tensor::{DType, Device, Dims, Tensor, Window};

use crate::{Place, save, settings};

/// A way to cut the tensors: `tp` groups of `dp` ranks.
#[derive(Clone, Copy, Debug)]
struct Cut {
    tp: usize,
    dp: usize,
    /// Whether ranks of a group have shares instead of everything.
    zero: bool,
}

/// The whole tensors: name, shape as tensor parallelism sees it, the dimension it cuts.
const TENSORS: [(&str, &[usize], Option<usize>); 6] = [
    ("table", &[37, 6], Some(0)),
    ("attn.joint", &[3, 10, 5], Some(1)),
    ("attn.out", &[10, 9], Some(1)),
    ("norm", &[29], None),
    ("scalar", &[], None),
    ("empty", &[0, 4], None),
];

fn of(values: Range<usize>, dtype: DType, device: Device) -> Tensor {
    let values: Vec<f32> = values.map(|i| i as f32 + 0.5).collect();
    phalanx_kernels::cast(&Tensor::from_slice(&values, &[values.len()], device).unwrap(), dtype).unwrap()
}

/// What a rank has, with its values or with others.
fn parts(layout: Cut, rank: usize, device: Device, values: bool) -> Vec<ShardedTensor> {
    let (group, member) = (rank % layout.tp, rank / layout.tp);
    let mut parts = Vec::new();
    for (number, (name, shape, dim)) in TENSORS.into_iter().enumerate() {
        let dtype = if number % 2 == 0 { DType::F32 } else { DType::BF16 };
        let (mut offset, mut extent) = (Dims::from_elem(0, shape.len()), Dims::from_slice(shape));
        if let Some(dim) = dim {
            let all = cut(shape[dim], layout.tp);
            (offset[dim], extent[dim]) = (all[group].start, all[group].len());
        }
        let shard = Shard { window: Window { global: Dims::from_slice(shape), offset }, extent };
        let whole = of(0..shape.iter().product(), dtype, device).with_shape(shape).unwrap();
        let mine = shard.of(&whole).unwrap().copy().unwrap();
        let parameter = Parameter::shard(name, mine, shard).unwrap();
        let mut part = ShardedTensor::of_parameter(&parameter);
        if layout.zero {
            let range = cut(part.range.len(), layout.dp)[member].clone();
            let flat = part.values.with_shape(&[part.range.len()]).unwrap();
            part.values = flat.narrow(0, range.start, range.len()).unwrap();
            part.range = range;
        }
        if !values {
            part.values = Tensor::zeros(&[part.values.numel()], dtype, device).unwrap();
        }
        parts.push(part);
    }
    parts
}

fn cuts() -> Vec<Cut> {
    let sizes = [(1, 1), (2, 1), (3, 1), (1, 3), (2, 2), (3, 2), (1, 4), (4, 1)];
    sizes.into_iter().flat_map(|(tp, dp)| [false, true].map(|zero| Cut { tp, dp, zero })).collect()
}

fn write(layout: Cut, folder: &std::path::Path) {
    let run = |rank: launch::Rank| -> Result<()> {
        save(&rank, folder, parts(layout, rank.rank(), rank.device(), true), &settings(1))
    };
    launch::threads(layout.tp * layout.dp, run).unwrap();
}

#[test]
fn every_cut_is_read_under_every_other() {
    let place = Place::new("boxes");
    for (number, from) in cuts().into_iter().enumerate() {
        let folder = place.join(&number.to_string());
        write(from, &folder);
        for to in cuts() {
            let run = |rank: launch::Rank| -> Result<()> {
                let wanted = parts(to, rank.rank(), rank.device(), true);
                let got = parts(to, rank.rank(), rank.device(), false);
                Checkpoint::open(&folder)?.load(rank.comm(), &got)?;
                for (got, wanted) in got.iter().zip(&wanted) {
                    let equal = got.values.to_bytes()? == wanted.values.to_bytes()?;
                    assert!(equal, "{}: {from:?} to {to:?}, rank {}", got.name, rank.rank());
                }
                Ok(())
            };
            launch::threads(to.tp * to.dp, run).unwrap();
        }
    }
}

#[test]
fn what_several_ranks_have_is_written_once_and_by_all_of_them() {
    let place = Place::new("once");
    let folder = place.join("saved");
    write(Cut { tp: 1, dp: 3, zero: false }, &folder);
    let sizes: Vec<u64> = (0..3)
        .map(|rank| std::fs::metadata(folder.join(format!("rank-{rank}.safetensors"))).unwrap().len())
        .collect();
    let elements: Vec<usize> = (0..3).map(|rank| elements(&folder, rank)).collect();
    assert_eq!(elements.iter().sum::<usize>(), 37 * 6 + 150 + 90 + 29 + 1, "{sizes:?}");
    assert!(elements.iter().all(|&n| n > 0), "{elements:?}");
}

/// Elements in a rank's file, by the plain reader.
fn elements(folder: &std::path::Path, rank: usize) -> usize {
    let file = SafeTensors::open(folder.join(format!("rank-{rank}.safetensors"))).unwrap();
    file.names().map(|name| file.shape(name).unwrap().iter().product::<usize>()).sum()
}

#[test]
fn one_ranks_file_is_plain_safetensors() {
    let place = Place::new("plain");
    let folder = place.join("saved");
    write(Cut { tp: 1, dp: 1, zero: false }, &folder);
    let file = SafeTensors::open(folder.join("rank-0.safetensors")).unwrap();
    for part in parts(Cut { tp: 1, dp: 1, zero: false }, 0, Device::CPU, true) {
        if part.values.numel() > 0 {
            let read = file.tensor(&part.name, Device::CPU).unwrap();
            assert_eq!((read.shape(), read.dtype()), (part.values.shape(), part.values.dtype()));
            assert_eq!(read.to_bytes().unwrap(), part.values.to_bytes().unwrap());
        }
    }
}

#[test]
fn a_piece_of_a_layer_reads_only_the_blocks_that_hold_it() {
    let place = Place::new("blocks");
    let folder = place.join("saved");
    write(Cut { tp: 1, dp: 1, zero: false }, &folder);
    // Every byte behind the table's first block is damaged.
    let path = folder.join("rank-0.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let data = 8 + u64::from_le_bytes(*bytes.first_chunk().unwrap()) as usize;
    let saved = Checkpoint::open(&folder).unwrap();
    let header = String::from_utf8(bytes[8..data].to_vec()).unwrap();
    let table = &header[header.find("\"table\"").unwrap()..];
    let offsets = &table[table.find("[").unwrap() + 1..];
    let first: usize = offsets[..offsets.find(',').unwrap()].parse().unwrap();
    bytes.iter_mut().skip(data + first + 64).for_each(|byte| *byte ^= 1);
    std::fs::write(&path, bytes).unwrap();
    let window = Window { global: Dims::from_slice(&[37, 6]), offset: Dims::from_slice(&[1, 0]) };
    let shard = Shard { window, extent: Dims::from_slice(&[2, 6]) };
    let rows = |range: Range<usize>| {
        let values = Tensor::zeros(&[range.len()], DType::F32, Device::CPU).unwrap();
        ShardedTensor { name: "table".into(), shard: shard.clone(), range, values, buffer: false }
    };
    let near = rows(0..10);
    saved.read(std::slice::from_ref(&near)).unwrap();
    assert_eq!(
        near.values.to_vec::<f32>().unwrap(),
        of(6..16, DType::F32, Device::CPU).to_vec::<f32>().unwrap()
    );
    let error = saved.read(&[rows(0..11)]).unwrap_err().to_string();
    assert!(error.contains("table") && error.contains("rank-0.safetensors"), "{error}");
}
